"""Messages between the process that leads an attempt and those that run its tasks.

    data = encode(Ended(attempt=3, report=outcome))      # bytes: JSON, then a field of bytes
    decode(data)                                        # the same value, or raises Malformed

Each field is checked against its declared type.
"""

from __future__ import annotations

import dataclasses
import json
import os
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from tfmw.launcher.options import RunOptions
from tfmw.launcher.restart import AttemptOutcome
from tfmw.observe.goodput import Division


class Malformed(ValueError):
    """Error for bytes that are none of the messages."""


# ---- of supervisors and of agents --------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Start:
    """Request to start the receiving machine's tasks."""

    run: str  # id of the run
    attempt: int  # number of the attempt
    hosts: tuple[int, ...]  # indexes of the machines of the attempt
    cluster: dict[str, tuple[str, ...]]  # addresses of all tasks by kind, as in TF_CONFIG
    tasks: tuple[tuple[str, int], ...]  # (kind, index) of the receiving machine's tasks
    again: int = 0  # number of earlier starts of these tasks in this attempt
    division: Division | None = None  # division of the run's time until now; None: unknown


@dataclasses.dataclass(frozen=True)
class Leave:
    """Request that the tasks of the attempt save their state and leave: preemption."""

    attempt: int


@dataclasses.dataclass(frozen=True)
class End:
    """Request to end the tasks at once; a controller sends it once it has the result."""

    attempt: int


@dataclasses.dataclass(frozen=True)
class Ended:
    """Report that no task of the attempt runs here; `body`: the pickled result of a task."""

    attempt: int
    report: AttemptOutcome
    body: bytes = b""


# ---- of supervisors ----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class HostHello:
    """The first message between supervisors, with the indexes of both hosts."""

    host: int
    to: int
    hosts: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Join:
    """A host joins."""

    facts: dict[str, str]  # settings that must be the same on every host, by name
    attempt: int  # the last attempt of this host; -1: none
    step: int  # the largest step in that attempt
    division: Division | None = None  # division of the run's time until its end


@dataclasses.dataclass(frozen=True)
class Ready:
    """A host can start its tasks, which get these ports."""

    ports: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class RestartRequest:
    """Request to restart a dead task alone, such as "worker 1"; `RestartReply` decides."""

    attempt: int
    task: str


@dataclasses.dataclass(frozen=True)
class RestartReply:
    """Reply whether the task restarts alone, with the number of restarts so far."""

    attempt: int
    task: str
    allowed: bool
    restarts: int


@dataclasses.dataclass(frozen=True)
class Leaving:
    """Notice that this machine got a signal: save the state, and continue without it."""


@dataclasses.dataclass(frozen=True)
class Over:
    """The run has ended: the exit status of each supervisor, and lines for the user."""

    status: int
    lines: tuple[str, ...] = ()


# ---- of agents ---------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class AgentHello:
    """The first message of an agent."""

    rank: int  # rank of its task
    attempt: int  # number of the attempt for which it was started
    host: str  # name of its machine
    address: str  # address by which other tasks reach it
    port: int  # port that it holds for its task
    facts: dict[str, str]  # versions that must be the same in all tasks, by name


@dataclasses.dataclass(frozen=True)
class Setup:
    """The setup of a job's task, and the request to start it."""

    # The arguments of `tfmw.launcher.task`: "call", or "script", its path and its flags.
    command: tuple[str, ...]
    options: RunOptions  # restarts and time limits
    env: dict[str, str] = dataclasses.field(default_factory=dict)  # variables added for the tasks
    start: Start | None = None  # request to start the receiver's task; None: not chosen yet
    own_env: dict[str, str] = dataclasses.field(default_factory=dict)  # variables of this task only
    folder: str = ""  # the caller's working directory, in which tasks start if it exists
    live: bool = False  # whether the first task's output is for a terminal or a notebook
    columns: int = 120  # width of that output
    stays: bool = False  # whether the task waits for `Call`s
    body: bytes = b""  # the script, for machines that do not have it


@dataclasses.dataclass(frozen=True)
class Call:
    """Request to run a packed call in a task that stays."""

    number: int  # number of the call in the job, from 1
    body: bytes


