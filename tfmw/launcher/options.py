"""The user's options of a run: restarts, time limits, standby, the private network."""

from __future__ import annotations

import dataclasses
from typing import Literal

from tfmw.errors import UsageError

AutoOnOff = Literal["auto", "on", "off"]


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """The options of `tfmw run` that concern processes and failures.

    Args:
        max_restarts: how often failed tasks are started again; 0: never.
        min_workers: the least number of workers that may continue if one keeps failing; None: all.
        monitor_interval_s: seconds between two polls of the tasks.
        hang_timeout_s: seconds without progress, after a task's first step, that end an attempt;
            0: never. Validation, prediction, exports and backups report progress too. Other code
            of a script, between or after its steps, must call `report_progress`.
        start_timeout_s: seconds in which all tasks must start and meet; 0: no limit.
        preempt_grace_s: seconds in which tasks save their state after SIGTERM or SIGUSR1; None:
            30, if tasks are known to save it.
        standby: "on": a process imports TensorFlow ahead of time, and tasks are forked from it;
            "auto": with several tasks, or restarts, unless TFMW_NO_INIT is 1.
        isolate: "on": the tasks run in a private network, and download through a proxy; "auto": if
            the system allows it and there are several tasks; see `network`.
        elastic: whether workers train apart, and meet in rounds: one that dies restarts alone.
    """

    max_restarts: int = 0
    min_workers: int | None = None
    monitor_interval_s: float = 0.05
    hang_timeout_s: float = 0.0
    start_timeout_s: float = 120.0
    preempt_grace_s: float | None = None
    standby: AutoOnOff = "auto"
    isolate: AutoOnOff = "auto"
    elastic: bool = False

    def check(self, workers: int) -> None:
        """Raises UsageError for a value that is invalid, or invalid with this many workers."""
        for name in ("hang_timeout_s", "start_timeout_s", "preempt_grace_s"):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise UsageError(f"{_flag(name)} is {value}; expected seconds, at least 0.")
        if not self.monitor_interval_s > 0:
            raise UsageError(
                f"--monitor-interval is {self.monitor_interval_s}; expected seconds, more than 0."
            )
        if self.max_restarts < 0:
            raise UsageError(f"--max-restarts is {self.max_restarts}; expected at least 0.")
        for name in ("standby", "isolate"):
            if getattr(self, name) not in ("auto", "on", "off"):
                raise UsageError(
                    f"{_flag(name)} is {getattr(self, name)!r}; expected auto, on or off."
                )
        if self.min_workers is None:
            return
        if self.elastic:
            raise UsageError(
                "--min-workers and --elastic: elastic workers continue without one that is lost, "
                "in any case. Leave --min-workers out."
            )
        if not 1 <= self.min_workers <= workers:
            raise UsageError(
                f"--min-workers is {self.min_workers}; expected 1 to {workers}, the number of "
                "workers."
            )
        if not self.max_restarts:
            raise UsageError(
                "--min-workers needs --max-restarts: continuing with fewer workers is a restart."
            )


def _flag(field: str) -> str:
    return "--" + field.removesuffix("_s").replace("_", "-")
