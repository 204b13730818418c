"""How an attempt ended, from what its hosts report."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from tfmw.launcher.failure import Failure
from tfmw.launcher.restart import AttemptOutcome
from tfmw.remote.messages import HostFailure, Report


def merged(failures: Sequence[HostFailure]) -> list[HostFailure]:
    """The failures of all hosts, in the order in which the leader learned of them; the cause first.

    Clocks of hosts differ. What only reports the loss of another task comes last.
    """
    return sorted(failures, key=lambda failure: failure.secondary)


def outcome_of(
    attempt: int, reports: Iterable[Report], failures: Sequence[HostFailure]
) -> AttemptOutcome:
    """What the restart policy needs to know."""
    reports = list(reports)
    return AttemptOutcome(
        failures=tuple(
            Failure(
                task=failure.task,
                error=failure.error,
                status=failure.status,
                how=failure.how,
                detail=failure.detail,
                log=Path(failure.log),
                seconds=failure.seconds,
                usage=failure.usage,
                attempt=attempt,
                step=failure.step,
                external=failure.external,
                secondary=failure.secondary,
            )
            for failure in failures
        ),
        step=max((report.step for report in reports), default=-1),
        seconds=max((report.seconds for report in reports), default=0.0),
        preempted=any(report.preempted for report in reports),
        attempt=attempt,
    )


def summary(failures: Sequence[HostFailure], host_name: Callable[[int], str]) -> tuple[str, ...]:
    """Lines for the user; the last one names the first task that failed and its own error."""
    if not failures:
        return ()
    cause = failures[0]
    lines = [f"tfmw: {f.task} failed too: {_description(f)}" for f in failures[1:]]
    if cause.detail:
        origin = "error" if cause.error else "output"
        lines += [f"tfmw: {origin} of {cause.task}:", *(f"    {line}" for line in cause.detail)]
    host = host_name(cause.host)
    lines.append(f"tfmw: log of {cause.task}, on {host}: {cause.log}")
    lines.append(
        f"tfmw: {cause.task} failed{' first,' if failures[1:] else ''} on {host} after "
        f"{cause.seconds:.1f} s: {_description(cause)}"
    )
    return tuple(lines)


def _description(failure: HostFailure) -> str:
    error, how = failure.error, failure.how
    return f"{error} ({how})" if error and how else error or how
