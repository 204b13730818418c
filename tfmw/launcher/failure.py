"""Why a task failed, as text: from its exit status, its recorded error, and its log."""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tfmw.launcher.log_filter import without_notices
from tfmw.launcher.message import informative_part

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


@dataclasses.dataclass(frozen=True)
class Failure:
    """A task that failed, and why.

    Args:
        task: its name, "worker 1".
        error: its own error in one line, "ValueError: bad batch"; "" if it recorded none.
        status: its exit status, -9 for SIGKILL.
        how: the status as text: "exit status 1", "SIGKILL (...)"; "" if the launcher ended it.
        detail: the last lines of its traceback, or of its log.
        log: path of its output; None: it has none.
        seconds: from the start of the task to its failure.
        usage: whether it reported wrong usage or a wrong cluster description.
        attempt: the attempt that it ended.
        step: training steps that the task had reported; negative before the first.
        external: whether the cause lies outside of the program: a signal, or a lost peer.
        secondary: whether the task only reports that it lost a peer.
        host: name of its machine, if the run has several.
    """

    task: str
    error: str = ""
    status: int = 0
    how: str = ""
    detail: tuple[str, ...] = ()
    log: Path | None = None
    seconds: float = 0.0
    usage: bool = False
    attempt: int = 0
    step: int = -1
    external: bool = False
    secondary: bool = False
    host: str = ""

    @property
    def description(self) -> str:
        """Error and status in one line."""
        return f"{self.error} ({self.how})" if self.error and self.how else self.error or self.how


def describe(
    record: Mapping[str, Any] | None, how: str, log: Path
) -> tuple[str, str, tuple[str, ...]]:
    """(error, how, detail) of a Failure.

    Args:
        record: of `record_error`; None if the task recorded no error.
        how: its exit status as text.
        log: path of its output, whose end is shown if it recorded no traceback.
    """
    if record is None:
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
    """The last informative lines of a log; none if it cannot be read."""
    try:
        with open(log, "rb") as file:
            file.seek(max(0, log.stat().st_size - 8192))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return ()
    return tuple(without_notices(text).rstrip().splitlines()[-lines:])


def describe_status(status: int | None, kernel_kills: int = 0) -> str:
    """An exit status as text: "exit status 3", "SIGKILL (killed by someone, ...)".

    Args:
        status: as in subprocess, -9 for SIGKILL.
        kernel_kills: number of processes that the kernel has killed for lack of memory since the
            start of the attempt.
    """
    if status is None:
        return "still running"
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
        record: of `record_error`, in the task.
    """
    if record is not None and record["fatal"]:
        return bool(record["secondary"])
    if status is not None and status < 0:
        return -status not in _OWN_SIGNALS
    return record is not None and bool(record["secondary"])


def kernel_kills(vmstat: Path = Path("/proc/vmstat")) -> int:
    """Number of processes that the kernel has killed for lack of memory; 0 if unknown.

    proc_vmstat(5): "oom_kill 3", since Linux 4.13.
    """
    try:
        for line in vmstat.read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == "oom_kill":
                return int(value)
    except (OSError, ValueError):
        pass
    return 0
