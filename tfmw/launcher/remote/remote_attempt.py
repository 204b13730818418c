"""One attempt on several machines, from the leading process's point of view; it has no clock.

    attempt = RemoteAttempt(3, {0, 1}, RunOptions(), name=str, now=0.0)
    attempt.ended(0, report, now=9.0)       # none of its tasks runs any more
    attempt.lost(1, "no sign of life for 3 s", now=9.5)
    attempt.must_end(now=9.5)               # whether the leader must end all tasks
    attempt.running                         # machines whose tasks may run; when empty, judge:
    attempt.outcome(now=9.6)                # for the restart policy

An event has these consequences:

* a task fails, or a machine is lost: all tasks end at once, or after `settle_s` if the failures
  only report a lost task;
* tasks save their state and leave: the others leave at the same step, within the grace period;
* `succeeded`, as the chief is done: serving tasks end by themselves, within a limit. Later failures
  are a consequence.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from tfmw.launcher.failure import Failure
from tfmw.launcher.options import RunOptions
from tfmw.launcher.restart import AttemptOutcome
from tfmw.observe import goodput
from tfmw.observe.goodput import Division


@dataclasses.dataclass(eq=False)
class RemoteAttempt:
    """Collects the ends of all machines' tasks."""

    number: int
    running: set[int]  # machines whose tasks may run
    options: RunOptions
    name: Callable[[int], str]  # name of a machine in failures
    began: float  # monotonic seconds
    settle_s: float = 0.0  # time to wait for the cause if failures only report a lost task
    before: Division | None = None  # division of the run's time until now; None: unknown

    def __post_init__(self) -> None:
        self.reports: dict[int, AttemptOutcome] = {}  # reports of machines whose tasks have ended
        self.step = -1  # the largest known training step; negative: none
        self.end_at = math.inf  # time at which the leader must end the tasks that still run
        self._divisions: dict[int, Division] = {}  # machine -> division of the run's time
        self.has_succeeded = False  # whether the chief is done; later failures do not count
        self._failures: list[Failure] = []

    def reached(self, machine: int, step: int, division: Division | None) -> None:
        """Records that a machine's tasks have made a step."""
        self.step = max(self.step, step)
        if division is not None:
            self._divisions[machine] = division

    def _known(self) -> dict[str, Division]:
        """The divisions by name, the one with the most steps first."""
        found = {
            self.name(machine): self._divisions[machine] for machine in sorted(self._divisions)
        }
        return dict(sorted(found.items(), key=lambda each: -each[1].steps))

    @property
    def division(self) -> Division | None:
        """Division of the run's time so far, for the next attempt."""
        return next((d.before_a_restart() for d in self._known().values()), self.before)

    def goodput(self) -> str | None:
        """Line about the run's time so far."""
        return goodput.line(self._known())

    def ended(self, machine: int, report: AttemptOutcome, now: float, **about: Any) -> None:
        """Records the end of a machine's tasks; `about`: further fields of its failures."""
        self.running.discard(machine)
        self.reports[machine] = report
        self.reached(machine, report.step, report.division)
        for failure in report.failures:
            self.fail(dataclasses.replace(failure, **about), now)
        if report.preempted:
            self.end_by(now + self.options.leave_s)
        elif not report.done and not report.failures and not self.must_end(now):
            how = "was ended before it had saved its state"
            self.fail(self.failure(machine, now, how=how), now)

    def lost(self, machine: int, why: str, now: float) -> None:
        """Records that a machine, or the connection to it, is lost."""
        self.running.discard(machine)
        self.fail(self.failure(machine, now, how=why), now)

    def succeeded(self, now: float, farewell_s: float) -> None:
        """Records that the chief is done; other tasks have some seconds to end by themselves."""
        self.has_succeeded = True
        self.end_by(now + farewell_s)

    def fail(self, failure: Failure, now: float) -> None:
        """Records a failure; one for each task."""
        if self.has_succeeded or failure.task in {known.task for known in self._failures}:
            return
        self._failures.append(failure)
        only_lost = all(known.secondary for known in self._failures)
        self.end_by(now + (self.settle_s if only_lost else 0.0))

    def failure(self, machine: int, now: float, **fields: Any) -> Failure:
        """A failure of a machine, from outside of the program unless `fields` overrides that."""
        known = {"seconds": now - self.began, "step": self.step, "attempt": self.number}
        return Failure(self.name(machine), **{**known, "external": True, **fields})

    def end_by(self, at: float) -> None:
        """Sets a deadline for the end of the tasks."""
        self.end_at = min(self.end_at, at)

    def must_end(self, now: float) -> bool:
        """Whether the leader must end the tasks that still run."""
        return now >= self.end_at

    def outcome(self, now: float) -> AttemptOutcome:
        """Outcome of the attempt.

        Clocks of machines differ, so failures are in the order in which the leader learned of them.
        Failures that only report the loss of another task come last.
        """
        preempted = any(report.preempted for report in self.reports.values())
        only_lost = all(failure.secondary for failure in self._failures)
        return AttemptOutcome(
            failures=()
            if preempted and only_lost
            else tuple(sorted(self._failures, key=lambda failure: failure.secondary)),
            step=self.step,
            seconds=now - self.began,
            preempted=preempted,
            attempt=self.number,
        )
