"""Messages between the process that leads an attempt and those that run its tasks.

    data = encode(Ended(attempt=3, report=report))      # bytes: JSON, then a field of bytes
    decode(data)                                        # the same value, or raises Malformed

The shapes are known, and checked field by field. Each of the two kinds of leaders has messages that
the other one does not use.

- Between supervisors: a member sends `HostHello`, `Join`, `Ready`, `Ended`, `RestartRequest` and
  `Leaving`; the leader sends `Start`, `RestartReply`, `End`, `Leave`, `Over` and `Refused`.
- Between an agent and its job's controller: the agent sends `AgentHello`, `Looked`, `Output`,
  `Line`, `StepReached`, `BackupFiles` and `Ended`; the controller sends `Look`, `BackupFiles`,
  `Setup`, `Start`, `End`, `Leave` and `Refused`.
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

from tfmw.launcher.failure import Failure
from tfmw.launcher.options import RunOptions


class Malformed(ValueError):
    """Bytes that are none of the messages."""


@dataclasses.dataclass(frozen=True)
class EndReport:
    """How an attempt ended on one host.

    Attributes:
        done: whether all of its tasks ended with status 0.
        step: the largest training step that a task has reported; negative: none.
        preempted: whether tasks saved their state and exited.
        failures: of tasks that failed on their own, the root cause first.
    """

    done: bool = False
    step: int = -1
    preempted: bool = False
    failures: tuple[Failure, ...] = ()


@dataclasses.dataclass(frozen=True)
class HostHello:
    """The first message of a connection between supervisors.

    Attributes:
        host: index of the host that has connected.
        to: index of the one that it means.
        hosts: addresses of all supervisors.
    """

    host: int
    to: int
    hosts: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Join:
    """A host takes part from now on.

    Attributes:
        facts: what must be the same on every host, by name.
        attempt: the last attempt that it took part in; -1: none.
        step: the largest step in that attempt.
    """

    facts: dict[str, str]
    attempt: int
    step: int


@dataclasses.dataclass(frozen=True)
class Ready:
    """A host can start its tasks.

    Attributes:
        ports: one for each of its tasks.
    """

    ports: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Ended:
    """No task of the attempt runs on this host any more.

    Attributes:
        body: the pickled result of an agent's task.
    """

    attempt: int
    report: EndReport
    body: bytes = b""


@dataclasses.dataclass(frozen=True)
class RestartRequest:
    """A task has died that could restart alone. Its host waits for the `RestartReply`.

    Attributes:
        attempt: that continues meanwhile.
        task: "worker 1".
    """

    attempt: int
    task: str


@dataclasses.dataclass(frozen=True)
class Leaving:
    """This host's supervisor got a signal: save the state, and continue without it."""


@dataclasses.dataclass(frozen=True)
class Start:
    """Start this host's tasks.

    Attributes:
        run: identifies the run.
        attempt: its number.
        hosts: indexes of the hosts that take part.
        cluster: addresses of all tasks by kind, as in TF_CONFIG.
        tasks: (kind, index) of the receiving host's tasks.
        again: how often these tasks have been started before in this attempt.
    """

    run: str
    attempt: int
    hosts: tuple[int, ...]
    cluster: dict[str, tuple[str, ...]]
    tasks: tuple[tuple[str, int], ...]
    again: int = 0


@dataclasses.dataclass(frozen=True)
class RestartReply:
    """Whether a task restarts alone; otherwise the attempt ends.

    Attributes:
        attempt: of the request.
        task: of the request.
        allowed: whether the run has a restart left.
        restarts: how many the run has used up, this one included.
    """

    attempt: int
    task: str
    allowed: bool
    restarts: int


@dataclasses.dataclass(frozen=True)
class End:
    """End the tasks of the attempt at once; from a controller also: it has the result."""

    attempt: int


@dataclasses.dataclass(frozen=True)
class Leave:
    """Have the tasks of the attempt save their state and leave: preemption."""

    attempt: int


@dataclasses.dataclass(frozen=True)
class Over:
    """The run has ended.

    Attributes:
        status: exit status.
        lines: for the user.
    """

    status: int
    lines: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Refused:
    """This host cannot take part."""

    problem: str


@dataclasses.dataclass(frozen=True)
class AgentHello:
    """The first message of an agent.

    Attributes:
        rank: of its task.
        attempt: for which it was started.
        host: name of its machine.
        address: by which other tasks reach it.
        port: that it holds for its task.
        facts: versions that must be the same in all tasks, by name.
    """

    rank: int
    attempt: int
    host: str
    address: str
    port: int
    facts: dict[str, str]


@dataclasses.dataclass(frozen=True)
class Look:
    """Look whether directories are shared.

    Attributes:
        directories: by option.
        names: of the chief's marker files in them, by option; none: make them, as the chief.
        chief: name of that task.
    """

    directories: dict[str, str]
    names: dict[str, str | None]
    chief: str


@dataclasses.dataclass(frozen=True)
class Looked:
    """The names of the marker files by option, and what is wrong with the directories."""

    names: dict[str, str | None]
    problems: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Setup:
    """The job of an agent's task.

    Attributes:
        command: see `tfmw.engines.engine.JobSpec`, also for the next ones.
        env: variables of all tasks.
        own_env: variables of this task.
        options: of the run.
        folder: in which the task starts, where it exists.
        live: whether its output is for a terminal.
        columns: width of the terminal.
        body: the script, for machines that do not have it.
    """

    command: tuple[str, ...]
    env: dict[str, str]
    own_env: dict[str, str]
    options: RunOptions
    folder: str
    live: bool
    columns: int
    body: bytes = b""


@dataclasses.dataclass(frozen=True)
class BackupFiles:
    """A backup of a job without a `backup_dir`.

    Attributes:
        name: of its directory.
        body: the directory as a tar archive.
    """

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
    """The largest training step of a task."""

    step: int


FromMember = Join | Ready | Ended | RestartRequest | Leaving
FromLeader = Start | RestartReply | End | Leave | Over | Refused
FromAgent = AgentHello | Looked | Output | Line | StepReached | BackupFiles | Ended
FromController = Look | Setup | BackupFiles | Start | End | Leave | Refused
Message = HostHello | FromMember | FromLeader | FromAgent | FromController

_BY_NAME: dict[str, type[Any]] = {kind.__name__: kind for kind in typing.get_args(Message)}


def encode(message: Message) -> bytes:
    """Its form on the wire."""
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
    message: Message = _built(kind, content)
    return message


def _built(kind: type[Any], content: Any) -> Any:
    """A dataclass from a JSON object with exactly its fields."""
    hints = typing.get_type_hints(kind)
    if not isinstance(content, Mapping) or set(content) != set(hints):
        raise Malformed(f"{kind.__name__} does not have these fields")
    return kind(**{name: _checked(hints[name], value) for name, value in content.items()})


def _checked(expected: Any, value: Any) -> Any:
    """A JSON value as the type that a field has; tuples are lists there."""
    origin, arguments = typing.get_origin(expected), typing.get_args(expected)
    if dataclasses.is_dataclass(expected):
        return _built(typing.cast(type[Any], expected), value)
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
