"""Finds tasks that are alive and don't move, and those that lag.

    watchdog = Watchdog(hang_timeout_s=60, start_timeout_s=120, stopped_timeout_s=5)
    stuck = watchdog.look([Sight("worker 0", step=7, reports=8), ...])     # None: all is well

It sees what tasks report (`report_progress`) and what Linux says of their processes, knows no
process itself, and is told the time: `clock`.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence

from tfmw.runtime.progress import JOINED, NOT_UP, UP

STOPPED_TIMEOUT_S = 5.0
"""Seconds in which a stopped task may be continued. TensorFlow's peers give up after ten."""

LAG_S = 10.0
"""Seconds of silence, while another task goes on, after which a task is named in the log."""


@dataclasses.dataclass(frozen=True)
class Sight:
    """What is to be seen of one running task.

    Args:
        task: its name.
        step: what it has reported last, see `tfmw.runtime.progress`.
        reports: how many reports it has made.
        stopped: whether a signal has stopped it.
        must_join: whether it is to join the others before it does anything else.
    """

    task: str
    step: int
    reports: int
    stopped: bool = False
    must_join: bool = True


@dataclasses.dataclass(frozen=True)
class Stuck:
    """A task that doesn't move; `why` is one clause: "no progress for 60 s after step 7"."""

    task: str
    why: str


class Watchdog:
    """Looks at all tasks of one attempt, from its start.

    Args:
        hang_timeout_s: seconds without progress, after the first step; 0: never mind.
        start_timeout_s: seconds until every task is up and has joined; 0: never mind.
        stopped_timeout_s: seconds in which a stopped task may be continued; 0: never mind.
        lag_s: seconds of silence, while others go on, after which a task is called a straggler.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        hang_timeout_s: float,
        start_timeout_s: float,
        stopped_timeout_s: float = 0.0,
        *,
        lag_s: float = LAG_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._hang_s = hang_timeout_s
        self._start_s = start_timeout_s
        self._stopped_s = stopped_timeout_s
        self._lag_s = lag_s
        self._clock = clock
        self._begin = clock()
        self._moved: dict[str, tuple[int, float]] = {}  # task -> (reports, when they came)
        self._stopped_since: dict[str, float] = {}
        self._named: dict[str, float] = {}  # straggler -> the lag that it was named with

    def look(self, sights: Sequence[Sight]) -> Stuck | None:
        """The task that is to blame where something has to be done, or None."""
        now = self._clock()
        for sight in sights:
            if self._moved.get(sight.task, (-1, 0.0))[0] != sight.reports:
                self._moved[sight.task] = sight.reports, now
        return self._stopped(sights, now) or self._late(sights, now) or self._hung(sights, now)

    def forget(self, task: str) -> None:
        """The task has been started again by itself."""
        self._moved.pop(task, None)
        self._stopped_since.pop(task, None)
        self._named.pop(task, None)

    def _stopped(self, sights: Sequence[Sight], now: float) -> Stuck | None:
        for sight in sights:
            if not sight.stopped:
                self._stopped_since.pop(sight.task, None)
                continue
            since = self._stopped_since.setdefault(sight.task, now)
            if self._stopped_s and now - since >= self._stopped_s:
                return Stuck(sight.task, f"stopped by a signal for {now - since:.0f} s")
        return None

    def _late(self, sights: Sequence[Sight], now: float) -> Stuck | None:
        if not self._start_s or now - self._begin < self._start_s:
            return None
        missing = [s for s in sights if s.step < (JOINED if s.must_join else UP)]
        if not missing:
            return None
        # Those who are up may only wait for the one that is not.
        last = min(missing, key=lambda s: (s.step, self._moved[s.task][1]))
        what = "did not start" if last.step == NOT_UP else "did not join the others"
        return Stuck(last.task, f"{what} within {self._start_s:g} s")

    def _hung(self, sights: Sequence[Sight], now: float) -> Stuck | None:
        if not self._hang_s:
            return None
        silent = [s for s in sights if s.step >= 0 and now - self._moved[s.task][1] >= self._hang_s]
        if not silent:
            return None
        # When one hangs, those that wait for it fall silent too, but later or further on.
        first = min(silent, key=lambda s: (s.step, self._moved[s.task][1]))
        seconds = now - self._moved[first.task][1]
        return Stuck(first.task, f"no progress for {seconds:.0f} s after step {first.step}")

    def stragglers(self, sights: Sequence[Sight]) -> list[str]:
        """Lines that name tasks which lag behind another one. After `look`; each lag once.

        A task is named again when its lag has doubled.
        """
        training = [s for s in sights if s.step >= 0 and s.task in self._moved]
        if len(training) < 2:
            return []
        newest = max(self._moved[s.task][1] for s in training)
        lines = []
        for sight in training:
            lag = newest - self._moved[sight.task][1]
            if lag < self._lag_s:
                self._named.pop(sight.task, None)
            elif lag >= 2 * self._named.get(sight.task, 0.0):
                self._named[sight.task] = lag
                ahead = max(s.step for s in training)
                lines.append(
                    f"{sight.task} lags: silent for {lag:.0f} s at step {sight.step}, "
                    f"while another has come to step {ahead}"
                )
        return lines
