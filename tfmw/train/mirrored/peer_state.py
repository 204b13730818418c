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
only the dead worker had completed it, all make its steps again, with equal bits. If workers shard
the optimizer's slots, a worker's copy has its own shards, and those of the worker before it in the
ring (`state_copies.py`). `tests/mirrored/test_views.py` explores every interleaving for three
workers.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tfmw.cluster import coordination, membership
from tfmw.cluster.cluster import REPLACES
from tfmw.cluster.group import Group
from tfmw.cluster.memory import usable_bytes
from tfmw.compat import models, placement
from tfmw.compat.memory import view_of
from tfmw.launcher.output import say
from tfmw.observe.progress import report_replaceable
from tfmw.train.callbacks import BackupAndRestore
from tfmw.train.checkpoint import state
from tfmw.train.checkpoint.resume import Backups, PythonState
from tfmw.train.checkpoint.tensor_files import SlotParts
from tfmw.train.mirrored.collectives import connection
from tfmw.train.mirrored.collectives.all_reduce import AllReduce, RingBroken
from tfmw.train.mirrored.state_copies import Copy, Shard, bytes_of, continued, whole_slots

logger = logging.getLogger("tfmw")

_LEAST_S, _SHARE = 0.2, 0.01  # time between two copies; the share of the time that they may take
_MEMORY = 0.25  # share of the machine's memory that they may take

_NOTICED_S = 2.0  # time in which the loss of a worker is known


