"""How far a task is, in sixteen bytes that the launcher looks at.

    report_progress(1200)                # in the task: 1200 training steps are made

Each task of a launcher has a file of its own, named by TFMW_PROGRESS_FILE, that the launcher has
filled. A report overwrites it: one `pwrite`, about four microseconds, no waiting for a disk. The
launcher sees that a task moves, and from which step a restart goes on; it never waits either.
"""

from __future__ import annotations

import contextlib
import os
import struct
from pathlib import Path
from typing import NamedTuple

PROGRESS_FILE = "TFMW_PROGRESS_FILE"
"""Names the file in the environment of a task: <attempt>/<task>/progress."""

# Before its first step a task reports how far its start has come.
NOT_UP, UP, JOINED = -3, -2, -1

_LAYOUT = struct.Struct("=qq")  # step, number of reports


class Progress(NamedTuple):
    """What a task has reported: its training step, and how many reports there were."""

    step: int = NOT_UP
    reports: int = 0


class _Reporter:
    """This process's file; opened at the first report."""

    def __init__(self) -> None:
        self._path: str | None = None
        self._file = -1
        self._reports = 0

    def report(self, step: int) -> None:
        path = os.environ.get(PROGRESS_FILE)
        if path != self._path:
            self._open(path)
        if self._file < 0:
            return
        self._reports += 1
        with contextlib.suppress(OSError):  # a full disk must not end the training
            os.pwrite(self._file, _LAYOUT.pack(step, self._reports), 0)

    def _open(self, path: str | None) -> None:
        self._path, self._file = path, -1
        if path:
            with contextlib.suppress(OSError):
                self._file = os.open(path, os.O_WRONLY | os.O_CLOEXEC)


_reporter = _Reporter()


def report_progress(step: int) -> None:
    """Tells the launcher that this task moves; call it after each training step, or more often.

    Does nothing in a process that no launcher started. A report with the step of the last one is
    progress too: validation, an export. A task that has reported once and then falls silent for
    `--hang-timeout` seconds is taken to hang.

    Args:
        step: training steps made so far, from the start of the training, at least 0.
    """
    _reporter.report(step)


class ProgressFile:
    """The launcher's side of one task's file.

    Args:
        path: made new, and filled, so that a report never needs space.
    """

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        os.pwrite(self._file, _LAYOUT.pack(*Progress()), 0)
        self._last = Progress()

    def read(self) -> Progress:
        """The last report. After `close`: the one before it."""
        if self._file >= 0:
            with contextlib.suppress(OSError, struct.error):
                self._last = Progress(*_LAYOUT.unpack(os.pread(self._file, _LAYOUT.size, 0)))
        return self._last

    def close(self) -> None:
        """Reads once more, and lets go of the file."""
        self.read()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
