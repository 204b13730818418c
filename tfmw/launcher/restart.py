"""What happens after a task has failed: who is started again, when, and when it is enough.

    policy = Policy(Terms(max_restarts=3), workers=2)
    decision = policy.after(End(failures=(failure,), step=120, seconds=12.3))
    if decision.again: ...      # after decision.delay_s, with decision.workers workers

No process and no clock in here: an attempt's end comes in, a decision goes out.

========================  =========================  ===========================================
cluster                   who died                   who is started again
========================  =========================  ===========================================
workers only              worker                     all: collectives can't be rebuilt
with parameter servers    worker                     that worker, at its old address; the chief
                                                     gives its work to others meanwhile
with parameter servers    ps or chief                all: variables are lost, or their names
any                       evaluator                  the evaluator, alone
========================  =========================  ===========================================
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from tfmw.errors import UsageError
from tfmw.launcher.failure import Failure
from tfmw.runtime.signals import LEAVE

Choice = Literal["auto", "on", "off"]

LONGEST_DELAY_S = 30.0

LIVED_S = 60.0
"""A program that reports no progress is taken to have made some after this many seconds."""

FRUITLESS = 2
"""So many attempts in a row without progress are a crash loop."""

PREEMPT_GRACE_S = 30.0


@dataclasses.dataclass(frozen=True)
class Terms:
    """What the user allows and asks for.

    Args:
        max_restarts: how often failed tasks are started again; 0: never.
        min_workers: how few workers may go on where one can't come back; None: all of them.
        monitor_interval_s: seconds between two looks at the tasks.
        hang_timeout_s: seconds without progress, after a task's first step, that end an attempt;
            0: never. Validation and exports report progress too; what a script does for itself
            between or after its steps does not, unless it calls `report_progress`.
        start_timeout_s: seconds until all tasks must be up and have met; 0: no limit.
        preempt_grace_s: seconds in which tasks that are told to leave save their state; None: 30,
            where tasks are known to save it.
        standby: "on": a process that has imported TensorFlow stands by, and tasks are its copies;
            "auto": with several tasks, or restarts, unless TFMW_NO_INIT is 1.
        isolate: "on": the tasks have no network but their own; "auto": where nothing speaks
            against it; see `isolation`.
    """

    max_restarts: int = 0
    min_workers: int | None = None
    monitor_interval_s: float = 0.05
    hang_timeout_s: float = 0.0
    start_timeout_s: float = 120.0
    preempt_grace_s: float | None = None
    standby: Choice = "auto"
    isolate: Choice = "auto"

    def check(self, workers: int) -> None:
        """Raises UsageError where a value can't be, or can't be with this many workers."""
        for name in ("hang_timeout_s", "start_timeout_s", "preempt_grace_s"):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise UsageError(f"{_option(name)} is {value}; expected seconds, at least 0.")
        if not self.monitor_interval_s > 0:
            raise UsageError(
                f"--monitor-interval is {self.monitor_interval_s}; expected seconds, more than 0."
            )
        if self.max_restarts < 0:
            raise UsageError(f"--max-restarts is {self.max_restarts}; expected at least 0.")
        for name in ("standby", "isolate"):
            if getattr(self, name) not in ("auto", "on", "off"):
                raise UsageError(
                    f"{_option(name)} is {getattr(self, name)!r}; expected auto, on or off."
                )
        if self.min_workers is None:
            return
        if not 1 <= self.min_workers <= workers:
            raise UsageError(
                f"--min-workers is {self.min_workers}; expected 1 to {workers}, the number of "
                "workers."
            )
        if not self.max_restarts:
            raise UsageError(
                "--min-workers needs --max-restarts: going on with fewer is a restart."
            )


def _option(field: str) -> str:
    return "--" + field.removesuffix("_s").replace("_", "-")


@dataclasses.dataclass(frozen=True)
class End:
    """How an attempt ended.

    Args:
        failures: tasks that failed on their own, the cause first; none where all was well.
        step: the largest training step that a task has reported; negative: none.
        seconds: how long it took.
        left: whether tasks left with the status that asks to be run again.
        signals: what the launcher itself was sent.
        restarts: tasks that were started again by themselves meanwhile.
    """

    failures: tuple[Failure, ...] = ()
    step: int = -1
    seconds: float = 0.0
    left: bool = False
    signals: tuple[int, ...] = ()
    restarts: int = 0


@dataclasses.dataclass(frozen=True)
class Decision:
    """What to do after an attempt.

    Args:
        again: whether to make another one.
        line: what to tell the user about it; "" for nothing.
        delay_s: seconds to wait before.
        workers: how many.
    """

    again: bool
    line: str = ""
    delay_s: float = 0.0
    workers: int = 0


def alone(kind: str, has_ps: bool) -> bool:
    """Whether a task that died is started again by itself: the table above."""
    return kind == "evaluator" or (kind == "worker" and has_ps)


def backoff_s(nth: int) -> float:
    """Seconds before the nth restart in a row, from 0: 0, 1, 2, 4, 8, 16, 30, 30..."""
    return 0.0 if nth <= 0 else min(LONGEST_DELAY_S, 2.0 ** (min(nth, 10) - 1))


class Policy:
    """Counts, and decides after each attempt.

    Args:
        terms: what the user allows.
        workers: how many workers the run begins with.
    """

    def __init__(self, terms: Terms, workers: int) -> None:
        self._terms = terms
        self._workers = workers
        self._attempt = 0
        self.restarts = 0
        """Restarts so far that count."""
        self._step = -1  # the largest step of all attempts
        self._fruitless = 0  # attempts in a row without progress, or preempted without it
        self._lost: list[str] = []  # of these: what failed before it had reported any step

    def after(self, end: End) -> Decision:
        """The next thing to do, once for each attempt, in order."""
        self._attempt += 1
        if end.signals and not (end.left and not end.failures and end.signals[0] in LEAVE):
            return Decision(False)
        if not end.failures and not end.left:
            return Decision(False)
        progress = end.step > self._step or (end.step < 0 and end.seconds >= LIVED_S)
        self._step = max(self._step, end.step)
        self._fruitless = 0 if progress else self._fruitless + 1
        if end.left and not end.failures:
            return self._after_leaving(end)
        return self._after_failure(end)

    def allows(self, failure: Failure) -> bool:
        """Whether one more restart of a task by itself is within the budget; counts it."""
        if failure.usage or self.restarts >= self._terms.max_restarts:
            return False
        self.restarts += 1
        return True

    def _after_leaving(self, end: End) -> Decision:
        if end.signals or not self._terms.max_restarts:
            return Decision(False)
        delay = backoff_s(self._fruitless)
        return Decision(
            True,
            f"attempt {self._attempt} starts {_in(delay)}: the tasks of attempt "
            f"{self._attempt - 1} saved their state and left after {end.seconds:.1f} s"
            f"{_at(self._step)} (not counted as a restart)",
            delay,
            self._workers,
        )

    def _after_failure(self, end: End) -> Decision:
        cause = end.failures[0]
        if not self._terms.max_restarts or cause.usage:
            return Decision(False)
        self._lost = [*self._lost, cause.task] if cause.step < 0 and self._fruitless else []
        if self.restarts >= self._terms.max_restarts:
            return Decision(False, f"no restart is left of {self._terms.max_restarts}; giving up")
        fewer = self._can_shrink(cause.task)
        if self._fruitless >= FRUITLESS and not fewer:
            return Decision(
                False,
                f"a crash loop: {self._fruitless} attempts in a row made no progress"
                f"{_at(self._step)}; giving up",
            )
        delay = backoff_s(self._fruitless)
        if fewer:
            self._workers -= 1
            self._lost, self._fruitless = [], 0
        self.restarts += 1
        line = (
            f"restart {self.restarts} of {self._terms.max_restarts} {_in(delay)}: {cause.task} "
            f"failed in attempt {self._attempt - 1} after {cause.seconds:.1f} s{_at(self._step)}: "
            f"{cause.what}"
        )
        if fewer:
            line += f"; it did not come back, so {self._workers} go on"
        return Decision(True, line, delay, self._workers)

    def _can_shrink(self, task: str) -> bool:
        """Whether the same worker has died twice before its first step, and fewer may go on."""
        least = self._terms.min_workers
        gone = task.startswith("worker ") and self._lost[-FRUITLESS:] == [task] * FRUITLESS
        return gone and least is not None and self._workers > least


def _in(delay_s: float) -> str:
    return f"in {delay_s:g} s" if delay_s else "at once"


def _at(step: int) -> str:
    return f" at step {step}" if step >= 0 else ""
