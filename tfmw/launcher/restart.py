"""The restart policy: which tasks restart after a failure, when, and when the run ends.

    policy = RestartPolicy(RunOptions(max_restarts=3), workers=2)
    decision = policy.decide(AttemptOutcome(failures=(failure,), step=120, seconds=12.3))
    if decision.restart: ...      # after decision.delay_s, with decision.workers workers

The policy starts no process and reads no clock: it maps an attempt's outcome to a decision.
docs/howto/restarts.md has the tables: which tasks restart, and the cost of each kind of end.

A crash loop is the same error at the same step twice. It is also three attempts in a row that end
without progress because of errors of the program. Progress is a larger step than in any attempt
before.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, Protocol

from tfmw.launcher.failure import Failure
from tfmw.launcher.options import RunOptions
from tfmw.observe.goodput import Division

LONGEST_DELAY_S = 30.0

UPTIME_AS_PROGRESS_S = 60.0
"""Running time that counts as progress for a program that reports no steps."""

ERRORS_WITHOUT_PROGRESS = 3
"""Number of failures in a row without progress, by the program's errors, in a crash loop."""

EARLY_DEATHS = 2
"""Number of deaths in a row before the first step after which `--min-workers` drops a worker."""

# counters of a policy that are saved unchanged
_COUNTS = ("restarts", "step", "stalled", "own_errors")


@dataclasses.dataclass(frozen=True)
class AttemptOutcome:
    """Outcome of an attempt, on one machine or on all of them.

    Args:
        failures: tasks that failed on their own, the root cause first; empty if none did.
        step: the largest training step that a task has reported; negative if none has.
        seconds: duration of the attempt.
        preempted: whether tasks exited with the status that requests another run.
        signals: the signals that the launcher has received.
        attempt: number of the attempt; None: the number after the last one.
        restarted: failures of tasks that were restarted alone.
        done: whether all tasks ended with status 0; serving ones may have been ended.
        division: division of the run's time; None: unknown.
    """

    failures: tuple[Failure, ...] = ()
    step: int = -1
    seconds: float = 0.0
    preempted: bool = False
    signals: tuple[int, ...] = ()
    attempt: int | None = None
    restarted: tuple[Failure, ...] = ()
    done: bool = False
    division: Division | None = None


@dataclasses.dataclass(frozen=True)
class Decision:
    """Action after an attempt.

    Args:
        restart: whether to start another attempt.
        message: message for the user; "" for none.
        delay_s: seconds to wait before the next attempt.
        workers: number of workers of the next attempt.
    """

    restart: bool
    message: str = ""
    delay_s: float = 0.0
    workers: int = 0


def restarts_alone(kind: str, has_ps: bool) -> bool:
    """Whether a dead task restarts alone, because the others can continue without it.

    All tasks restart if collectives cannot be rebuilt, or variables or their names are lost.
    """
    return kind == "evaluator" or (kind == "worker" and has_ps)


def backoff_s(nth: int) -> float:
    """Seconds before the nth restart in a row, from 0: 0, 1, 2, 4, 8, 16, 30, 30..."""
    return 0.0 if nth <= 0 else min(LONGEST_DELAY_S, 2.0 ** (min(nth, 10) - 1))


class Restarts(Protocol):
    """Decides whether single tasks restart; `RestartPolicy` does, and over hosts their leader."""

    restarts: int
    """Number of restarts that the run has used."""

    def allows_restart_alone(self, failure: Failure) -> bool | None:
        """Whether this task restarts alone, which is counted; None: not known yet, ask again."""


