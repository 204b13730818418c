"""The tasks of an attempt that failed on their own, and the root cause among them.

A task that loses a peer fails too, often before the peer has exited. Tasks record their own errors
with times (`record_error`). Errors that only report the loss of a peer are marked as secondary. The
root cause is the earliest failure that is not secondary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from tfmw.errors import PREEMPTED
from tfmw.launcher.failure import (
    Failure,
    describe,
    describe_status,
    is_external,
    kernel_kills,
)
from tfmw.launcher.process import Task
from tfmw.launcher.watchdog import HungTask


@dataclasses.dataclass
class Diagnosis:
    """Determines how the tasks of one attempt ended.

    Args:
        attempt: its number, from 0.
        kernel_kills_before: number of processes that the kernel had killed for lack of memory
            when the attempt started.

    Attributes:
        ended_at: monotonic seconds when the launcher began to end the tasks; later failures are
            a consequence of that.
    """

    attempt: int
    kernel_kills_before: int = dataclasses.field(default_factory=kernel_kills)
    ended_at: float = float("inf")

    def failed(self, task: Task) -> bool:
        """Whether the task failed on its own, not because the launcher ended it."""
        if task.status is not None and task.ended <= self.ended_at:
            return task.status not in (0, PREEMPTED)
        # It recorded a fatal error, and may hang at exit in threads or atexit handlers.
        record = task.error()
        return record is not None and record["fatal"] and record["monotonic"] <= self.ended_at

    def failures(self, tasks: Sequence[Task], hung: HungTask | None) -> tuple[Failure, ...]:
        """The failures of the tasks, the root cause first.

        Args:
            tasks: of the attempt.
            hung: the task for which the watchdog ended the attempt.
        """
        failed = [(task, task.error()) for task in tasks if self.failed(task)]
        if failed and all(is_secondary(record) for _, record in failed):
            # The cause may be a task that recorded its error and hung instead of exiting.
            failed += [
                (task, record)
                for task in tasks
                if not self.failed(task)
                and (record := task.error()) is not None
                and record["monotonic"] <= self.ended_at
            ]
        failed.sort(key=lambda pair: (is_secondary(pair[1]), _failed_at(*pair)))
        found = [self.failure(task, record) for task, record in failed]
        if hung is not None:
            found = [failure for failure in found if failure.task != hung.task]
            found.insert(0, self._hang(tasks, hung))
        return tuple(found)

    def failure(self, task: Task, record: Mapping[str, Any] | None) -> Failure:
        """How one task failed, from its exit status and its recorded error."""
        # A task that recorded an error and was then killed by the launcher has no own status.
        own = task.status is not None and task.ended <= self.ended_at
        kills = kernel_kills() - self.kernel_kills_before
        how = describe_status(task.status, kills) if own else ""
        error, how, detail = describe(record, how, task.log)
        return Failure(
            task=task.name,
            error=error,
            status=task.status or 0,
            how=how,
            detail=detail,
            log=task.log,
            seconds=_failed_at(task, record) - task.started,
            usage=bool(record and record["usage"]),
            attempt=self.attempt,
            step=task.progress().step,
            external=is_external(task.status if own else None, record),
            secondary=is_secondary(record),
        )

    def _hang(self, tasks: Sequence[Task], hung: HungTask) -> Failure:
        task = next(task for task in tasks if task.name == hung.task)
        return dataclasses.replace(
            self.failure(task, None),
            error=hung.reason,
            how="",
            external=hung.external,
            seconds=self.ended_at - task.started,
        )


def is_secondary(record: Mapping[str, Any] | None) -> bool:
    """Whether a recorded error only reports that a peer was lost."""
    return bool(record and record["secondary"])


def _failed_at(task: Task, record: Mapping[str, Any] | None) -> float:
    return float(record["monotonic"]) if record else task.ended
