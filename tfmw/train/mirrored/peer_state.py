"""State of a run in the memory of all workers, from which they continue after the loss of one.

    with PeerState(group, strategy, backup_settings) as backups:    # in place of `Backups`
        backups.begin_view()                                        # again after each loss

Every worker keeps a copy of the state, taken after the same step on all. Workers that have lost
another one leave their view of the cluster: they close its connections, so that all others leave
it, too. Once all are there again, a new worker in place of the lost one, the next view begins: all
continue from the most advanced copy, which travels over the ring. A backup on disk, if one is due,
is written from the chief's copy. It is read only if no worker has a copy.

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
from tfmw.train.callbacks import BackupAndRestore
from tfmw.train.checkpoint import state
from tfmw.train.checkpoint.resume import Backups, PythonState
from tfmw.train.checkpoint.tensor_files import SlotParts
from tfmw.train.mirrored.collectives import connection

logger = logging.getLogger("tfmw")

_LEAST_S, _SHARE = 0.2, 0.01  # time between two copies; the share of the time that they may take
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
    """The state of one call of fit, in memory and, if there is a directory, in backups.

    Args:
        group, asked, clock: see `Backups`.
        strategy: the strategy of the workers, over their ring.

    Attributes:
        kept: the last copy; None if there is none.
    """

    def __init__(
        self,
        group: Group,
        strategy: tf.distribute.Strategy,
        asked: BackupAndRestore | None,
        clock: Callable[[], float] = time.monotonic,
    ):
        super().__init__(group, asked, clock)
        self.on = True
        self.kept: Copy | None = None
        self._strategy = strategy
        self._copies = [state.Snapshots(), state.Snapshots()]  # a copy stays until the next is done
        self._written: state.Snapshots | None = None  # the copy in the last backup
        self._copied_at = clock()
        self._due_s = 0.0  # time from the last copy to the next
        self._trains = False  # whether the model's state may be of a step that is not complete

    def __enter__(self) -> PeerState:
        return self

    def begin_view(self) -> None:
        """Continues with the state of a worker that has one, or else of the newest backup.

        All tasks must call it.
        """
        steps = self._group.from_all(None if self.kept is None else self.kept[0]["step"])
        source = most_advanced(steps)
        if source is not None:
            self.kept = self._received(source)
        is_new = not self._trains
        if is_new:
            super().__enter__()
        elif self.has_directory:
            self._group.from_chief(lambda: None)  # the call of new workers
        if self.kept is not None:
            if is_new:
                self._last = float("-inf")  # a new chief does not know when a backup was written
            self.record, self.tensors = self.kept
            self.on_disk = None, {}
            if self._group.is_chief:
                say(f"tfmw: the workers continue after step {self.record['step']}")
        self._trains = True

    def _open(self) -> dict[str, Any] | None:
        if self.kept is None:
            return super()._open()
        self._stack.enter_context(self._store.locked())
        return None

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
        """Restores the copy on all workers, so that none sends it once more."""
        super().restore(model, batch_size)
        if self.kept is not None:
            record, tensors = self.kept
            state.restore(model, tensors)
            models.set_unseeded_state(record["random"].get("keras"))

    def signals(self) -> tuple[float, ...]:
        """The values of `Backups`, and whether a copy in memory is due."""
        due = self._group.is_chief and self._clock() - self._copied_at >= self._due_s
        return *super().signals(), float(due)

    def save(
        self,
        driver: Any,
        kept: tuple[Any, ...],
        callbacks: list[Any],
        record: dict[str, Any],
        python_state: PythonState | None = None,
        parts: SlotParts | None = None,
        write: bool = True,
    ) -> None:
        """Copies the state, on all workers; the chief writes the copy if a backup is due."""
        write = write and self.has_directory
        # Only a backup records the end: without it, all tasks restart, and train up to it again.
        problem = "the training is complete" if write and record["done"] else self._problem(driver)
        if problem is not None:
            self._copy_no_more(problem)
            if write:
                super().save(driver, kept, callbacks, record, python_state, parts)
            return
        begin = self._clock()
        entries, arrays = python_state or self.python_state(callbacks)
        self._copies.reverse()
        if self._copies[0] is self._written and self._writer.busy:
            self._copies[0] = state.Snapshots()
        taken = self._copies[0].take(driver.model, driver.strategy, driver.trains_in_place)
        seeds = {id(seed) for seed in placement.seeds_of(driver.model)}  # they differ by replica
        for name, variable in state.named(driver.model).items():
            if id(variable) in seeds:
                arrays[name] = taken[name].numpy()
        entries = self._group.from_chief(lambda: entries)
        arrays = self._group.arrays_from_chief(arrays)
        self.kept = {**record, **entries}, state.with_replicas({**taken, **arrays}, *kept)
        report_replaceable(True)
        self._copied_at = self._clock()
        self._due_s = max(_LEAST_S, (self._copied_at - begin) / _SHARE)
        if write:
            self._last = self._copied_at
            if self._group.is_chief:
                self._writer.wait()
                self._written = self._copies[0]
                self._submit(driver.model, callbacks, *self.kept)

    def _copy_no_more(self, problem: str) -> None:
        if self._due_s < float("inf") and self._group.is_chief:
            logger.info("workers keep no copies of the state in memory: %s", problem)
        self.kept, self._due_s = None, float("inf")
        report_replaceable(False)

    def _problem(self, driver: Any) -> str | None:
        """Reason why there are no copies; None if there is none. All tasks must call it."""
        if driver.slot_parts() is not None:
            return "each has a part of the optimizer's slots"
        if self.kept is not None:
            return None
        size = sum(
            math.prod(v.shape) * tf.as_dtype(v.dtype).size
            for v in state.named(driver.model).values()
        )
        needed = 2 * size * int(os.environ.get("TFMW_LOCAL_TASKS", "1"))
        fits = self._group.from_chief(lambda: needed <= _MEMORY * usable_bytes())
        return None if fits else f"they would take {needed >> 20} MB"


def may_rejoin(strategy: tf.distribute.Strategy) -> bool:
    """Whether the workers of a strategy can continue after the loss of one."""
    joined = membership.joined()
    of_cluster = joined is not None and strategy is joined.strategy
    return bool(os.environ.get(REPLACES)) and of_cluster and connection.is_unconnected(strategy)
