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
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfmw.cluster import coordination, membership
from tfmw.cluster.cluster import REPLACES, STATE_FOLDER
from tfmw.cluster.group import Group
from tfmw.cluster.memory import usable_bytes
from tfmw.compat import models, placement
from tfmw.compat.memory import new_tensor, view_of
from tfmw.launcher.output import say
from tfmw.observe.progress import report_replaceable
from tfmw.storage import fence
from tfmw.train.callbacks import BackupAndRestore
from tfmw.train.checkpoint import state
from tfmw.train.checkpoint.resume import Backups, PythonState
from tfmw.train.checkpoint.schedule import BackgroundWriter
from tfmw.train.checkpoint.tensor_files import SlotParts, own_name
from tfmw.train.mirrored.collectives import connection
from tfmw.train.mirrored.collectives.all_reduce import AllReduce, RingBroken
from tfmw.train.mirrored.copy_files import CopyFiles
from tfmw.train.mirrored.state_copies import (
    WHOLE,
    Continued,
    Copy,
    Held,
    Layout,
    continued,
    copy_shards,
)

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
        self._layout = WHOLE  # of the shards of these workers
        self._copies = [state.Snapshots(), state.Snapshots()]  # a copy stays until the next is done
        self._written: state.Snapshots | None = None  # the copy in the last backup
        self._copied_at = clock()
        self._due_s = 0.0  # time from the last copy to the next
        self._took_s: list[float] = []  # times that the last two copies took
        self._wrote_s = 0.0  # processor time of the last write to a file in memory
        self._lost_worker: tf.errors.UnavailableError | None = None  # in a step; the last one
        self._trains = False  # whether the model's state may be of a step that is not complete
        self._files: CopyFiles | None = None
        if folder := os.environ.get(STATE_FOLDER):
            first = os.environ.get("TFMW_LOCAL_RANK") == "0"
            self._files = CopyFiles(folder, group.rank, is_first=first)
        self._file_writer = BackgroundWriter(self._write_file, self._no_files)

    def __enter__(self) -> PeerState:
        return self

    @property
    def outlives_workers(self) -> bool:
        """Whether new workers find the state after all workers of this machine have ended."""
        return self._files is not None

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
        found = self._found()
        if found is None and self._lost_worker is not None:
            self._due_s = float("inf")  # this worker's state is of no step, so all have to restart
            raise self._lost_worker
        slots = {} if found is None else self._receive(found)
        is_new = not self._trains
        if is_new:
            super().__enter__()
            # A host that leaves or joins makes a new attempt, which continues from memory.
            if not self.has_directory and self._files is not None and fence.FENCE in os.environ:
                self._install_signals()
        elif self.has_directory:
            self._group.from_chief(lambda: None)  # the call of new workers
        if self.kept is not None:
            if is_new:
                self._last = float("-inf")  # a new chief does not know when a backup was written
            self.record, self.tensors = self.kept.record, {**self.kept.tensors, **slots}
            self.on_disk = None, {}
            if self._group.is_chief:
                say(f"tfmw: the workers continue after step {self.kept.held.step}")
        global _begun
        self._trains = _begun = True

    def _found(self) -> Continued | None:
        """The state in memory from which all continue; None if a backup is as new, or all begin."""
        if not self._trains:
            self._complete = [] if self._files is None else self._files.found()
        held = [copy.held for copy in self._complete]
        all_held, stays = zip(*self._group.from_all([held, self._trains]), strict=True)
        found = continued([[Held(*each) for each in of_one] for of_one in all_held])
        # Copies of workers that stay are as new as any backup.
        if found is not None and self.has_directory and not any(stays):
            newest = self._group.from_chief(lambda: getattr(self._store.newest(), "step", -1))
            found = found if found.step > newest else None
        if found is None:
            self._complete = []
        return found

    def _open(self) -> dict[str, Any] | None:
        if self.kept is None:
            return super()._open()
        self._stack.enter_context(self._store.locked())
        return None

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        super().__exit__(kind, *error)
        self._file_writer.wait()
        if kind is None:
            report_replaceable(False)
            self._group.from_all(None)  # after it no worker is lost in this training
            if self._files is not None:
                self._files.remove()

    def may_go_on(self) -> bool:
        """Whether a worker was lost, and this one can continue with a new one in its place."""
        if self._group.size == 1:
            return False
        lost = coordination.current().error(_NOTICED_S)
        copies = self._due_s < float("inf") or not self._trains
        if not (isinstance(lost, tf.errors.UnavailableError) and copies):
            return False
        self._lost_worker = lost if self._trains else None
        return True

    def _receive(self, state: Continued) -> dict[str, Any]:
        """Gives all workers the copy of a step; returns what is not alike in all of them."""
        own, here, described = self._complete, self._group.rank, None
        tensors: dict[str, Any] = {}
        memory: tuple[Any, ...] = ()
        if here == state.source:
            sent = state.of(own)
            memory = tuple(m for m in sent.memory if m in self._copies)
            # Arrays may be views of files, which this worker will write again.
            tensors = {n: t if tf.is_tensor(t) else tf.constant(t) for n, t in sent.tensors.items()}
            shapes = {n: (t.dtype.name, t.shape.as_list()) for n, t in tensors.items()}
            described = sent.record, shapes, sent.layout
        record, shapes, layout = self._group.from_all(described)[state.source]
        layout = Layout.of(*layout)
        found: dict[str, Any] = {}
        for name, (dtype, shape) in shapes.items():
            if here == state.source:
                array, found[name] = view_of(tensors[name]), tensors[name]
            else:
                array, found[name] = new_tensor(shape, tf.as_dtype(dtype))
            self._send(array, state.source)
        lost = layout.lost(state.senders)
        if layout.has_rows and not lost and len(layout.shards) == self._group.size:
            rows = self._receive_rows(state, layout)
            self._layout = layout
            self._complete = [Copy(record, found, layout, {here: rows}, fence.attempt(), memory)]
            return {own_name(name): array for name, array in layout.rows_in(rows, here)}
        whole = {n: new_tensor(s, tf.as_dtype(dtype)) for n, (dtype, s) in layout.slots.items()}
        slots = {name: array for name, (array, _) in whole.items()}
        for rank, sender in sorted(state.senders.items()) if layout.shards else ():
            values = layout.shards_in(slots, rank)
            if here == sender:
                copy_shards(state.of(own, rank).shards[rank], values)
            for array in values:
                self._send(array, sender)
        if lost:
            layout.replace_lost(slots, state.senders)
            if here == 0:
                names = " and ".join(f"worker {rank}" for rank in lost)
                say(f"tfmw: the state of {names} is lost: the mean of the others' takes its place")
        of_slots = {name: tensor for name, (_, tensor) in whole.items()}
        if len(layout.shards) == self._group.size:
            self._layout = layout
            # rank -> bytes of its shards
            kept: dict[int, Sequence[np.ndarray]] = {
                rank: layout.shards_in(slots, rank) for rank in self._kept_ranks(layout)
            }
            if len(kept) == self._group.size:
                memory = *memory, whole
            else:  # whole slots are freed
                kept = {rank: [array.copy() for array in v] for rank, v in kept.items()}
            self._complete = [Copy(record, found, layout, kept, fence.attempt(), memory)]
        else:  # another number of workers has taken it, or each has all slots
            found |= of_slots
            self._complete = [Copy(record, found, attempt=fence.attempt(), memory=(*memory, whole))]
        return of_slots

    def _receive_rows(self, state: Continued, layout: Layout) -> list[np.ndarray]:
        """The bytes of this worker's rows; only those that their own worker lacks are sent."""
        own: list[np.ndarray] = []
        for rank, sender in sorted(state.senders.items()):
            values: list[np.ndarray] = []
            if self._group.rank == sender:  # views of files, which this worker will write again
                values = [np.array(v) for v in state.of(self._complete, rank).shards[rank]]
            if sender != rank:
                values = values or [np.empty(size, np.uint8) for size in layout.sizes(rank)]
                for array in values:
                    self._send(array, sender)
            if self._group.rank == rank:
                own = values
        return own

    def _kept_ranks(self, layout: Layout) -> set[int]:
        """The workers whose shards are in this one's copies."""
        own = self._group.rank
        return {own} if layout.has_rows else {own, self._ring.previous}

    @property
    def _ring(self) -> AllReduce:
        ring = connection.ring_of(self._strategy)
        assert ring is not None
        return ring

    def _send(self, array: np.ndarray, source: int) -> None:
        """Replaces an array by that of one worker, on all others."""
        if array.size and self._group.size > 1:
            with self._lost_named():
                self._ring.broadcast(array.reshape(-1).view(np.uint8), "state", source)

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
            if not self._layout.has_rows:
                self.tensors = self.kept.tensors  # frees whole slots
            models.set_unseeded_state(self.kept.record["random"].get("keras"))

    def signals(self) -> tuple[float, ...]:
        """The values of `Backups`, and whether a copy in memory is due."""
        is_time = self._clock() - self._copied_at >= self._due_s
        due = self._group.is_chief and is_time and not self._file_writer.busy
        leaves, is_due = super().signals()
        can_leave = self.has_directory or (self._files is not None and self.kept is not None)
        return leaves * can_leave, is_due, float(due)

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
        # state that no worker has whole
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
        self._file_writer.wait()
        del self._complete[:-1]  # its memory is for the new copy
        self.tensors = {}  # they have been restored
        if self.kept is not None and self._copies[0] in self.kept.memory:
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
        for rows in own.rows if own is not None else ():  # a backup has all of them
            tensors.pop(rows.name, None)
        new = Copy(
            {**record, **entries},
            tensors,
            *self._shards(driver, own),
            attempt=fence.attempt(),
            memory=(self._copies[0],),
        )
        self._complete.append(new)
        report_replaceable(True)
        if self._files is not None and (new.shards or self._files.is_first):
            self._file_writer.submit(new)
        self._copied_at = self._clock()
        # The first copy allocates the memory of all: the time of the second one counts.
        self._took_s = [*self._took_s[-1:], self._copied_at - begin]
        took_s = min(self._took_s) + self._wrote_s
        self._due_s = max(_LEAST_S, took_s / (_SHARE if len(self._took_s) > 1 else 1.0))
        if write:
            self._last = self._copied_at
            if self._group.is_chief:
                self._writer.wait()
                self._written = self._copies[0]
                full = self._complete[-1]
                self._submit(driver.model, callbacks, full.record, dict(full.tensors))

    def _write_file(self, copy: Copy) -> None:
        if self._files is not None:
            begin = time.thread_time()
            self._files.write(copy)
            self._wrote_s = time.thread_time() - begin

    def _no_files(self, error: Exception) -> None:
        """Handles that a copy could not be written to a file, in memory that may be full."""
        level = logging.INFO if self.has_directory else logging.WARNING
        logger.log(level, "copies of the state do not outlive their workers: %s", error)
        if self._files is not None:
            self._files.remove()
        self._files = None

    def wait(self) -> None:
        self._file_writer.wait()
        super().wait()

    def _shards(
        self, driver: Any, own: SlotParts | None
    ) -> tuple[Layout, dict[int, Sequence[np.ndarray]]]:
        """The layout of slots, and the shards of this worker and of the one before it."""
        if own is None:
            return WHOLE, {}
        taken = self._copies[0].take_parts(driver.model, own)
        if not self._layout.shards:
            begins = [elements.start for _, elements, _ in own.own]
            begins += [rows.first * rows.values.shape[1] for rows in own.rows]
            mine = [
                (name, begin, values.shape.num_elements())
                for (name, _, values), begin in zip(taken, begins, strict=True)
            ]
            whole = {id(variable) for variable in own.variables}
            of_slots = {
                name: (v.value.dtype.name, tuple(v.shape))
                for name, v in state.named(driver.model).items()
                if id(v) in whole
            }
            of_slots |= {
                rows.name: (rows.values.dtype.name, (rows.replicas, rows.values.shape[1]))
                for rows in own.rows
            }
            self._layout = Layout.of(self._group.from_all(mine), of_slots, bool(own.rows))
        shards: list[np.ndarray] = [
            view_of(values).reshape(-1).view(np.uint8) for _, _, values in taken
        ]
        if self._layout.has_rows:
            return self._layout, {self._group.rank: shards}
        with self._lost_named():
            before = self._ring.shift(shards, "state")
        return self._layout, {self._group.rank: shards, self._ring.previous: [before]}

    def _copy_no_more(self, problem: str) -> None:
        if self._due_s < float("inf") and self._group.is_chief:
            level = logging.INFO if self.has_directory else logging.WARNING
            logger.log(level, "workers keep no copies of the state in memory: %s", problem)
        self._complete, self._due_s = [], float("inf")
        report_replaceable(False)

    def _problem(self, driver: Any, own: SlotParts | None) -> str | None:
        """Reason why there are no copies; None if there is none. All tasks must call it."""
        if self.kept is not None:
            return None
        size = _bytes_of(state.named(driver.model).values())
        if own is not None:
            of_slots = _bytes_of(own.variables)
            size += 2 * of_slots // self._group.size - of_slots
            size += _bytes_of(rows.values for rows in own.rows)
        needed = 2 * size * int(os.environ.get("TFMW_LOCAL_TASKS", "1"))
        fits = self._group.from_chief(lambda: needed <= _MEMORY * usable_bytes())
        return None if fits else f"they would take {needed >> 20} MB"


def _bytes_of(variables: Iterable[Any]) -> int:
    return sum(math.prod(v.shape) * tf.as_dtype(v.dtype).size for v in variables)


_begun = False  # whether this process has made a training whose state is in memory


def may_continue(strategy: tf.distribute.Strategy) -> bool:
    """Whether a training can continue from memory, after the loss of one worker or of all.

    Only the first training of a process can: a new process begins with it.
    """
    joined = membership.joined()
    if joined is not None:
        connects = strategy is joined.strategy and connection.is_unconnected(strategy)
        return bool(os.environ.get(REPLACES)) and connects
    alone = strategy is tf.distribute.get_strategy() and not tf.distribute.has_strategy()
    on_cpu = not tf.config.list_logical_devices("GPU")
    return bool(os.environ.get(STATE_FOLDER)) and alone and on_cpu and not _begun
