"""Causes of failed tasks: the root cause among them, and its own error as text.

A task that loses a peer fails too, often before the peer has exited. Tasks record their own errors
with times (`record_error`). Errors that only report the loss of a peer are marked as secondary. The
root cause is the earliest failure that is not secondary.
"""

from __future__ import annotations

import dataclasses
import re
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tfmw.errors import PREEMPTED
from tfmw.launcher.output import without_notices
from tfmw.launcher.process import Task
from tfmw.launcher.watchdog import HungTask

MAX_LENGTH = 1000
"""Maximum length of a message; the task's log has all of it."""

_SIGNAL_HINTS = {
    signal.SIGKILL: "killed by someone, or by the kernel because memory ran out",
    signal.SIGSEGV: "a crash in native code",
    signal.SIGABRT: "native code gave up",
}

# TensorFlow's errors if a script builds its own cluster after `tfmw run` has joined one.
_BUILT_TWICE = ("Could not start gRPC server", "Collective ops must be configured at program start")
_BUILT_TWICE_HINT = (
    " (tfmw run joins the cluster before the script: train with tfmw.fit on tfmw's strategy, or "
    "set TFMW_NO_INIT=1 for a script that builds its own strategy or server)"
)

# Signals that a process causes itself by an error; all others come from outside.
_OWN_SIGNALS = {
    signal.SIGABRT,
    signal.SIGBUS,
    signal.SIGFPE,
    signal.SIGILL,
    signal.SIGSEGV,
    signal.SIGSYS,
    signal.SIGTRAP,
}

# Text that TensorFlow and Keras add around an error's message.
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_GENERIC = re.compile(
    r"Graph execution error:|Exception encountered when calling \S+\.$|Node: '|"
    r"<stack traces unavailable>|\[\[\{\{node |\d+ root error\(s\) found\.|0 successful operations"
)
_FRAMES = re.compile(
    r'Traceback \(most recent call last\)|Detected at node |\s*File "|Original stack trace for '
)
_ARGUMENTS = re.compile(r"Arguments received by \S+:$")  # Keras appends them
_NOISE = re.compile(r"\{\{function_node [^}]*\}\}|\[Op:\w+\](?: name:\s*)?")


@dataclasses.dataclass(frozen=True)
class Failure:
    """A task that failed, and the reason."""

    task: str  # name of the task, "worker 1"
    error: str = ""  # its own error in one line, "ValueError: bad batch"; "" if it recorded none
    status: int = 0  # exit status, -9 for SIGKILL
    how: str = ""  # the status as text, "exit status 1"; "" if the launcher ended it
    detail: tuple[str, ...] = ()  # the last lines of its traceback, or of its log
    log: Path | None = None  # file with its output
    seconds: float = 0.0  # seconds from its start to its failure
    usage: bool = False  # whether it reported wrong usage or a wrong cluster description
    attempt: int = 0
    step: int = -1  # number of training steps that it had reported; negative before the first
    external: bool = False  # whether the cause is outside of the program: a signal, or a lost peer
    secondary: bool = False  # whether it only reports that it lost a peer
    host: str = ""  # name of its machine, if the run has several

    @property
    def description(self) -> str:
        """Error and status in one line."""
        return f"{self.error} ({self.how})" if self.error and self.how else self.error or self.how


def kernel_kills(vmstat: Path = Path("/proc/vmstat")) -> int:
    """Number of processes that the kernel has killed for lack of memory; 0 if unknown.

    proc_vmstat(5): "oom_kill 3", since Linux 4.13.
    """
    try:
        found = re.search(r"^oom_kill (\d+)", vmstat.read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) if found else 0


@dataclasses.dataclass
class Diagnosis:
    """Determines the ends of the tasks of one attempt."""

    attempt: int
    # Monotonic seconds when the launcher began to end the tasks, which makes them fail later.
    ended_at: float = float("inf")
    kernel_kills_before: int = dataclasses.field(default_factory=kernel_kills)

    def failed(self, task: Task) -> bool:
        """Whether the task failed on its own, not because the launcher ended it."""
        if task.status is not None and task.ended <= self.ended_at:
            return task.status not in (0, PREEMPTED)
        # The task recorded a fatal error, and may hang at exit in threads or atexit handlers.
        record = task.error()
        return record.get("fatal", False) and record["monotonic"] <= self.ended_at

    def failures(self, tasks: Sequence[Task], hung: HungTask | None) -> tuple[Failure, ...]:
        """The failures of the tasks, the root cause first; `hung`: the watchdog's finding."""
        failed = [(task, task.error()) for task in tasks if self.failed(task)]
        if failed and all(record.get("secondary") for _, record in failed):
            # The cause may be a task that recorded its error and hung instead of exiting.
            others = [(task, task.error()) for task in tasks if not self.failed(task)]
            failed += [(t, r) for t, r in others if r and r["monotonic"] <= self.ended_at]
        failed.sort(key=lambda pair: (pair[1].get("secondary", False), _failed_at(*pair)))
        found = [self.failure(task, record) for task, record in failed]
        if hung is not None:
            task = next(task for task in tasks if task.name == hung.task)
            hang = dataclasses.replace(
                self.failure(task, {}),
                error=hung.reason,
                how="",
                external=hung.external,
                seconds=self.ended_at - task.started,
            )
            found = [hang, *(failure for failure in found if failure.task != hung.task)]
        return tuple(found)

    def failure(self, task: Task, record: Mapping[str, Any]) -> Failure:
        """The failure of one task, from its exit status and its recorded error."""
        # A task that recorded an error and was then killed by the launcher has no status of its
        # own.
        status = task.status if task.ended <= self.ended_at else None
        kills = kernel_kills() - self.kernel_kills_before
        how = "" if status is None else describe_status(status, kills)
        if status == 0:
            how = "caught by the program, which ended with status 0"
        error, how, detail = _described(record, how, task.log)
        return Failure(
            task=task.name,
            error=error,
            status=task.status or 0,
            how=how,
            detail=detail,
            log=task.log,
            seconds=_failed_at(task, record) - task.started,
            usage=record.get("usage", False),
            attempt=self.attempt,
            step=task.progress().step,
            external=is_external(status, record),
            secondary=record.get("secondary", False),
        )