class PeerState(Backups):
    """The state of one call of fit, in memory and, if there is a directory, in backups.

    Args:
        group, asked, clock: see `Backups`.
        strategy: the strategy of the workers, over their ring.

    Attributes:
        kept: the last complete copy; None if there is none.
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
        self._strategy = strategy
        self._complete: list[Copy] = []  # the last copy, and the one before while its memory lasts
        # the shards of each worker, in order of rank, and the dtypes and shapes of whole slots
        self._layout: tuple[list[list[Shard]], dict[str, Any]] = [], {}
        self._copies = [state.Snapshots(), state.Snapshots()]  # a copy stays until the next is done
        self._written: state.Snapshots | None = None  # the copy in the last backup
        self._copied_at = clock()
        self._due_s = 0.0  # time from the last copy to the next
        self._lost_worker: tf.errors.UnavailableError | None = None  # in a step; the last one
        self._trains = False  # whether the model's state may be of a step that is not complete

    def __enter__(self) -> PeerState:
        return self

    @property
    def kept(self) -> Copy | None:
        return self._complete[-1] if self._complete else None

    def begin_view(self) -> None:
        """Continues with the state that workers have in memory, or else of the newest backup.

        All tasks must call it.
        """
        if self._shared is not None:  # its write may wait for the lost worker
            self._shared.give_up()
        vars(self).pop("takes_parts", None)  # all ask again, as a new worker does
        found = continued(self._group.from_all([(c.step, c.holds) for c in self._complete]))
        if found is None and self._lost_worker is not None:
            self._due_s = float("inf")  # this worker's state is of no step, so all have to restart
            raise self._lost_worker
        slots = {} if found is None else self._receive(*found)
        is_new = not self._trains
        if is_new:
            super().__enter__()
        elif self.has_directory:
            self._group.from_chief(lambda: None)  # the call of new workers
        if self.kept is not None:
            if is_new:
                self._last = float("-inf")  # a new chief does not know when a backup was written
            self.record, self.tensors = self.kept.record, {**self.kept.tensors, **slots}
            self.on_disk = None, {}
            if self._group.is_chief:
                say(f"tfmw: the workers continue after step {self.kept.step}")
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
        copies = self._due_s < float("inf") or not self._trains
        if not (isinstance(lost, tf.errors.UnavailableError) and copies):
            return False
        self._lost_worker = lost if self._trains else None
        return True

    def _receive(self, step: int, senders: Mapping[int, int]) -> dict[str, np.ndarray]:
        """Gives all workers the copy of a step; returns the slots that none of them has whole."""
        own = next((copy for copy in self._complete if copy.step == step), None)
        source, described = min(senders.values()), None
        arrays: dict[str, np.ndarray] = {}
        if self._group.rank == source:
            assert own is not None
            arrays = {name: np.asarray(tensor) for name, tensor in own.tensors.items()}
            shapes = {name: (array.dtype.name, array.shape) for name, array in arrays.items()}
            described = own.record, shapes, *self._layout
        record, shapes, layout, of_slots = self._group.from_all(described)[source]
        self._layout = [[Shard(*shard) for shard in shards] for shards in layout], of_slots
        found = {}
        for name, (dtype, shape) in shapes.items():
            array = np.zeros(shape, tf.as_dtype(dtype).as_numpy_dtype)
            if self._group.rank == source:
                array[...] = arrays[name]
            found[name] = self._sum(array)
        slots: dict[str, np.ndarray] = {}
        here, holds = self._group.rank, self._ring.previous
        kept: dict[int, np.ndarray] = {}  # rank -> bytes of its shards
        for rank, of_one in enumerate(self._layout[0]):
            received: np.ndarray = np.zeros(bytes_of(of_one, of_slots), np.uint8)
            if here == senders[rank]:
                assert own is not None
                np.concatenate([received[:0], *own.shards_of(rank)], out=received)
            whole_slots(of_slots, of_one, self._sum(received), slots)
            if rank in (here, holds):
                kept[rank] = received
        of_shards = ([kept[here]], kept[holds], holds) if kept else ()
        self._complete = [Copy(record, found, *of_shards)]
        return slots

    @property
    def _ring(self) -> AllReduce:
        ring = connection.ring_of(self._strategy)
        assert ring is not None
        return ring

    def _sum(self, array: np.ndarray) -> np.ndarray:
        """The array of the only worker whose array is not zeros, on all."""
        if array.size:
            with self._lost_named():
                self._ring.sum(array.reshape(-1).view(np.uint8), what="state")
        return array

    @contextlib.contextmanager
    def _lost_named(self) -> Iterator[None]:
        """Replaces the error of an exchange by the one that says which worker was lost."""
        try:
            yield
        except RingBroken as e:
            raise self._group.root_cause(e) from None

    def restore(self, model: Any, batch_size: int | None) -> None:
        """Restores the copy on all workers, so that none sends it once more."""
        super().restore(model, batch_size)
        if self.kept is not None:
            state.restore(model, self.tensors)
            self.tensors = self.kept.tensors  # frees whole slots
            models.set_unseeded_state(self.kept.record["random"].get("keras"))

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
        """Copies the state, on all workers; the chief writes the copy if a backup is due.

        If workers shard the optimizer's slots, a backup is written as without copies in memory.
        """
        write, own = write and self.has_directory, parts or driver.slot_parts()
        # Only a backup records the end: without it, all tasks restart, and train up to it again.
        ends = write and record["done"]
        problem = "the training is complete" if ends else self._problem(driver, own)
        if problem is not None:
            self._copy_no_more(problem)
        if write and (problem is not None or own is not None):
            super().save(driver, kept, callbacks, record, python_state, parts)
            write = False
        if problem is not None:
            return
        begin = self._clock()
        entries, arrays = python_state or self.python_state(callbacks)
        del self._complete[:-1]  # its memory is for the new copy
        self._copies.reverse()
        if self._copies[0] is self._written and self._writer.busy:
            self._copies[0] = state.Snapshots()
        taken = self._copies[0].take(driver.model, driver.strategy, driver.trains_in_place, own)
        seeds = {id(seed) for seed in placement.seeds_of(driver.model)}  # they differ by replica
        for name, variable in state.named(driver.model).items():
            if id(variable) in seeds:
                arrays[name] = taken[name].numpy()
        entries = self._group.from_chief(lambda: entries)
        arrays = self._group.arrays_from_chief(arrays)
        tensors = state.with_replicas({**taken, **arrays}, *kept)
        self._complete.append(Copy({**record, **entries}, tensors, *self._shards(driver, own)))
        report_replaceable(True)
        self._copied_at = self._clock()
        self._due_s = max(_LEAST_S, (self._copied_at - begin) / _SHARE)
        if write:
            self._last = self._copied_at
            if self._group.is_chief:
                self._writer.wait()
                self._written = self._copies[0]
                full = self._complete[-1]
                self._submit(driver.model, callbacks, full.record, dict(full.tensors))

    def _shards(self, driver: Any, own: SlotParts | None) -> tuple[Any, ...]:
        """The last three fields of a `Copy`: shards of this worker, and of the one before it."""
        if own is None:
            return ()
        taken = self._copies[0].take_parts(driver.model, own)
        if not self._layout[0]:
            mine = [
                (name, elements.start, elements.stop - elements.start)
                for (name, _, _), (_, elements, _) in zip(taken, own.own, strict=True)
            ]
            whole = {id(variable) for variable in own.variables}
            of_slots = {
                name: (v.value.dtype.name, tuple(v.shape))
                for name, v in state.named(driver.model).items()
                if id(v) in whole
            }
            layouts = [[Shard(*s) for s in shards] for shards in self._group.from_all(mine)]
            self._layout = layouts, of_slots
        shards: list[np.ndarray] = [
            view_of(values).reshape(-1).view(np.uint8) for _, _, values in taken
        ]
        with self._lost_named():
            return shards, self._ring.shift(shards, "state"), self._ring.previous

    def _copy_no_more(self, problem: str) -> None:
        if self._due_s < float("inf") and self._group.is_chief:
            logger.info("workers keep no copies of the state in memory: %s", problem)
        self._complete, self._due_s = [], float("inf")
        report_replaceable(False)

    def _problem(self, driver: Any, own: SlotParts | None) -> str | None:
        """Reason why there are no copies; None if there is none. All tasks must call it."""
        if self.kept is not None:
            return None
        of_slots = 0 if own is None else _bytes_of(own.variables)
        size = _bytes_of(state.named(driver.model).values()) - of_slots
        size += 2 * of_slots // self._group.size
        needed = 2 * size * int(os.environ.get("TFMW_LOCAL_TASKS", "1"))
        fits = self._group.from_chief(lambda: needed <= _MEMORY * usable_bytes())
        return None if fits else f"they would take {needed >> 20} MB"


def _bytes_of(variables: Iterable[Any]) -> int:
    return sum(math.prod(v.shape) * tf.as_dtype(v.dtype).size for v in variables)


def may_rejoin(strategy: tf.distribute.Strategy) -> bool:
    """Whether the workers of a strategy can continue after the loss of one."""
    joined = membership.joined()
    of_cluster = joined is not None and strategy is joined.strategy
    return bool(os.environ.get(REPLACES)) and of_cluster and connection.is_unconnected(strategy)
