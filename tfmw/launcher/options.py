"""What a run is: its command and tasks, and the user's options for processes and failures."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Literal, TextIO

from tfmw.errors import UsageError
from tfmw.launcher import call

AutoOnOff = Literal["auto", "on", "off"]

GRACE_S = 1.0
"""Seconds between SIGTERM and SIGKILL. TensorFlow's strategy replaces SIGTERM's handler."""

FAREWELL_S = 10.0
"""Seconds in which serving tasks (ps, and workers beside them) exit once the chief is done."""

PREEMPT_GRACE_S = 30.0
"""Seconds in which tasks save their state and exit: the default of `--preempt-grace`."""


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

    @property
    def leave_s(self) -> float:
        """Seconds in which tasks that are asked to leave save their state and exit."""
        return PREEMPT_GRACE_S if self.preempt_grace_s is None else self.preempt_grace_s

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


@dataclasses.dataclass(frozen=True)
class LocalRun:
    """A command to run, its tasks, and the options of the run.

    Args:
        command: the arguments of `task.py`: "script", its path, its flags.
        tasks: (kind, index) of each task.
        options: restarts, time limits, standby, the private network.
        log_dir: the run's folder is created in it; None: in a temporary directory.
        env: environment variables added for the tasks.
        stdout: the stream for their output.
        live: whether the chief's output is printed without labels; None: if `stdout` is a
            terminal or a notebook.
        grace_s: seconds between SIGTERM and SIGKILL.
        farewell_s: seconds in which serving tasks exit once the chief is done.
        payload: standard input of each task: the function to call; with it each task also has a
            file for its result.
    """

    command: Sequence[str]
    tasks: Sequence[tuple[str, int]]
    options: RunOptions = dataclasses.field(default_factory=RunOptions)
    log_dir: str | os.PathLike[str] | None = None
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    stdout: TextIO = dataclasses.field(default_factory=lambda: sys.stdout)
    live: bool | None = None
    grace_s: float = GRACE_S
    farewell_s: float = FAREWELL_S
    payload: call.Payload | None = None

    @property
    def workers(self) -> int:
        """Number of workers."""
        return sum(kind == "worker" for kind, _ in self.tasks)
