"""Messages between the process that leads an attempt and those that run its tasks.

    data = encode(Ended(attempt=3, report=outcome))      # bytes: JSON, then a field of bytes
    decode(data)                                        # the same value, or raises Malformed

The shapes are known, and checked field by field. `FromMember` and the other unions say which side
of a connection sends which: a supervisor and the one that leads, an agent and its job's controller.
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
    """Bytes that are none of the messages."""


# ---- of supervisors and of agents --------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Start:
    """Start the receiving machine's tasks."""

    run: str  # identifies the run
    attempt: int  # its number
    hosts: tuple[int, ...]  # indexes of the machines that take part
    cluster: dict[str, tuple[str, ...]]  # addresses of all tasks by kind, as in TF_CONFIG
    tasks: tuple[tuple[str, int], ...]  # (kind, index) of the receiving machine's tasks
    again: int = 0  # how often these tasks have been started before in this attempt
    division: Division | None = None  # of the run's time until now; None: nothing is known


@dataclasses.dataclass(frozen=True)
class Leave:
    """Have the tasks of the attempt save their state and leave: preemption."""

    attempt: int


@dataclasses.dataclass(frozen=True)
class End:
    """End the tasks of the attempt at once; from a controller also: it has the result."""

    attempt: int


@dataclasses.dataclass(frozen=True)
class Refused:
    """The sender of a hello or of facts cannot take part."""

    problem: str


@dataclasses.dataclass(frozen=True)
class Ended:
    """No task of the attempt runs here any more; `body`: the pickled result of an agent's task."""

    attempt: int
    report: AttemptOutcome
    body: bytes = b""


# ---- of supervisors ----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class HostHello:
    """The first message between supervisors: from and to which of these hosts, by index."""

    host: int
    to: int
    hosts: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Join:
    """A host takes part from now on."""

    facts: dict[str, str]  # settings that must be the same on every host, by name
    attempt: int  # the last attempt that it took part in; -1: none
    step: int  # the largest step in that attempt
    division: Division | None = None  # of the run's time until its end


@dataclasses.dataclass(frozen=True)
class Ready:
    """A host can start its tasks, which get these ports."""

    ports: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class RestartRequest:
    """A task, such as "worker 1", has died and could restart alone; `RestartReply` decides."""

    attempt: int
    task: str


@dataclasses.dataclass(frozen=True)
class RestartReply:
    """Whether the task restarts alone, or the attempt ends; and the restarts so far, with it."""

    attempt: int
    task: str
    allowed: bool
    restarts: int


@dataclasses.dataclass(frozen=True)
class Leaving:
    """This host's supervisor got a signal: save the state, and continue without it."""


@dataclasses.dataclass(frozen=True)
class Over:
    """The run has ended: the exit status of each supervisor, and lines for the user."""

    status: int
    lines: tuple[str, ...] = ()


# ---- of agents ---------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class AgentHello:
    """The first message of an agent."""

    rank: int  # of its task
    attempt: int  # for which it was started
    host: str  # name of its machine
    address: str  # by which other tasks reach it
    port: int  # that it holds for its task
    facts: dict[str, str]  # versions that must be the same in all tasks, by name


@dataclasses.dataclass(frozen=True)
class Look:
    """Look whether directories are shared."""

    directories: dict[str, str]  # by option
    # The chief's marker files in them, by option; none: make them, as the chief.
    names: dict[str, str | None]
    chief: str  # name of that task


@dataclasses.dataclass(frozen=True)
class Looked:
    """The names of the marker files by option, and problems of the directories."""

    names: dict[str, str | None]
    problems: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Setup:
    """The setup of a job's task."""

    # The arguments of `tfmw.launcher.task`: "call", or "script", its path and its flags.
    command: tuple[str, ...]
    options: RunOptions  # restarts and time limits
    env: dict[str, str] = dataclasses.field(default_factory=dict)  # added for the tasks
    own_env: dict[str, str] = dataclasses.field(default_factory=dict)  # of this task only
    folder: str = ""  # the caller's working directory; tasks start in it where it exists
    live: bool = False  # whether the first task's output is for a terminal or a notebook
    columns: int = 120  # width of it
    body: bytes = b""  # the script, for machines that do not have it


@dataclasses.dataclass(frozen=True)
class BackupFiles:
    """A backup of a job without a `backup_dir`: its name, and its directory as a tar archive."""

    name: str
    body: bytes


@dataclasses.dataclass(frozen=True)
class Output:
    """The next bytes that a task has printed; `final`: the last ones."""

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


FromMember = Join | Ready | Ended | RestartRequest | Leaving
FromLeader = Start | RestartReply | End | Leave | Over | Refused
FromAgent = AgentHello | Looked | Output | Line | StepReached | BackupFiles | Ended
FromController = Look | Setup | BackupFiles | Start | End | Leave | Refused
Message = HostHello | FromMember | FromLeader | FromAgent | FromController

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
        Malformed: there is none of these in them.
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
    """A JSON value as the type that a field has; tuples are lists there."""
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
    if origin is dict and isinstance(value, dict):  # JSON has no other keys than strings
        return {key: _checked(arguments[1], item) for key, item in value.items()}
    if expected is Path and isinstance(value, str):
        return Path(value)
    if expected is float and type(value) is int:
        return float(value)
    if type(value) is expected:
        return value
    raise Malformed(f"{value!r:.40} is no {expected}")
