"""Result of a run: its exit status, and the final lines for the user."""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Sequence
from pathlib import Path

from tfmw.cluster.signals import LEAVE
from tfmw.errors import PREEMPTED
from tfmw.launcher.failure import Failure, describe_status


@dataclasses.dataclass(frozen=True)
class Result:
    """Result of a run.

    Args:
        status: 0 all done; 1 a task failed; 2 a task reported wrong usage or a wrong cluster
            description; 75 the tasks saved their state and exited, and must be run again; 128 + n
            the launcher received signal n.
        tasks: exit status by task name, -9 for SIGKILL, of the last attempt; also of tasks that
            the launcher ended.
        failures: the tasks that failed on their own, if the run failed: the root cause first,
            then other failures of the same attempt, then the causes of later attempts.
        directory: the run's folder; None if it was temporary and is removed.
        attempts: number of times that all tasks were started.
        restarts: restarts, of all tasks or of one, that count against `max_restarts`.
        hint: one more line for the user; "" for none.
        goodput: a line about the run's time, over all attempts; None if no step was made.
        shown: whether the output of the tasks has the traceback of the root cause.
    """

    status: int
    tasks: dict[str, int]
    failures: tuple[Failure, ...]
    directory: Path | None
    attempts: int = 1
    restarts: int = 0
    hint: str = ""
    goodput: str | None = None
    shown: bool = False

    def summary(self) -> list[str]:
        """Lines for the user; the last one has the first failed task and its own error."""
        lines = [self.goodput] if self.goodput else []
        if self.status == PREEMPTED:
            lines.append("the tasks saved their state and exited; the same command resumes the run")
        elif self.status > 128:
            logs = f"; their logs: {self.directory}" if self.directory else ""
            lines.append(f"{describe_status(128 - self.status)}: all tasks were ended{logs}")
        workers = sum(task.startswith("worker ") for task in self.tasks)
        # There are failures only if it was neither.
        about = lines_about(self.failures, self.hint, workers, self.shown)
        return [*(f"tfmw: {line}" for line in lines), *about]


def lines_about(
    failures: Sequence[Failure], hint: str = "", workers: int = 0, shown: bool = False
) -> list[str]:
    """Lines about failures, the root cause first, for the user; see `Result.summary`.

    Args:
        failures: failures of tasks; those with the error of the first one count as one.
        hint: one more line; "" for none.
        workers: number of workers of the run; 0: unknown.
        shown: whether the user has seen the traceback; it is repeated below other errors only.
    """
    if not failures:
        return []
    cause, *others = failures
    several = len({failure.attempt for failure in failures}) > 1
    same = [cause, *(failure for failure in others if _is_same(failure, cause))]
    further = [failure for failure in others if failure not in same]
    lines = [
        f"tfmw: {failure.task} failed too{_in_attempt(failure, several)}: "
        + (f"with the error of {cause.task}" if _is_echo(failure, cause) else failure.description)
        for failure in further
    ]
    if cause.detail and (further or not shown):
        origin = "error" if cause.error else "output"
        lines += [f"tfmw: {origin} of {cause.task}:", *(f"    {line}" for line in cause.detail)]
    lines += [f"tfmw: {hint}"] if hint else []
    if cause.log is not None:
        there = f", on {cause.host}" if cause.host else ""
        lines.append(f"tfmw: log of {cause.task}{there}: {cause.log}")
    first = " first," if further else ""
    on_host = f" on {cause.host}" if cause.host and len(same) == 1 else ""
    names = ", ".join(failure.task for failure in same)
    if workers == len(same) > 1 and all(f.task.startswith("worker ") for f in same):
        names = "both workers" if workers == 2 else f"all {workers} workers"
    lines.append(
        f"tfmw: {names} failed{first}{_in_attempt(cause, several)}{on_host} after "
        f"{cause.seconds:.1f} s: {cause.description}"
    )
    return lines


def _is_same(failure: Failure, cause: Failure) -> bool:
    """Whether two tasks failed with one error in the same attempt."""
    return bool(cause.error) and (failure.error, failure.attempt) == (cause.error, cause.attempt)


def _is_echo(failure: Failure, cause: Failure) -> bool:
    """Whether a task only repeats the error that another one has reported to all."""
    return failure.secondary and bool(cause.error) and cause.error in failure.error


def _in_attempt(failure: Failure, several: bool) -> str:
    return f" in attempt {failure.attempt}" if several else ""


def restart_hint(failures: Sequence[Failure], has_backups: bool) -> str:
    """A line for the user if a run without restarts ends as a task was killed; else ""."""
    if not failures or not failures[0].external:
        return ""
    resumes = "; the same command resumes from the newest backup" if has_backups else ""
    return f"with --max-restarts 3 a new task would have taken its place{resumes}"


def exit_status(
    failures: Sequence[Failure],
    *,
    preempted: bool,
    signals: Sequence[int] = (),
    output_broken: bool = False,
) -> int:
    """Exit status of a run.

    Args:
        failures: failures of its last attempt and of earlier ones.
        preempted: whether tasks of the last attempt saved their state and exited.
        signals: signals that the launcher has received.
        output_broken: whether the reader of the launcher's output has closed it.
    """
    passed_on = {*signals, signal.SIGTERM}
    # A scheduler sends its signal to all processes, so the tasks may die of it too.
    if signals and all(-failure.status in passed_on for failure in failures):
        return PREEMPTED if preempted and signals[0] in LEAVE else 128 + signals[0]
    if failures:
        return 2 if failures[0].usage else 1
    if preempted:
        return PREEMPTED
    return 128 + signal.SIGPIPE if output_broken else 0
