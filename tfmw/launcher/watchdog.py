"""Detection of tasks that hang, and of tasks that lag behind others.

    watchdog = Watchdog(hang_timeout_s=60, start_timeout_s=120, stopped_timeout_s=5)
    hung = watchdog.check([TaskStatus("worker 0", step=7, reports=8), ...])     # None: no task

Its input is the tasks' progress (`report_progress`), the state of their processes, and a clock.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence

from tfmw.observe.progress import JOINED, NOT_UP, UP

STOPPED_TIMEOUT_S = 5.0
"""Seconds in which a stopped task may continue; TensorFlow's other tasks fail after 10."""

BLOCKING_FACTOR = 10
"""Number of hang time-outs for which a task in a blocking call (`blocking_call`) may be silent."""

LAG_S = 10.0
"""Seconds without progress, while another task progresses, after which the log names a task."""


PAUSE_S = 3.0
"""Seconds between two readings of `RunningTime` that show that this process was paused."""


class RunningTime:
    """A clock that stops while this process and its tasks are paused, as by `docker pause`.

    Args:
        clock: monotonic seconds. It is read several times a second.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._last, self._paused = clock, clock(), 0.0

    def __call__(self) -> float:
        now = self._clock()
        if now - self._last >= PAUSE_S:
            self._paused += now - self._last
        self._last = now
        return now - self._paused


@dataclasses.dataclass(frozen=True)
class TaskStatus:
    """The state of one running task: its name, and its last report (`tfmw.observe.progress`)."""

    task: str
    step: int
    reports: int
    blocked_in: str = ""
    stopped: bool = False  # whether a signal has stopped it
    must_join: bool = True  # whether it must join other tasks before its first step


@dataclasses.dataclass(frozen=True)
class HungTask:
    """A task that hangs."""

    task: str
    reason: str  # one clause: "no progress for 60 s after step 7"
    external: bool = False  # whether a signal stopped it


@dataclasses.dataclass
class Watchdog:
    """Checks all tasks of one attempt, from its start. A limit of 0 disables a check."""

    hang_timeout_s: float  # time without progress, after the first step
    start_timeout_s: float  # time in which every task must start and join
    stopped_timeout_s: float = 0.0  # time in which a stopped task may continue
    lag_s: float = LAG_S
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._began_at = self.clock()
        self._again_at: dict[str, float] = {}  # task that was restarted alone -> when
        # task -> (number of reports, time of the last one)
        self._last: dict[str, tuple[int, float]] = {}
        self._excused_until = 0.0  # time until which a task was in a blocking call
        self._stopped_since: dict[str, float] = {}
        self._reported_lag: dict[str, float] = {}  # straggler -> its lag when it was last reported

    def check(self, statuses: Sequence[TaskStatus]) -> HungTask | None:
        """The task that hangs, or None."""
        now = self.clock()
        for status in statuses:
            if self._last.get(status.task, (-1, 0.0))[0] != status.reports:
                self._last[status.task] = status.reports, now
        return (
            self._stopped(statuses, now) or self._late(statuses, now) or self._silent(statuses, now)
        )

    def forget(self, task: str) -> None:
        """Discards the state of a task that is restarted alone; its time to start begins anew."""
        self._again_at[task] = self.clock()
        for known in (self._last, self._stopped_since, self._reported_lag):
            known.pop(task, None)

    def _stopped(self, statuses: Sequence[TaskStatus], now: float) -> HungTask | None:
        for status in statuses:
            if not status.stopped:
                self._stopped_since.pop(status.task, None)
                continue
            since = self._stopped_since.setdefault(status.task, now)
            if self.stopped_timeout_s and now - since >= self.stopped_timeout_s:
                return HungTask(
                    status.task, f"stopped by a signal for {now - since:.0f} s", external=True
                )
        return None

    def _late(self, statuses: Sequence[TaskStatus], now: float) -> HungTask | None:
        missing = [
            s
            for s in statuses
            if s.step < (JOINED if s.must_join else UP)
            and now - self._again_at.get(s.task, self._began_at) >= self.start_timeout_s
        ]
        if not missing or not self.start_timeout_s:
            return None
        # Started tasks may only be waiting for the one that has not started.
        last = min(missing, key=lambda s: (s.step, self._last[s.task][1]))
        what = "did not start" if last.step == NOT_UP else "did not join the cluster"
        return HungTask(last.task, f"{what} within {self.start_timeout_s:g} s")

    def _silent(self, statuses: Sequence[TaskStatus], now: float) -> HungTask | None:
        if not self.hang_timeout_s:
            return None
        training = [s for s in statuses if s.step >= 0]
        silence = {s.task: now - self._last[s.task][1] for s in training}
        blocked = [s for s in training if s.blocked_in]
        overdue = [s for s in blocked if silence[s.task] >= BLOCKING_FACTOR * self.hang_timeout_s]
        if blocked and not overdue:
            # Other tasks may wait for it: their silence counts from its end.
            self._excused_until = now
            return None
        silent = overdue or [
            s
            for s in training
            if min(silence[s.task], now - self._excused_until) >= self.hang_timeout_s
        ]
        if not silent:
            return None
        # Tasks that wait for a hung one fall silent too, but later or at a later step.
        first = min(silent, key=lambda s: (s.step, self._last[s.task][1]))
        where = f" in {first.blocked_in}" if first.blocked_in else ""
        return HungTask(
            first.task,
            f"no progress for {silence[first.task]:.0f} s{where} after step {first.step}",
        )

    def stragglers(self, statuses: Sequence[TaskStatus]) -> list[str]:
        """Log lines that name stragglers; call it after `check`.

        A straggler is named again when its lag has doubled.
        """
        training = [s for s in statuses if s.step >= 0 and s.task in self._last]
        if len(training) < 2 or any(s.blocked_in for s in training):
            return []
        newest = max(self._last[s.task][1] for s in training)
        lines = []
        for status in training:
            lag = newest - self._last[status.task][1]
            if lag < self.lag_s:
                self._reported_lag.pop(status.task, None)
            elif lag >= 2 * self._reported_lag.get(status.task, 0.0):
                self._reported_lag[status.task] = lag
                ahead = max(s.step for s in training)
                lines.append(
                    f"{status.task} lags: silent for {lag:.0f} s at step {status.step}, "
                    f"while another is at step {ahead}"
                )
        return lines
