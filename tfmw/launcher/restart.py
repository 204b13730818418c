"""What happens after a task has failed: which tasks restart, when, and when the run gives up.

    policy = RestartPolicy(RunOptions(max_restarts=3), workers=2)
    decision = policy.decide(AttemptOutcome(failures=(failure,), step=120, seconds=12.3))
    if decision.restart: ...      # after decision.delay_s, with decision.workers workers

No process and no clock in here: an attempt's outcome comes in, a decision goes out.

========================  =========================  ===========================================
cluster                   who died                   who restarts
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

from tfmw.launcher.failure import Failure
from tfmw.launcher.options import RunOptions
from tfmw.runtime.signals import LEAVE

LONGEST_DELAY_S = 30.0

UPTIME_AS_PROGRESS_S = 60.0
"""A program that reports no steps is taken to have made progress after this many seconds."""

FRUITLESS = 2
"""So many attempts in a row without progress are a crash loop."""


@dataclasses.dataclass(frozen=True)
class AttemptOutcome:
    """How an attempt ended.

    Args:
        failures: tasks that failed on their own, the root cause first; none where all ended well.
        step: the largest training step that a task has reported; negative: none.
        seconds: how long it took.
        preempted: whether tasks exited with the status that asks to be run again.
        signals: what the launcher itself got.
    """

    failures: tuple[Failure, ...] = ()
    step: int = -1
    seconds: float = 0.0
    preempted: bool = False
    signals: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Decision:
    """What to do after an attempt.

    Args:
        restart: whether to make another one.
        message: for the user; "" for none.
        delay_s: seconds to wait before it.
        workers: how many workers it has.
    """

    restart: bool
    message: str = ""
    delay_s: float = 0.0
    workers: int = 0


def restarts_alone(kind: str, has_ps: bool) -> bool:
    """Whether a task that died is restarted without the others: the table above."""
    return kind == "evaluator" or (kind == "worker" and has_ps)


def backoff_s(nth: int) -> float:
    """Seconds before the nth restart in a row, from 0: 0, 1, 2, 4, 8, 16, 30, 30..."""
    return 0.0 if nth <= 0 else min(LONGEST_DELAY_S, 2.0 ** (min(nth, 10) - 1))


class RestartPolicy:
    """Counts restarts, and decides after each attempt.

    Args:
        options: what the user allows.
        workers: how many workers the run begins with.
    """

    def __init__(self, options: RunOptions, workers: int) -> None:
        self._options = options
        self._workers = workers
        self._attempt = 0
        self.restarts = 0
        """Restarts so far that count."""
        self._step = -1  # the largest step of all attempts
        self._fruitless = 0  # attempts in a row without progress, or preempted without it
        self._lost: list[str] = []  # of these: what failed before it had reported any step

    def decide(self, outcome: AttemptOutcome) -> Decision:
        """What to do next. Called once for each attempt, in order."""
        self._attempt += 1
        if outcome.signals and not (
            outcome.preempted and not outcome.failures and outcome.signals[0] in LEAVE
        ):
            return Decision(False)
        if not outcome.failures and not outcome.preempted:
            return Decision(False)
        progress = outcome.step > self._step or (
            outcome.step < 0 and outcome.seconds >= UPTIME_AS_PROGRESS_S
        )
        self._step = max(self._step, outcome.step)
        self._fruitless = 0 if progress else self._fruitless + 1
        if outcome.preempted and not outcome.failures:
            return self._after_preemption(outcome)
        return self._after_failure(outcome)

    def allows_restart_alone(self, failure: Failure) -> bool:
        """Whether a task may be restarted alone within the budget; counts it."""
        if failure.usage or self.restarts >= self._options.max_restarts:
            return False
        self.restarts += 1
        return True

    def _after_preemption(self, outcome: AttemptOutcome) -> Decision:
        if outcome.signals or not self._options.max_restarts:
            return Decision(False)
        delay = backoff_s(self._fruitless)
        return Decision(
            True,
            f"attempt {self._attempt} starts {_in(delay)}: the tasks of attempt "
            f"{self._attempt - 1} saved their state and left after {outcome.seconds:.1f} s"
            f"{_at(self._step)} (not counted as a restart)",
            delay,
            self._workers,
        )

    def _after_failure(self, outcome: AttemptOutcome) -> Decision:
        cause = outcome.failures[0]
        if not self._options.max_restarts or cause.usage:
            return Decision(False)
        self._lost = [*self._lost, cause.task] if cause.step < 0 and self._fruitless else []
        if self.restarts >= self._options.max_restarts:
            return Decision(False, f"no restart is left of {self._options.max_restarts}; giving up")
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
            f"restart {self.restarts} of {self._options.max_restarts} {_in(delay)}: {cause.task} "
            f"failed in attempt {self._attempt - 1} after {cause.seconds:.1f} s{_at(self._step)}: "
            f"{cause.description}"
        )
        if fewer:
            line += f"; it did not come back, so {self._workers} go on"
        return Decision(True, line, delay, self._workers)

    def _can_shrink(self, task: str) -> bool:
        """Whether the same worker has died twice before its first step, and fewer may go on."""
        least = self._options.min_workers
        gone = task.startswith("worker ") and self._lost[-FRUITLESS:] == [task] * FRUITLESS
        return gone and least is not None and self._workers > least


def _in(delay_s: float) -> str:
    return f"in {delay_s:g} s" if delay_s else "at once"


def _at(step: int) -> str:
    return f" at step {step}" if step >= 0 else ""
