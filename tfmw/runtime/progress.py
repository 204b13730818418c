"""How far a task is, in a small file that the launcher reads.

    report_progress(1200)                # in the task: 1200 training steps are done
    report_alive()                       # a step of validation, which is no training step
    with blocking_call("export"): ...    # one long call that cannot report in between

Each task of a launcher has a file of its own, named by TFMW_PROGRESS_FILE, that the launcher has
filled. A report overwrites it: one `pwrite`, about four microseconds, no waiting for a disk. The
launcher sees that a task moves, and from which step a restart goes on; it never waits either.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PROGRESS_FILE = "TFMW_PROGRESS_FILE"
"""Names the file in the environment of a task: <attempt>/<task>/progress."""

# Before its first step a task reports how far its start has come.
NOT_UP, UP, JOINED = -3, -2, -1

_LAYOUT = struct.Struct("=qq32s")  # step, number of reports, name of a blocking call


class Progress(NamedTuple):
    """What a task has reported last.

    Args:
        step: training steps done; negative: how far its start has come.
        reports: number of reports so far.
        blocked_in: the blocking call that it is in; "" for none.
    """

    step: int = NOT_UP
    reports: int = 0
    blocked_in: str = ""

    def packed(self) -> bytes:
        """As the file has it."""
        return _LAYOUT.pack(self.step, self.reports, self.blocked_in.encode())

    @classmethod
    def unpacked(cls, data: bytes) -> Progress:
        """The inverse of `packed`. Raises struct.error where there are too few bytes."""
        step, reports, blocked_in = _LAYOUT.unpack(data)
        return cls(step, reports, blocked_in.rstrip(b"\0").decode("utf-8", "replace"))


class _Reporter:
    """This process's file; opened at the first report."""

    def __init__(self) -> None:
        self._path: str | None = None
        self._file = -1
        self._last = Progress()
        self.blocking_calls: list[str] = []  # of all threads

    def report(self, step: int | None = None) -> None:
        """Writes a report; None repeats the step of the last one."""
        path = os.environ.get(PROGRESS_FILE)
        if path != self._path:
            self._open(path)
        if self._file < 0:
            return
        last = self._last
        self._last = Progress(
            last.step if step is None else step,
            last.reports + 1,
            self.blocking_calls[-1] if self.blocking_calls else "",
        )
        with contextlib.suppress(OSError):  # a full disk must not end the training
            os.pwrite(self._file, self._last.packed(), 0)

    def _open(self, path: str | None) -> None:
        self._path, self._file = path, -1
        if path:
            with contextlib.suppress(OSError):
                self._file = os.open(path, os.O_WRONLY | os.O_CLOEXEC)


_reporter = _Reporter()


def report_progress(step: int) -> None:
    """Reports to the launcher how far this task is; call it after each training step.

    Does nothing in a process that no launcher started. A task that has reported a step and is then
    silent for `--hang-timeout` seconds is taken to hang.

    Args:
        step: training steps done so far, from the start of the training, at least 0.
    """
    _reporter.report(step)


def report_alive() -> None:
    """Reports that this task moves, at the same training step: in validation, say."""
    _reporter.report()


@contextlib.contextmanager
def blocking_call(name: str) -> Iterator[None]:
    """Marks one long call that cannot report progress: an export, a backup, tracing.

    Inside it a task may be silent for longer, and tasks that wait for it too (see
    `tfmw.launcher.watchdog`).

    Args:
        name: for messages, at most 32 bytes.
    """
    _reporter.blocking_calls.append(name)
    _reporter.report()
    try:
        yield
    finally:
        _reporter.blocking_calls.remove(name)
        _reporter.report()


class ProgressFile:
    """The launcher's side of one task's file.

    Args:
        path: made new, and filled, so that a report never needs space.
    """

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        os.pwrite(self._file, Progress().packed(), 0)
        self._last = Progress()

    def read(self) -> Progress:
        """The last report. After `close`: the one before it."""
        if self._file >= 0:
            with contextlib.suppress(OSError, struct.error):
                self._last = Progress.unpacked(os.pread(self._file, _LAYOUT.size, 0))
        return self._last

    def close(self) -> None:
        """Reads once more, and closes the file."""
        self.read()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