def _failed_at(task: Task, record: Mapping[str, Any]) -> float:
    return record["monotonic"] if record else task.ended


def _described(record: Mapping[str, Any], how: str, log: Path) -> tuple[str, str, tuple[str, ...]]:
    """(error, how, detail) of a Failure; the end of the log if the task recorded no traceback."""
    if not record:
        return "", how, tail(log)
    message = record["message"].strip() or "(no message)"
    short = informative_part(record["message"])
    if record["usage"]:
        return message, how, ()
    if record["type"] != "SystemExit":
        hint = _BUILT_TWICE_HINT if message.startswith(_BUILT_TWICE) else ""
        return (
            f"{record['type']}: {short}{hint}",
            how,
            tuple(record["traceback"].splitlines()[-12:]),
        )
    if message.isdecimal():  # sys.exit(3)
        return "", f"exit status {message}", tail(log)
    return short, how, tail(log)  # sys.exit("no data")


def tail(log: Path, lines: int = 12) -> tuple[str, ...]:
    """The last informative lines of a log; empty if it cannot be read."""
    try:
        with open(log, "rb") as file:
            file.seek(max(0, log.stat().st_size - 8192))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return ()
    return tuple(without_notices(text).rstrip().splitlines()[-lines:])


def describe_status(status: int, kernel_kills: int = 0) -> str:
    """An exit status as text: "exit status 3", "SIGKILL (killed by someone, ...)".

    `kernel_kills` is the number of processes that the kernel has killed for lack of memory since
    the start of the attempt.
    """
    if status >= 0:
        return f"exit status {status}"
    try:
        number = signal.Signals(-status)
    except ValueError:
        return f"signal {-status}"
    hint = _SIGNAL_HINTS.get(number)
    if number == signal.SIGKILL and kernel_kills:
        hint = "out of memory is likely: the kernel killed for lack of memory just now"
    return f"{number.name} ({hint})" if hint else number.name


def is_external(status: int | None, record: Mapping[str, Any] | None) -> bool:
    """Whether a task ended because of a lost peer or of a signal from outside, such as SIGKILL.

    Args:
        status: its own exit status, as in subprocess; None if the launcher ended it.
        record: the record of `record_error` in the task.
    """
    if status is not None and status < 0 and not (record and record["fatal"]):
        return -status not in _OWN_SIGNALS
    return bool(record and record["secondary"])


def informative_part(message: str) -> str:
    """An error's message in one line, without the text that TensorFlow and Keras add around it.

        Graph execution error:

        Detected at node model/embedding/GatherV2 defined at (most recent call last):
          File "train.py", line 28, in <module>

        indices[0,1] = 9 is not in [0, 3)
                 [[{{node model/embedding/GatherV2}}]] [Op:__inference_multi_step_on_iterator_546]

    becomes "indices[0,1] = 9 is not in [0, 3)".

    Returns:
        Up to `MAX_LENGTH` characters; "(no message)" for an empty message.
    """
    lines = _ANSI.sub("", message).splitlines()
    kept = [" ".join(_NOISE.sub("", line).split()) for line in _without_frames(lines)]
    text = " ".join(line for line in kept if line and not _GENERIC.match(line))
    text = text or " ".join(message.split()) or "(no message)"
    return text if len(text) <= MAX_LENGTH else text[: MAX_LENGTH - 3] + "..."


def _without_frames(lines: list[str]) -> list[str]:
    """The lines without stack frames, whose source lines are indented, and without arguments."""
    kept = []
    in_frames = False
    for line in lines:
        if _ARGUMENTS.match(line):
            break
        in_frames = bool(_FRAMES.match(line)) or (
            in_frames and (not line.strip() or line[0].isspace())
        )
        if not in_frames:
            kept.append(line)
    return kept


def why_all_restart(
    failed: Sequence[Task], tasks: Sequence[Task], elsewhere: bool = False
) -> str | None:
    """Reason why killed tasks are not replaced while the others wait, as a clause; or None.

    Args:
        elsewhere: whether other machines have workers.
    """
    others = [task for task in tasks if task not in failed and task.kind != "evaluator"]
    if not (others or elsewhere) or any(task.has_ended() for task in others):
        return "the other workers have ended, too"
    # A worker of another machine has a copy if those that were lost had one.
    known = [*others, *(failed if elsewhere else ())]
    if not any(task.progress().replaceable for task in known):
        return "the workers have no copy of the state in memory"
    return None
