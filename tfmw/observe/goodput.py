"""The wall time of a run by its parts, over all of its attempts; "steps" are its goodput.

    with phase("validation"): ...    # in a task: counts as validation, except for inner phases
    moved("data", 0.31)              # moves time of the current part, if that is known only later
    trains_from(1200)                # a training begins or resumes; report_progress counts steps
    line({"worker 0": division()})   # "goodput 81 % of 124.3 s: training 100.7 s, data 3.1 s, ..."

A task stores its division in its progress file, which outlives the task. The next attempt's task
begins with it, and counts the time since then as "restarts". Each instant counts once: for the
innermost phase of the thread that trains. Times are times of day, which hosts share, based on the
clock at the start of the launcher. So later jumps of the clock have no effect.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

PARTS = (
    "steps",
    "data",  # waiting for the next batch
    "compile",  # tracing, and the extra time of the first call of a training
    "validation",
    "backups",  # time in which training waits for them
    "export",
    "start",  # start of the first attempt, until it trains
    "restarts",  # time from a failure until the next attempt trains; steps that are repeated
    "other",  # callbacks, the user's code around the training, the end of the processes
)
STEPS, DATA, START, RESTARTS, OTHER = map(
    PARTS.index, ("steps", "data", "start", "restarts", "other")
)

_SHOWN_S = 0.05  # parts that took less are not shown
_SHORT_S = 60.0  # the goodput of a run that took less tells how long TensorFlow's import took
_SHOWN_AS = {"steps": "training", "start": "start-up"}
_WAITS_LONGER = 0.01  # fraction of the run that a worker must have waited longer to be named


CLOCK_ZERO = "TFMW_CLOCK_ZERO"
"""Variable with the time of day at which the monotonic clock was 0, set by the launcher."""

_zero = time.time() - time.monotonic()


def clock_zero() -> float:
    """The time of day, in seconds, at which the monotonic clock was 0; see `now`."""
    return float(os.environ.get(CLOCK_ZERO) or _zero)


def now() -> float:
    """The time of day, in seconds, without the effect of later jumps of the system's clock.

    A launcher and its tasks have the same.
    """
    return time.monotonic() + clock_zero()


@dataclasses.dataclass(frozen=True)
class Division:
    """The division at one moment; all of its values are floats."""

    seconds: tuple[float, ...] = (0.0,) * len(PARTS)
    at: float = 0.0  # the moment, in seconds of `now`; 0.0: unknown
    part: float = START  # the index of the current part
    steps: float = 0.0  # number of steps so far, in the attempt that has advanced most
    measured: float = 0.0  # whether waits for data were measured; 0.0: "steps" contains them

    def before_a_restart(self) -> Division:
        """The division with which the next attempt begins."""
        return dataclasses.replace(self, part=RESTARTS)

    def values(self) -> tuple[float, ...]:
        """All values in one tuple, for progress files."""
        return (*self.seconds, self.at, self.part, self.steps, self.measured)

    @classmethod
    def of(cls, values: Sequence[float]) -> Division:
        """The inverse of `values`."""
        return cls(tuple(values[: len(PARTS)]), *values[len(PARTS) :])

    def until(self, at: float, part: int | None = None) -> Division:
        """The division at a later moment, if the current or the given part lasts until then."""
        part = int(self.part) if part is None else part
        seconds = list(self.seconds)
        seconds[part] += max(0.0, at - self.at) if self.at else 0.0
        return dataclasses.replace(self, seconds=tuple(seconds), at=at)

    def by_part(self) -> dict[str, float]:
        """Seconds of each part; without "data" if it was not measured."""
        found = dict(zip(PARTS, self.seconds, strict=True))
        if not self.measured:
            del found["data"]
        return found

    def goodput(self) -> float:
        """The fraction of "steps"; 0.0 before any time has passed."""
        return self.seconds[STEPS] / (sum(self.seconds) or 1.0)


def line(by_task: Mapping[str, Division]) -> str | None:
    """One line about a run, with its goodput if it took a minute; None if it has made no step.

    Args:
        by_task: the divisions of the tasks that train; the first one is shown.
    """
    first = next(iter(by_task.values()), Division())
    total = sum(first.seconds)
    if not first.steps or not total:
        return None
    names = _SHOWN_AS if first.measured else {**_SHOWN_AS, "steps": "training with its data"}
    shown = [
        f"{names.get(part, part)} {seconds:.1f} s"
        for part, seconds in first.by_part().items()
        if seconds >= _SHOWN_S
    ]
    goodput = f"goodput {100 * first.goodput():.0f} % of" if total >= _SHORT_S else "took"
    text = f"{goodput} {total:.1f} s: {', '.join(shown)}"
    slowest = max(by_task, key=lambda task: by_task[task].seconds[DATA])
    waited = by_task[slowest].seconds[DATA]
    if waited < first.seconds[DATA] + _WAITS_LONGER * total:
        return text
    return f"{text}; {slowest} waited {waited:.1f} s for data"


class Stopwatch:
    """The current division of this process; `clock` is that of `now`."""

    def __init__(self, clock: Callable[[], float] = now) -> None:
        self._clock = clock
        self._lock = threading.RLock()  # a long call of another thread may report
        self._is_kept = False  # whether a launcher gave this process its first division
        self._begin(Division(at=clock()))

    def _begin(self, division: Division) -> None:
        self._seconds = list(division.seconds)
        self._mark = division.at
        self._base = int(division.part)  # the part outside of phases
        self._phase: int | None = None
        self._thread = 0  # id of the thread of the phase
        self._until = division.steps  # steps up to this one are repeated
        self._before, self._step = 0.0, 0.0  # steps of earlier trainings, and of all so far
        self._counted = self._seconds[STEPS]
        self._measured = division.measured

    def resume(self, division: Division) -> None:
        """Starts from the division that this task's launcher knows."""
        self._is_kept = True
        self._begin(division)

    def division(self) -> Division:
        """The division now."""
        with self._lock:
            now = self._clock()
            self._seconds[self._part] += max(0.0, now - self._mark)
            self._mark = now
            steps = max(self._until, self._step)
            return Division(tuple(self._seconds), now, self._part, steps, self._measured)

    @property
    def _part(self) -> int:
        """The current part."""
        return self._base if self._phase is None else self._phase

    @contextlib.contextmanager
    def phase(self, part: str) -> Iterator[None]:
        """Counts the time of the body as a part. Phases of other threads do not count."""
        own, outer = threading.get_ident(), (self._phase, self._thread)
        if self._thread not in (0, own):
            yield
            return
        self.division()
        self._phase, self._thread = PARTS.index(part), own
        try:
            yield
        finally:
            self.division()
            self._phase, self._thread = outer

    def trains_from(self, step: int) -> None:
        """Records that a training begins at a step, which is 0 unless it resumes."""
        if not self._is_kept:  # the time before a training in a notebook is of no interest
            self._begin(Division(at=self._clock()))
        self.division()
        self._base = OTHER
        self._before = self._step
        self._step = self._before + step
        self._counted = self._seconds[STEPS]

    def step_done(self, step: int) -> None:
        """Records the number of steps of the training."""
        self.division()
        last, self._step = self._step, self._before + step
        if self._phase is None and self._step > last:  # a training loop of the user
            self._base = STEPS
        again = min(self._until, self._step) - last
        if again > 0:
            seconds = self._seconds[STEPS] - self._counted
            self._move(STEPS, RESTARTS, seconds * again / (self._step - last))
        self._counted = self._seconds[STEPS]

    def spent(self) -> float:
        """Seconds so far of the current part."""
        return self.division().seconds[self._part]

    def moved(self, part: str, seconds: float) -> float:
        """Moves time of the current part to another one; returns `seconds`."""
        self._measured = 1.0 if part == "data" else self._measured
        return self._move(self._part, PARTS.index(part), seconds)

    def _move(self, source: int, target: int, seconds: float) -> float:
        with self._lock:
            self._seconds[source] -= seconds
            self._seconds[target] += seconds
        return seconds


stopwatch = Stopwatch()
"""The stopwatch of this process."""

phase, trains_from, division = stopwatch.phase, stopwatch.trains_from, stopwatch.division
spent, moved = stopwatch.spent, stopwatch.moved


def began() -> float:
    """Time at which the run began, with its first attempt, in seconds of time.time()."""
    now = division()
    return now.at - sum(now.seconds)
