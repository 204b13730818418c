"""End of synchronous workers: all end together, however long one of them is busy.

    with shared_call(): ...      # around code that all tasks enter, in the same order
    Departure(cluster, fail).wait()  # at exit: until all tasks are at their end

The exit of one task ends the cluster of the others. So each task announces its end, and exits when
all have announced theirs. A task that waits in a shared call for a task that has announced its end
would wait for ever. A thread detects this, and all tasks fail with one sentence.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import threading
import time
from collections.abc import Callable, Iterator

from tfmw.cluster import Cluster, coordination
from tfmw.errors import UsageError
from tfmw.observe.progress import AT_THE_END, blocking_call
from tfmw.observe.stacks import users_call

_LOOK_S = 2.0  # seconds between two checks for ended tasks, in a task that waits as long


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


def begin_again() -> None:
    """Counts the shared calls from 0, as a new worker does."""
    _calls.completed = 0


def calls() -> int:
    """The number of shared calls that this process has completed."""
    return _calls.completed


class Departure:
    """The coordinated end of this task.

    Args:
        cluster: a cluster of synchronous workers.
        fail: reports an error to all tasks, and ends this task's collectives.
    """

    def __init__(self, cluster: Cluster, fail: Callable[[UsageError], None]) -> None:
        self._names = list(cluster.tasks("chief", "worker"))  # names in order of rank
        self._rank = cluster.rank
        self._fail = fail
        threading.Thread(target=self._look, name="tfmw-ended", daemon=True).start()

    def wait(self) -> None:
        """Announces the end of this task, and returns once all tasks have ended.

        Raises:
            tf.errors.OpError: a task was lost, or has failed.
        """
        with blocking_call(AT_THE_END):
            coordination.current().leave(_calls.completed)

    def _look(self) -> None:
        """Ends a shared call that waits for a task which has ended without it; runs in a thread."""
        while True:
            time.sleep(_LOOK_S)
            since, number = _calls.since, _calls.completed + 1
            if since is None or time.monotonic() - since < _LOOK_S:
                continue
            ended = sorted(coordination.current().ended.items())
            without = [rank for rank, completed in ended if completed < number]
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
