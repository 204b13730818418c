"""An engine: a system that places processes on machines, and accounts for them.

    class Mine(Engine):              # settings, and requests of the caller's process
        def submit(self, spec, payload): ...      # the job, a subclass of `Job`
        def attach(self, number): ...             # the same, from another process

    class MyTasks(Tasks):            # in the controller's process: start tasks, watch, end
        def start(self, layout, contact): ...
        def lost(self): ...
        def end(self): ...

Everything else is shared. `local_jobs.py` is the shortest engine.
"""

from __future__ import annotations

import abc
import dataclasses
import importlib
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from tfmw.cluster.versions import common_versions
from tfmw.errors import UsageError, is_whole
from tfmw.launcher.call import Payload
from tfmw.launcher.engines.job import Job
from tfmw.launcher.options import task_layout
from tfmw.launcher.remote.links import Timing
from tfmw.launcher.remote.messages import Setup

Layout = Sequence[tuple[str, int]]
"""(kind, index) of each task, in the order of the ranks."""

TIMING = Timing(beat_s=2.0, silence_s=20.0, hello_s=10.0)
"""Time limits of the connections between a controller and its tasks."""


@dataclasses.dataclass(frozen=True)
class JobSpec:
    """A job, for the controller; the call itself is sent as the payload."""

    setup: Setup  # setup of each task
    workers: tuple[int, int]  # the least and the largest number of workers
    ps: int = 0  # number of parameter servers; with any, one more task, the chief, coordinates
    evaluator: bool = False
    # Versions that must be the same in every task, by name.
    facts: Mapping[str, str] = dataclasses.field(default_factory=common_versions)
    # Proves to the controller that a task belongs to the job.
    token: str = dataclasses.field(default_factory=lambda: secrets.token_hex(32))

    @property
    def tasks(self) -> tuple[int, int]:
        """The least and the largest number of tasks."""
        least, most = self.workers
        return least + self._others, most + self._others

    def layout(self, count: int) -> list[tuple[str, int]]:
        """(kind, index) of each task of an attempt with `count` tasks."""
        return task_layout(count - self._others, self.ps, self.evaluator)

    @property
    def _others(self) -> int:
        return len(task_layout(1, self.ps, self.evaluator)) - 1


@dataclasses.dataclass(frozen=True)
class Contact:
    """Addresses and token by which a task reaches the controller."""

    hosts: tuple[str, ...]  # names or addresses of its machine, the likeliest first
    port: int
    token: str  # token of the job
    attempt: int  # number of the attempt for which the task is started


class Tasks(abc.ABC):
    """The tasks of one job, used by its controller. No method may wait for long."""

    requeues = False
    """Whether the engine starts the controller again after tasks have saved their state."""

    tells_s = 0.0
    """Seconds after a lost connection within which `lost` has the reason, if it ever has it."""

    why = ""
    """Reason why `available` returns 0, as a clause, if the engine tells it."""

    @abc.abstractmethod
    def hosts(self) -> tuple[str, ...]:
        """Names or addresses by which tasks reach this machine, the likeliest first."""

    def available(self, least: int, most: int) -> int:
        """The number of tasks that can be started now; 0 while the job is queued."""
        return most

    def room(self, most: int) -> int:
        """The number of tasks that have room, including running ones; at most `most`.

        An engine that returns more than the running tasks makes a job with `workers=(2, 8)` grow.
        """
        return 0

    @abc.abstractmethod
    def start(self, layout: Layout, contact: Contact) -> None:
        """Starts the tasks: each calls `agent.run_task` with its rank, its position in `layout`."""

    @abc.abstractmethod
    def lost(self) -> dict[int, str]:
        """Tasks that have ended without a request: {rank: reason, as a clause}."""

    def notices(self) -> dict[int, str]:
        """Tasks whose machine ends soon: {rank: reason, as a clause}; all then save their state.

        A task whose agent gets SIGTERM needs no other notice.
        """
        return {}

    @abc.abstractmethod
    def end(self) -> None:
        """Ends all tasks that were started; returns once none of them runs."""

    def close(self) -> None:  # noqa: B027  (most have nothing to give back)
        """Releases everything that the job holds."""


@dataclasses.dataclass(frozen=True)
class Engine(abc.ABC):
    """A system that runs jobs. The settings of each engine are its fields.

    Args:
        max_restarts: how often `tfmw.fit` restarts all tasks from the newest backup.
    """

    max_restarts: int = 0

    name = ""
    """The part of a job's id before the colon: "slurm" in "slurm:4711"."""

    @property
    def leave_s(self) -> float | None:
        """Seconds in which tasks that are asked to leave must save their state; None: 30."""
        return None

    @abc.abstractmethod
    def submit(self, spec: JobSpec, payload: Payload) -> Job:
        """Starts a job's controller. After an error nothing of the job is left."""

    @abc.abstractmethod
    def attach(self, number: str) -> Job:
        """A job that another process has submitted. Raises UsageError."""

    def numbers(self) -> list[str]:
        """Numbers of the existing jobs, the oldest first."""
        return []

    def unknown_job(self, number: str, place: str) -> UsageError:
        """The error of `attach` for a job that does not exist at a place."""
        known = ", ".join(f"{self.name}:{n}" for n in self.numbers()[-5:]) or "none"
        return UsageError(
            f"there is no job {self.name}:{number} {place}; the last jobs there: {known}. tfmw "
            "jobs lists them."
        )

    def where(self, number: str) -> str:
        """The engine's name of the job for people: "Slurm job 4711", and a dashboard's address."""
        return f"{self.name} job {number}"


def task_range(workers: Any) -> tuple[int, int]:
    """(least, most) of `workers=8` and of `workers=(2, 8)`.

    Raises:
        UsageError: it is neither.
    """
    pair = workers if isinstance(workers, tuple) else (workers, workers)
    if len(pair) != 2 or not all(map(is_whole, pair)) or not 1 <= pair[0] <= pair[1]:
        raise UsageError(
            f"received workers={workers!r}: expected a number of processes, such as 2, or the "
            "least and the largest number, such as (2, 8)."
        )
    return pair


def library(name: str, extra: str = "") -> Any:
    """Imports an engine's library.

    Args:
        name: name of its module.
        extra: name of the engine, if it differs.

    Raises:
        UsageError: the library is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        engine = extra or name
        raise UsageError(
            f"on={engine!r} needs the package {error.name or name}, which is not installed: "
            f"pip install '.[{engine}]' in a clone of tfmw."
        ) from error
