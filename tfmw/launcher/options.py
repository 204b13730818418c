"""The command and tasks of a run, and the user's options for processes and failures."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Literal, TextIO, get_args

from tfmw.errors import UsageError, is_whole
from tfmw.launcher import call

AutoOnOff = Literal["auto", "on", "off"]

GRACE_S = 1.0
"""Seconds between SIGTERM and SIGKILL. TensorFlow's strategy replaces SIGTERM's handler."""

FAREWELL_S = 10.0
"""Seconds in which serving tasks (ps, and workers beside them) exit once the chief is done."""

PREEMPT_GRACE_S = 30.0
"""Seconds in which tasks save their state and exit: the default of `--preempt-grace`."""


def require(settings: object, *fields: tuple[str, bool, str]) -> None:
    """Raises UsageError for the first of (field, whether it is valid, expectation) that is not."""
    for field, is_valid, expected in fields:
        if not is_valid:
            flag = "--" + field.removesuffix("_s").replace("_", "-")
            raise UsageError(f"{flag} is {getattr(settings, field)!r}; expected {expected}.")


def task_layout(workers: int, ps: int, evaluator: bool) -> list[tuple[str, int]]:
    """(kind, index) of each task of a cluster. Raises UsageError for a wrong number."""
    if not is_whole(workers, 1):
        raise UsageError(f"workers is {workers!r}; expected an integer of at least 1.")
    if not is_whole(ps, 0):
        raise UsageError(f"ps is {ps!r}; expected an integer of at least 0.")
    tasks = [("chief", 0)] if ps else []
    tasks += [("worker", i) for i in range(workers)]
    tasks += [("ps", i) for i in range(ps)]
    tasks += [("evaluator", 0)] if evaluator else []
    return tasks


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """The options of `tfmw run` that concern processes and failures; `tfmw.cli` describes them."""

    max_restarts: int = 0
    min_workers: int | None = None  # None: all workers
    monitor_interval_s: float = 0.05
    # Validation, prediction, exports and backups report progress too. Other code of a script,
    # between or after its steps, must call `report_progress`. 0: no limit.
    hang_timeout_s: float = 0.0
    start_timeout_s: float = 120.0
    preempt_grace_s: float | None = None  # None: 30, if tasks are known to save their state
    standby: AutoOnOff = "auto"  # see `attempts`
    isolate: AutoOnOff = "auto"  # see `network`

    @property
    def leave_s(self) -> float:
        """Seconds in which tasks that are asked to leave must save their state and exit."""
        return PREEMPT_GRACE_S if self.preempt_grace_s is None else self.preempt_grace_s

    def check(self, workers: int) -> None:
        """Raises UsageError for a value that is invalid, or invalid with this many workers."""
        choices = get_args(AutoOnOff)
        require(
            self,
            ("hang_timeout_s", self.hang_timeout_s >= 0, "seconds, at least 0"),
            ("start_timeout_s", self.start_timeout_s >= 0, "seconds, at least 0"),
            ("preempt_grace_s", self.leave_s >= 0, "seconds, at least 0"),
            ("monitor_interval_s", self.monitor_interval_s > 0, "seconds, more than 0"),
            ("max_restarts", self.max_restarts >= 0, "at least 0"),
            ("standby", self.standby in choices, "auto, on or off"),
            ("isolate", self.isolate in choices, "auto, on or off"),
        )
        if self.min_workers is None:
            return
        few = 1 <= self.min_workers <= workers
        require(self, ("min_workers", few, f"1 to {workers}, the number of workers"))
        if not self.max_restarts:
            raise UsageError(
                "--min-workers needs --max-restarts: continuing with fewer workers is a restart."
            )


@dataclasses.dataclass(frozen=True)
class LocalRun:
    """A command to run, its tasks, and the options of the run."""

    command: Sequence[str]  # the arguments of `task.py`: "script", its path, its flags
    tasks: Sequence[tuple[str, int]]  # (kind, index) of each task
    options: RunOptions = dataclasses.field(default_factory=RunOptions)
    # The run's folder is created in it; None: in a temporary directory.
    log_dir: str | os.PathLike[str] | None = None
    # variables added for the tasks
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    # stream for their output
    stdout: TextIO = dataclasses.field(default_factory=lambda: sys.stdout)
    # Whether the chief's output is printed without labels; None: on a terminal or in a notebook.
    live: bool | None = None
    grace_s: float = GRACE_S
    farewell_s: float = FAREWELL_S
    # Standard input of each task: the function to call. Each task then has a file for its result.
    payload: call.Payload | None = None
    stays: bool = False  # whether the tasks run calls that follow, until they are closed
    # A folder that the caller removes at the end; the reaper removes it if the caller is killed.
    scratch: str = ""

    @property
    def workers(self) -> int:
        """Number of workers."""
        return sum(kind == "worker" for kind, _ in self.tasks)
