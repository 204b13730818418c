"""The progress of a task, in a small file that the launcher reads.

    report_progress(1200)                # in the task: 1200 training steps are done
    report_alive()                       # a step of validation, which is not a training step
    with blocking_call("export"): ...    # one long call that cannot report in between

Each task of a launcher has its own file, named by TFMW_PROGRESS_FILE. The launcher creates it at
its full size. A report overwrites it: one `pwrite`, 12 to 21 microseconds, without waiting for the
disk. From it the launcher reads progress, the step that an attempt has reached, and the parts of
the time (`goodput`).
"""

from __future__ import annotations

import contextlib
import os
import struct
import time
from collections.abc import Iterator
from typing import NamedTuple

from tfmw.observe import goodput, recorder, task_process, tracing
from tfmw.observe.goodput import Division

PROGRESS_FILE = "TFMW_PROGRESS_FILE"
"""Variable with the path of a task's file: <attempt>/<task>/progress."""

# Values of `step` before the first step.
NOT_UP, UP, JOINED = -3, -2, -1

AT_THE_END = "the wait for other tasks"
"""The blocking call of a task that is done: it waits for other tasks without limit."""

# The fields of `Progress`, with the values of the last one
_LAYOUT = struct.Struct(f"=qq32sd?{len(Division().values())}d")

# blocking call -> part of the run's time
_PARTS = {"backup": "backups", "export": "export", "tracing": "compile"}

_RATE_S = 15.0  # the rate covers the last 15 to 30 seconds


class Progress(NamedTuple):
    """The last report of a task, the content of its file."""

    step: int = NOT_UP  # training steps done; negative values: the stages of its start
    reports: int = 0  # number of reports so far
    blocked_in: str = ""  # name of the current blocking call; "" for none
    steps_per_s: float = 0.0  # rate of its last training steps; 0.0: unknown
    replaceable: bool = False  # whether other workers wait for a new one if this one is lost
    division: Division = Division()  # division of the run's time

    def packed(self) -> bytes:
        """The report as bytes of the file."""
        name = self.blocked_in.encode()
        values = self.division.values()
        numbers = self.step, self.reports, name, self.steps_per_s, self.replaceable
        return _LAYOUT.pack(*numbers, *values)

    @classmethod
    def unpacked(cls, data: bytes) -> Progress:
        """The inverse of `packed`. Raises struct.error if there are too few bytes."""
        step, reports, blocked_in, rate, replaceable, *values = _LAYOUT.unpack(data)
        name = blocked_in.rstrip(b"\0").decode("utf-8", "replace")
        return cls(step, reports, name, rate, replaceable, Division.of(values))


class _Reporter:
    """This process's file, opened at the first report."""

    def __init__(self) -> None:
        self._path: str | None = None
        self._file = -1
        self._last = Progress()
        self._marks = [(0.0, -1), (0.0, -1)]  # two earlier reports: monotonic seconds, step
        self.replaceable = False
        self.blocking_calls: list[str] = []  # current blocking calls of all threads

    def report(self, step: int | None = None) -> None:
        """Writes a report; None repeats the step of the last one."""
        path = task_process.own_path(PROGRESS_FILE)
        if path != self._path:
            self._open(path)
        if self._file < 0:
            return
        last = self._last
        self._last = Progress(
            last.step if step is None else step,
            last.reports + 1,
            self.blocking_calls[-1] if self.blocking_calls else "",
            last.steps_per_s if step is None else self._rate(step),
            self.replaceable,
            goodput.division(),
        )
        with contextlib.suppress(OSError):  # a full disk must not end the training
            os.pwrite(self._file, self._last.packed(), 0)

    def _rate(self, step: int) -> float:
        now = time.monotonic()
        (since, first), (later, _) = self._marks
        if first < 0 or step < first:  # the first step, or another training
            self._marks = [(now, step), (now, step)]
            return 0.0
        if now - later > _RATE_S:
            self._marks = [self._marks[1], (now, step)]
        return (step - first) / (now - since) if now > since else 0.0

    def _open(self, path: str | None) -> None:
        self._path, self._file = path, -1
        if path:
            with contextlib.suppress(OSError, struct.error):
                self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
                goodput.stopwatch.resume(
                    Progress.unpacked(os.pread(self._file, _LAYOUT.size, 0)).division
                )


_reporter = _Reporter()


def report_progress(step: int) -> None:
    """Reports this task's progress to the launcher; call it after each training step.

    Does nothing in a process that no launcher started. A task that has reported a step, and then
    reports nothing for `--hang-timeout` seconds, is treated as hanging.

    Args:
        step: training steps done so far, from the start of the training, at least 0.
    """
    if step >= 0:
        goodput.stopwatch.step_done(step)
    _reporter.report(step)
    recorder.steps_done(step)
    tracing.at_step(step)


def report_alive() -> None:
    """Reports progress within a training step, for example in validation."""
    _reporter.report()


def report_replaceable(value: bool) -> None:
    """Reports whether the other workers wait for a new one if this one is lost."""
    _reporter.replaceable = value
    _reporter.report()


@contextlib.contextmanager
def blocking_call(name: str) -> Iterator[None]:
    """Marks one long call that cannot report progress: an export, a backup, tracing.

    In the meantime this task, and tasks that wait for it, may be without progress for longer (see
    `tfmw.launcher.watchdog`).

    Args:
        name: name for messages, at most 32 bytes.
    """
    part = _PARTS.get(name)
    with contextlib.nullcontext() if part is None else goodput.phase(part):
        _reporter.blocking_calls.append(name)
        _reporter.report()
        try:
            with tracing.span(tracing.OTHER, name):
                yield
        finally:
            _reporter.blocking_calls.remove(name)
            _reporter.report()
