"""State of a run in the memory of all workers, from which they continue after the loss of one.

    with PeerState(group, strategy, kept) as backups: ...    # in place of `Backups`

Every worker keeps a copy of the state, taken after the same step on all. Workers that have lost
another one leave their view of the cluster: they close its connections, so that all others leave
it, too. Once all are there again, a new worker in place of the lost one, the next view begins: all
continue from the most advanced copy, which travels over the ring.

A worker completes a copy only with messages of all others, and sends those for the next one only
afterwards. So the copies of a view differ by one at most. If a worker dies after some have
completed a copy and others have not, the newer one wins, because all have contributed to it. If
only the dead worker had completed it, all make its steps again, with equal bits.
`tests/mirrored/test_views.py` explores every interleaving for three workers.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfmw.cluster import coordination, membership
from tfmw.cluster.cluster import REPLACES
from tfmw.cluster.group import Group
from tfmw.cluster.memory import usable_bytes
from tfmw.compat import models, placement
from tfmw.launcher.output import say
from tfmw.observe.progress import report_replaceable
from tfmw.train.checkpoint import state
from tfmw.train.checkpoint.resume import Backups, PythonState
from tfmw.train.checkpoint.schedule import Schedule
from tfmw.train.checkpoint.tensor_files import SlotParts
from tfmw.train.mirrored.collectives import connection

logger = logging.getLogger("tfmw")

_LEAST_S, _SHARE = 1.0, 0.01  # time between two copies; the share of the time that they may take
_MEMORY = 0.25  # share of the machine's memory that they may take

_NOTICED_S = 2.0  # time in which the loss of a worker is known

Copy = tuple[dict[str, Any], Mapping[str, Any]]
"""(record, tensors by name), as in a backup."""


def most_advanced(steps: Sequence[int | None]) -> int | None:
    """Rank of the first worker with the newest copy; None if no worker has one.

    Args:
        steps: step of each worker's copy, in order of rank; None: it has none.
    """
    newest = max((step for step in steps if step is not None), default=None)
    return None if newest is None else list(steps).index(newest)


class PeerState(Backups):
    """The state of one call of fit, in memory.

    Args:
        group, clock: see `Backups`.
        strategy: the strategy of the workers, over their ring.
        kept: the copy that this worker has from before a loss; None on a new one.
    """

    takes_parts = True  # of slots that no worker has whole: then there is no copy

    def __init__(
        self,
        group: Group,
        strategy: tf.distribute.Strategy,
        kept: Copy | None,
        clock: Callable[[], float] = time.monotonic,
    ):
        super().__init__(group, None, clock)
        self.on = True
        self.schedule = Schedule("continuous")
        self.kept = kept
        self._strategy = strategy
        self._copies = [state.Snapshots(), state.Snapshots()]  # a copy stays until the next is done
        self._due_s = 0.0  # time from the last copy to the next
        self._trains = False  # whether the model's state may be of a step that is not complete

    def __enter__(self) -> PeerState:
        steps = self._group.from_all(None if self.kept is None else self.kept[0]["step"])
        source = most_advanced(steps)
        if source is not None:
            self.kept = self._received(source)
            self.record, self.tensors = self.kept
            if self._group.is_chief:
                say(f"tfmw: the workers continue after step {steps[source]}")
        self._trains = True
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        super().__exit__(kind, *error)
        if kind is None:
            report_replaceable(False)

    def may_go_on(self) -> bool:
        """Whether a worker was lost, and this one can continue with a new one in its place."""
        lost = coordination.current().error(_NOTICED_S)
        clean = self.kept is not None or not self._trains
        return isinstance(lost, tf.errors.UnavailableError) and clean

    def _received(self, source: int) -> Copy:
        """The copy of a worker, on all."""
        own = None
        if self._group.rank == source:
            assert self.kept is not None
            record, tensors = self.kept
            arrays = {name: np.asarray(tensor) for name, tensor in tensors.items()}
            described = {name: (a.dtype.name, a.shape) for name, a in arrays.items()}
            own = record, described
        record, described = self._group.from_all(own)[source]
        ring = connection.ring_of(self._strategy)
        assert ring is not None
        found = {}
        for name, (dtype, shape) in described.items():
            type_ = tf.as_dtype(dtype).as_numpy_dtype
            array: np.ndarray = np.zeros(shape, type_)
            if self._group.rank == source:
                array[...] = arrays[name]
            if array.size:  # the others add zeros, as bytes
                ring.sum(array.reshape(-1).view(np.uint8), what="state")
            found[name] = array
        return record, found

    def restore(self, model: Any, batch_size: int | None) -> None:
        if self.record is not None and self._group.is_chief:
            state.restore(model, self.tensors)
            models.set_unseeded_state(self.record["random"].get("keras"))

    def signals(self) -> tuple[float, float]:
        due = self._group.is_chief and self._clock() - self._last >= self._due_s
        return 0.0, float(due)

    def save(
        self,
        driver: Any,
        kept: tuple[Any, ...],
        callbacks: list[Any],
        record: dict[str, Any],
        python_state: PythonState | None = None,
        parts: SlotParts | None = None,
    ) -> None:
        """Copies the state, on all workers."""
        problem = self._problem(driver.model, parts)
        if problem is not None:
            self.kept, self._due_s = None, float("inf")
            report_replaceable(False)
            if self._group.is_chief:
                logger.info("workers keep no copies of the state in memory: %s", problem)
            return
        begin = self._clock()
        entries, arrays = python_state or self.python_state(callbacks)
        self._copies.reverse()
        taken = self._copies[0].take(driver.model, driver.strategy, driver.trains_in_place)
        seeds = {id(seed) for seed in placement.seeds_of(driver.model)}  # they differ by replica
        for name, variable in state.named(driver.model).items():
            if id(variable) in seeds:
                arrays[name] = taken[name].numpy()
        entries = self._group.from_chief(lambda: entries)
        arrays = self._group.arrays_from_chief(arrays)
        self.kept = {**record, **entries}, state.with_replicas({**taken, **arrays}, *kept)
        report_replaceable(True)
        self._last = self._clock()
        self._due_s = max(_LEAST_S, (self._last - begin) / _SHARE)

    def _problem(self, model: Any, parts: SlotParts | None) -> str | None:
        """Reason why there are no copies; None if there is none. All tasks must call it."""
        if parts is not None:
            return "each has a part of the optimizer's slots"
        if self.kept is not None:
            return None
        size = sum(
            math.prod(v.shape) * tf.as_dtype(v.dtype).size for v in state.named(model).values()
        )
        needed = 2 * size * int(os.environ.get("TFMW_LOCAL_TASKS", "1"))
        fits = self._group.from_chief(lambda: needed <= _MEMORY * usable_bytes())
        return None if fits else f"they would take {needed >> 20} MB"


def may_rejoin(strategy: tf.distribute.Strategy) -> bool:
    """Whether the workers of a strategy can continue after the loss of one."""
    joined = membership.joined()
    of_cluster = joined is not None and strategy is joined.strategy
    return bool(os.environ.get(REPLACES)) and of_cluster and connection.is_unconnected(strategy)
