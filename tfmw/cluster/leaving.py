"""End of synchronous workers: all end together, however long one of them is busy.

    with shared_call(): ...      # around code that all tasks enter, in the same order
    Departure(cluster, fail).wait()  # at exit: until all tasks are at their end

TensorFlow treats the exit of one task as a failure of the others. So each task announces its end,
and exits when all have announced theirs. A task that waits in a shared call for a task that has
announced its end would wait for ever. A thread detects this, and all tasks fail with one sentence.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfmw.cluster import Cluster
from tfmw.compat import runtime
from tfmw.errors import UsageError
from tfmw.observe.progress import AT_THE_END, blocking_call
from tfmw.observe.stacks import users_call

_LOOK_S = 2.0  # seconds between two checks for ended tasks, in a task that waits as long
_SLICE_S = 5.0  # duration of a wait at the end, after which the missing tasks are probed
_AT_ONCE_S = 0.2  # time to read a key that is already set
_BARRIER_S = 60.0  # time for the barrier of tasks that are all at their end

_ENDED, _ALL_ENDED, _LEFT = "tfmw/ended", "tfmw/all_ended", "tfmw/left"


@dataclasses.dataclass
class _Calls:
    """The shared calls of this process."""

    completed: int = 0  # number of ended calls; equal on all tasks that wait for none
    # monotonic seconds when the current call began; None if there is none
    since: float | None = None
    thread: int = 0  # id of the thread that makes the call
    problem: UsageError | None = None  # reason why the call will never end, if it will not


_calls = _Calls()


@contextlib.contextmanager
def shared_call() -> Iterator[None]:
    """Marks a call that all tasks must make; a call inside another one is a part of it.

    Raises:
        UsageError: a task has ended without this call.
    """
    if _calls.since is not None:
        yield
        return
    _calls.thread, _calls.since = threading.get_ident(), time.monotonic()
    try:
        yield
        _calls.completed += 1
    except Exception:
        _calls.completed += 1  # if all tasks fail alike, they may continue alike
        if _calls.problem is not None:
            raise _calls.problem from None
        raise
    finally:
        _calls.since = None


def calls() -> int:
    """The number of shared calls that this process has completed."""
    return _calls.completed


def look() -> None:
    """Raises UsageError if the current shared call waits for a task that has ended."""
    if _calls.problem is not None:
        raise _calls.problem


class Departure:
    """The coordinated end of this task.

    Args:
        cluster: a cluster of synchronous workers.
        fail: reports an error to all tasks, and ends this task's collectives.
    """

    def __init__(self, cluster: Cluster, fail: Callable[[UsageError], None]) -> None:
        self._names = list(cluster.tasks("chief", "worker"))  # names in order of rank
        jobs = [name.partition(" ") for name in self._names]
        self._tasks = [f"/job:{job}/replica:0/task:{index or 0}" for job, _, index in jobs]
        self._rank = cluster.rank
        self._fail = fail
        threading.Thread(target=self._look, name="tfmw-ended", daemon=True).start()

    def wait(self) -> None:
        """Announces the end of this task, and returns once all tasks have ended.

        Raises:
            tf.errors.OpError: a task was lost, or has failed.
        """
        with blocking_call(AT_THE_END):
            entry = json.dumps({"rank": self._rank, "completed": _calls.completed})
            for place in itertools.count():
                with contextlib.suppress(tf.errors.AlreadyExistsError):
                    runtime.coordination_set(f"{_ENDED}/{place}", entry)
                    break
            if self._rank == 0:
                missing = set(range(1, len(self._tasks)))
                for place in range(len(self._tasks)):
                    missing.discard(self._get(f"{_ENDED}/{place}", missing)["rank"])
                runtime.coordination_set(_ALL_ENDED, json.dumps(None))
            else:
                self._get(_ALL_ENDED, {0})
            try:
                runtime.coordination_barrier("tfmw/leave", _BARRIER_S)
            except tf.errors.OpError:
                self._leave_one_by_one()

    def _leave_one_by_one(self) -> None:
        """Makes the first task wait until the others know that all have ended.

        After a pause of all processes longer than the heartbeats, the coordination service treats
        every task as lost. It still serves its keys, but no barrier, and it ends with the first
        task.
        """
        if self._rank > 0:
            runtime.coordination_set(f"{_LEFT}/{self._rank}", json.dumps(None))
            return
        for rank in range(1, len(self._tasks)):
            runtime.coordination_get(f"{_LEFT}/{rank}", _SLICE_S)

    def _get(self, key: str, awaited: set[int]) -> Any:
        """Waits for a key without limit, as long as the tasks that must set it are alive."""
        while True:
            with contextlib.suppress(tf.errors.DeadlineExceededError):
                return json.loads(runtime.coordination_get(key, _SLICE_S))
            for rank in awaited:
                runtime.require_task(self._tasks[rank], _SLICE_S)

    def _look(self) -> None:
        """Ends a shared call that waits for a task which has ended without it; runs in a thread."""
        # tasks that completed this call, but not the next one, are included
        ended: list[dict[str, int]] = []
        while True:
            time.sleep(_LOOK_S)
            since, number = _calls.since, _calls.completed + 1
            if since is None or time.monotonic() - since < _LOOK_S:
                continue
            try:
                with contextlib.suppress(tf.errors.DeadlineExceededError):
                    while True:
                        key = f"{_ENDED}/{len(ended)}"
                        ended.append(json.loads(runtime.coordination_get(key, _AT_ONCE_S)))
            except tf.errors.OpError:
                return  # the call fails by itself
            without = [entry["rank"] for entry in ended if entry["completed"] < number]
            if without and _calls.completed + 1 == number and _calls.since is not None:
                _calls.problem = self._problem(without[0])
                self._fail(_calls.problem)
                return

    def _problem(self, ended: int) -> UsageError:
        call = users_call(sys._current_frames().get(_calls.thread))
        return UsageError(
            f"{self._names[ended]} has ended without a call in which {self._names[self._rank]} "
            f"waits for it{call and f', {call}'}: let every task make the same calls of tfmw, "
            'and complete them; a call for one task alone needs strategy="default".'
        )
