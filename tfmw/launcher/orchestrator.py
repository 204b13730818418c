"""Starts an attempt, watches it, asks the restart policy, and starts the next one.

    orchestrator = Orchestrator(policy, backend)
    while not orchestrator.step(time.monotonic()): ...

The backend knows what an attempt is: the tasks of this machine (`attempts.py`), those of an
engine's job (`engines/controller.py`), or those of several hosts (`hosts/leader.py`).
"""

from __future__ import annotations

import dataclasses
from typing import Generic, Protocol, TypeVar

from tfmw.launcher.failure import Failure
from tfmw.launcher.restart import AttemptOutcome, Decision, RestartPolicy

A = TypeVar("A")

LOOK_S = 0.05
"""Seconds that a backend waits when the next attempt is not due yet."""


class RunOver(Exception):
    """Raised by a backend if the run ends whatever the policy would decide."""


class Backend(Protocol[A]):
    """The operations on attempts of one kind."""

    def begin(self, due: bool, now: float) -> A | None:
        """Starts the next attempt; None if it is not due, or cannot start yet."""

    def is_over(self, attempt: A, now: float) -> bool:
        """Looks at the attempt; whether it is over, or has to be ended."""

    def outcome(self, attempt: A, now: float) -> AttemptOutcome:
        """Ends what still runs of the attempt, and returns how it ended."""

    def judged(self, outcome: AttemptOutcome, decision: Decision) -> None:
        """Receives the decision: another attempt follows, or the run is over."""

    def notify(self, text: str) -> None:
        """Prints a line for the user."""


@dataclasses.dataclass(eq=False)
class Orchestrator(Generic[A]):
    """The attempts of one run."""

    policy: RestartPolicy
    backend: Backend[A]
    attempt: A | None = None  # the one that runs
    over: bool = False
    not_before: float = 0.0  # when the next attempt is due
    _failures: tuple[Failure, ...] = ()
    _failed: bool = False  # the last attempt

    @property
    def failures(self) -> tuple[Failure, ...]:
        """Failures of all attempts, the root cause first; none if the last attempt succeeded."""
        return self._failures if self._failed else ()

    def step(self, now: float) -> bool:
        """Acts once; returns whether the run is over."""
        if self.attempt is None:
            self.attempt = self.backend.begin(now >= self.not_before, now)
        elif self.backend.is_over(self.attempt, now):
            self.judge(self.backend.outcome(self.attempt, now), now)
        return self.over

    def judge(self, outcome: AttemptOutcome, now: float) -> None:
        """Asks the policy what follows an attempt that has ended."""
        self.attempt = None
        failed = outcome.failures
        self._failures += (*outcome.restarted, *(failed[:1] if self._failures else failed))
        self._failed = bool(failed)
        decision = self.policy.decide(outcome)
        if decision.message:
            self.backend.notify(decision.message)
        self.not_before, self.over = now + decision.delay_s, not decision.restart
        self.backend.judged(outcome, decision)
