"""A diagnosis from the flight recorders of all workers: the missing and the slow ones.

    by_task = {"worker 0": read_exchanges(...), "worker 1": read_exchanges(...)}
    missing(by_task)     # Missing("worker 1", "never entered exchange 57 (gradients of step 12)")
    own_seconds(found)   # seconds of a step before and between a worker's exchanges
    input_seconds(found) # seconds of a step in which it waits for its input

The recorder of each worker writes the exchanges, see `recorder.py`.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

from tfmw.observe.recorder import NOBODY, RecordedExchange

ByTask = Mapping[str, Sequence[RecordedExchange]]

SLOWER, SLOWER_S = 1.5, 0.002
"""Thresholds of a straggler per step: factor of the others' time, and seconds more."""

_ENOUGH_STEPS = 8
_TRACING = 2  # Multiple of the usual time above which a step may include the tracing of functions.


@dataclasses.dataclass(frozen=True)
class Missing:
    """The task for which the others wait.

    Args:
        task: name of the task.
        what: one clause: "never entered exchange 57 (gradients of step 12)".
        seconds: seconds that the others have waited.
    """

    task: str
    what: str
    seconds: float

    def __str__(self) -> str:
        return f"{self.task} {self.what}"


def missing(by_task: ByTask, clock: Callable[[], float] = time.monotonic) -> Missing | None:
    """The task that blocks an exchange; None if no exchange is blocked.

    Args:
        by_task: the exchanges of each worker, in order; workers by rank.
        clock: monotonic seconds.
    """
    last = {task: found[-1] for task, found in by_task.items() if found}
    waiting = [exchange for exchange in last.values() if not exchange.done]
    if not waiting:
        return None
    first = min(waiting)
    seconds = clock() - min(e.begun for e in waiting if e.number == first.number)
    late = [task for task in by_task if task not in last or last[task].number < first.number]
    if late:
        slowest = min(late, key=lambda task: last[task].number if task in last else 0)
        return Missing(slowest, f"never entered {first}", seconds)
    inside = {task: e for task, e in last.items() if not e.done and e.number == first.number}
    silent = [task for task, exchange in inside.items() if exchange.waiting_for == NOBODY]
    if silent and len(silent) < len(by_task):
        return Missing(silent[0], f"entered {first}, and does not go on", seconds)
    return None


def ended_at(task: str, by_task: ByTask) -> str | None:
    """Sentence on the exchange in or before which a task ended; None if unknown."""
    late = missing(by_task)
    if late is not None and late.task == task:
        return str(late)
    found = by_task.get(task)
    return f"{task} ended in {found[-1]}" if found and not found[-1].done else None


def own_seconds(found: Sequence[RecordedExchange]) -> float | None:
    """Seconds of a step that a worker takes before and between its exchanges; None if unknown.

    This is the time in which others may wait for the worker.
    """
    of_steps = [exchange for exchange in found if exchange.done]
    if not of_steps:
        return None
    of_steps = [e for e in of_steps if e.step >= of_steps[0].step + _TRACING]
    steps = len({exchange.step for exchange in of_steps})
    if steps < _ENOUGH_STEPS:
        return None
    gaps = [
        after.begun - before.done
        for before, after in itertools.pairwise(of_steps)
        if after.number == before.number + 1
    ]
    if not gaps:
        return None  # the file was overwritten while it was read
    # Between the calls of a driver there are callbacks and backups.
    usual = statistics.median(gaps)
    return sum(min(gap, 20 * usual) for gap in gaps) / steps


def input_seconds(found: Sequence[RecordedExchange]) -> float | None:
    """Seconds of a step in which a worker waits for its input; None if unknown.

    It is known after each call of the driver, which runs several steps.
    """
    complete = [exchange for exchange in found if exchange.done]
    steps = complete[-1].step - complete[0].step if complete else 0
    if steps < _ENOUGH_STEPS:
        return None
    return (complete[-1].input_s - complete[0].input_s) / steps


def waiting_share(found: Sequence[RecordedExchange]) -> float | None:
    """Fraction of a worker's time in which it waits for others; None if unknown."""
    complete = [exchange for exchange in found if exchange.done]
    seconds = complete[-1].done - complete[0].begun if len(complete) > _ENOUGH_STEPS else 0.0
    return sum(e.waited for e in complete) / seconds if seconds > 0 else None


def straggler(by_task: ByTask) -> str | None:
    """Clause on the worker for which all others wait in each step; None if there is none."""
    own = {t: s for t, found in by_task.items() if (s := own_seconds(found)) is not None}
    if len(own) < 2 or len(own) < len(by_task):
        return None
    slowest = max(own, key=lambda task: own[task])
    others = statistics.median(seconds for task, seconds in own.items() if task != slowest)
    if own[slowest] < SLOWER * others or own[slowest] < others + SLOWER_S:
        return None
    clause = (
        f"{slowest} is the slowest: {1000 * own[slowest]:.0f} ms of a step before its exchanges, "
        f"the others {1000 * others:.0f} ms"
    )
    waiting = input_seconds(by_task[slowest]) or 0.0
    if waiting < (own[slowest] - others) / 2:
        return clause
    return f"{clause}; it waits {1000 * waiting:.0f} ms for its input"