@dataclasses.dataclass
class RestartPolicy:
    """Counts restarts, and decides after each attempt."""

    options: RunOptions
    workers: int  # number of workers of the next attempt
    restarts: int = 0  # number of counted restarts so far
    step: int = -1  # the largest step of all attempts
    stalled: int = 0  # number of attempts in a row without progress
    own_errors: int = 0  # number of them that an error of the program ended
    # pairs (error, step) so far
    errors: set[tuple[str, int]] = dataclasses.field(default_factory=set)
    division: Division | None = None  # the run's time so far, if the leading process records it

    def __post_init__(self) -> None:
        self._attempt = 0
        self._early_deaths: list[str] = []  # tasks that failed before any step, in a row

    def decide(self, outcome: AttemptOutcome) -> Decision:
        """Decides after an attempt. Call it once for each attempt, in order."""
        self._attempt = (self._attempt if outcome.attempt is None else outcome.attempt) + 1
        if outcome.signals or not (outcome.failures or outcome.preempted):
            return Decision(False)
        if outcome.step > self.step or _lived(outcome):
            self.stalled = self.own_errors = 0
        else:
            self.stalled += 1
        self.step = max(self.step, outcome.step)
        if outcome.preempted and not outcome.failures:
            return self._after_preemption(outcome)
        return self._after_failure(outcome)

    def saved(self) -> dict[str, Any]:
        """Counters so far, as JSON: another host may have to continue with them."""
        counts = {name: getattr(self, name) for name in _COUNTS}
        division = self.division and list(self.division.values())
        return {**counts, "errors": sorted(map(list, self.errors)), "division": division}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Continues with the counters that `saved` returned on another host."""
        for name in _COUNTS:
            setattr(self, name, int(saved[name]))
        self.division = Division.of(saved["division"]) if saved["division"] else None
        self.errors = {(str(error), int(step)) for error, step in saved["errors"]}

    def allows_restart_alone(self, failure: Failure | None = None) -> bool:
        """Whether `max_restarts` allows one task to restart alone; counts the restart."""
        if (failure and failure.usage) or self.restarts >= self.options.max_restarts:
            return False
        self.restarts += 1
        return True

    def _after_preemption(self, outcome: AttemptOutcome) -> Decision:
        if not self.options.max_restarts:
            return Decision(False)
        delay = backoff_s(self.stalled)
        return Decision(
            True,
            f"attempt {self._attempt} starts {when(delay)}: the tasks of attempt "
            f"{self._attempt - 1} saved their state and exited after {outcome.seconds:.1f} s"
            f"{at_step(self.step)} (not counted as a restart)",
            delay,
            self.workers,
        )

    def _after_failure(self, outcome: AttemptOutcome) -> Decision:
        cause = outcome.failures[0]
        if not self.options.max_restarts or cause.usage:
            return Decision(False)
        early = cause.step < 0 and self.stalled > 0
        self._early_deaths = [*self._early_deaths, cause.task] if early else []
        loop = self._crash_loop(outcome)
        if self.restarts >= self.options.max_restarts:
            return Decision(False, f"no restart is left of {self.options.max_restarts}; giving up")
        fewer = self._can_shrink(cause.task)
        if loop and not fewer:
            return Decision(False, f"a crash loop: {loop}; giving up")
        delay = backoff_s(self.stalled)
        if fewer:
            self.workers -= 1
            self._early_deaths, self.stalled, self.own_errors = [], 0, 0
            self.errors.clear()
        self.restarts += 1
        message = (
            f"restart {self.restarts} of {self.options.max_restarts} {when(delay)}: {cause.task} "
            f"failed in attempt {self._attempt - 1} after {cause.seconds:.1f} s"
            f"{at_step(self.step)}: {cause.description}"
        )
        if fewer:
            message += f"; it did not restart, so {self.workers} continue"
        return Decision(True, message, delay, self.workers)

    def _crash_loop(self, outcome: AttemptOutcome) -> str:
        """Reason why the program is in a crash loop, as a clause; "" if it is not."""
        # If one task was killed from outside, errors of other tasks may be a consequence.
        if any(failure.external for failure in outcome.failures):
            return ""
        if self.stalled:
            self.own_errors += 1
        error = _signature(outcome.failures[0]), max(outcome.step, -1)
        if not _lived(outcome) and error in self.errors:
            return f"the same error twice{at_step(outcome.step) or ' before the first step'}"
        if not _lived(outcome):
            self.errors.add(error)
        if self.own_errors >= ERRORS_WITHOUT_PROGRESS:
            return f"{self.own_errors} errors in a row without progress{at_step(self.step)}"
        return ""

    def _can_shrink(self, task: str) -> bool:
        """Whether the same worker died twice before its first step, and fewer may continue."""
        least = self.options.min_workers
        gone = self._early_deaths[-EARLY_DEATHS:] == [task] * EARLY_DEATHS
        return task.startswith("worker ") and gone and least is not None and self.workers > least


def _lived(outcome: AttemptOutcome) -> bool:
    """Whether an attempt without a reported step ran long enough to count as progress."""
    return outcome.step < 0 and outcome.seconds >= UPTIME_AS_PROGRESS_S


def _signature(failure: Failure) -> str:
    """Identifies an error by its text, without numbers and addresses, which vary."""
    return re.sub(r"0x[0-9a-fA-F]+|\d+", "#", failure.error or failure.how)


def when(delay_s: float) -> str:
    """A delay in words: "at once", "in 4 s"."""
    return f"in {delay_s:g} s" if delay_s else "at once"


def at_step(step: int) -> str:
    """A step in words, " at step 42"; "" if there is none."""
    return f" at step {step}" if step >= 0 else ""
