"""How an attempt ended, from the reports of its machines."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tfmw.launcher.failure import Failure
from tfmw.launcher.restart import AttemptOutcome
from tfmw.remote.messages import Report


def outcome_of(
    attempt: int, reports: Iterable[Report], failures: Sequence[Failure]
) -> AttemptOutcome:
    """The outcome for the restart policy.

    Args:
        attempt: its number.
        reports: of its machines.
        failures: of all machines, in the order in which the leader learned of them, as clocks
            differ. Those that only report the loss of another task come last in the outcome.
    """
    reports = list(reports)
    return AttemptOutcome(
        failures=tuple(sorted(failures, key=lambda failure: failure.secondary)),
        step=max((report.step for report in reports), default=-1),
        seconds=max((report.seconds for report in reports), default=0.0),
        preempted=any(report.preempted for report in reports),
        attempt=attempt,
    )