@dataclasses.dataclass(frozen=True)
class Answer:
    """Report that a call of a task that stays is over; `body`: its pickled outcome."""

    number: int
    body: bytes


@dataclasses.dataclass(frozen=True)
class BackupFiles:
    """A backup of a job without a `backup_dir`: its name, and its directory as a tar archive."""

    name: str
    body: bytes


@dataclasses.dataclass(frozen=True)
class Output:
    """The next bytes of a task's output; `final`: the last ones."""

    final: bool
    body: bytes


@dataclasses.dataclass(frozen=True)
class Line:
    """A line of the launcher about its task."""

    text: str


@dataclasses.dataclass(frozen=True)
class StepReached:
    """The largest training step of a task, and its division of the run's time."""

    step: int
    division: Division | None = None


# ---- of a job's files --------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class FileRequest:
    """Request to read a part of a file, or to write it; without `offset`, the whole file."""

    name: str
    offset: int | None
    write: bool
    body: bytes = b""


@dataclasses.dataclass(frozen=True)
class FileReply:
    """The part of the file, or the reason why there is none."""

    error: str = ""
    body: bytes = b""


FromMember = Join | Ready | Ended | RestartRequest | Leaving
"""Messages of a supervisor to the leading one."""

FromLeader = Start | Call | RestartReply | Leave | End
"""Requests of the leading process to the tasks of a machine."""

OfRun = FromMember | HostHello | Start | RestartReply | End | Leave | Over
OfJob = AgentHello | Setup | Call | Answer | BackupFiles | Output | Line | StepReached
Message = OfRun | OfJob | FileRequest | FileReply

_BY_NAME: dict[str, type[Any]] = {kind.__name__: kind for kind in typing.get_args(Message)}


def encode(message: Message) -> bytes:
    """The message as bytes."""
    fields = {"is": type(message).__name__, **dataclasses.asdict(message)}
    body: bytes = fields.pop("body", b"")
    head = json.dumps(fields, default=os.fspath).encode()  # without line breaks
    return b"\n".join((head, body)) if body else head


def decode(data: bytes) -> Message:
    """The message in the bytes.

    Raises:
        Malformed: they are none of the messages.
    """
    head, _, body = data.partition(b"\n")
    try:
        content = json.loads(head)
    except (ValueError, RecursionError) as error:
        raise Malformed("no JSON") from error
    if not isinstance(content, dict):
        raise Malformed("no JSON object")
    kind = _BY_NAME.get(str(content.pop("is", "")))
    if kind is None:
        raise Malformed("no message of this name")
    if any(field.name == "body" for field in dataclasses.fields(kind)):
        content["body"] = body
    message: Message = built(kind, content)
    return message


def built(kind: type[Any], content: Any) -> Any:
    """A dataclass from a JSON object with exactly its fields. Raises Malformed."""
    hints = typing.get_type_hints(kind)
    if not isinstance(content, Mapping) or set(content) != set(hints):
        raise Malformed(f"{kind.__name__} does not have these fields")
    return kind(**{name: _checked(hints[name], value) for name, value in content.items()})


def _checked(expected: Any, value: Any) -> Any:
    """A JSON value converted to the type of a field; lists become tuples."""
    origin, arguments = typing.get_origin(expected), typing.get_args(expected)
    if expected is Any:
        return value
    if dataclasses.is_dataclass(expected):
        return built(typing.cast(type[Any], expected), value)
    if origin is Literal and value in arguments:
        return value
    if origin is types.UnionType:  # "int | None"
        return None if value is None else _checked(arguments[0], value)
    if origin is tuple and isinstance(value, list):
        if arguments[-1] is Ellipsis:
            return tuple(_checked(arguments[0], item) for item in value)
        if len(arguments) == len(value):
            return tuple(_checked(a, item) for a, item in zip(arguments, value, strict=True))
    if origin is dict and isinstance(value, dict):  # JSON keys are always strings
        return {key: _checked(arguments[1], item) for key, item in value.items()}
    if expected is Path and isinstance(value, str):
        return Path(value)
    if expected is float and type(value) is int:
        return float(value)
    if type(value) is expected:
        return value
    raise Malformed(f"{value!r:.40} is no {expected}")
