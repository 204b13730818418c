"""A user's `PyDataset`, read in Keras's order by every worker.

Keras shuffles the batches with Python's generator when a pass begins. Hooks of the dataset often
shuffle too, with Python's or NumPy's generator. Every worker must read the same batches. So all
workers begin a pass with the state of the chief's generators, and end it with the state that Keras
would leave.

A dataset with `workers=2` or more is divided: see `divided_work.py`.
"""

from __future__ import annotations

import random
from typing import Any

import keras

from tfmw.cluster.group import Group
from tfmw.compat import datasets
from tfmw.data.divided_work import DividedBatches, divided
from tfmw.data.random_state import (
    as_python_state,
    python_state,
    random_state,
    restore_random_state,
    share_random_state,
)
from tfmw.data.values import EpochHooks

_MOST_THREADS = 16  # each thread holds a whole batch


class OrderedPyDataset(keras.utils.PyDataset):
    """The user's dataset in the order of the current pass; at first in its own order."""

    def __init__(self, dataset: keras.utils.PyDataset, shuffle: Any):
        super().__init__(
            workers=dataset.workers,
            use_multiprocessing=dataset.use_multiprocessing,
            max_queue_size=dataset.max_queue_size,
        )
        self._dataset = dataset
        self._order: list[int] | None = None
        self._divided: DividedBatches | None = None
        self._start = 0
        self._begun = self._draws = False
        self.looked_at: list[Any] = []  # batches that were read before the first pass
        self.shuffled = bool(shuffle) and dataset.num_batches is not None
        self.drawn_from: Any = None  # state of Python's generator from which the order was drawn

    @property
    def num_batches(self) -> int | None:
        number: int | None = self._dataset.num_batches
        return number if number is None else number - self._start

    def __getitem__(self, index: int) -> Any:
        index += self._start
        batches = self._compute if self._divided is None else self._divided.__getitem__
        if self._begun:
            return batches(index)
        before = random_state()
        batch = batches(index)  # threads may read at the same time
        self.looked_at.append(batch)
        self._draws |= random_state() != before
        return batch

    @property
    def draws_in_any_order(self) -> bool:
        """Whether threads or processes draw the values of batches from common random generators."""
        return self._draws and (self.workers > 1 or self.use_multiprocessing)

    def start_at(self, index: int) -> None:
        """Sets the first batch of a pass; `num_batches` batches remain from there on."""
        self._start = index

    def _compute(self, index: int) -> Any:
        return self._dataset[index if self._order is None else self._order[index]]

    def divide(self, group: Group) -> None:
        """Divides the work between workers, if Keras's threads compute batches in any order."""
        threads = self._dataset.workers
        in_threads = threads > 1 and not self._dataset.use_multiprocessing
        if self._divided is not None or group.size == 1 or not in_threads:
            return
        self._group = group
        # The number of threads that compute at a time is unchanged: the others wait for other
        # workers.
        self.workers = max(threads, min(threads * group.size, _MOST_THREADS))
        self.max_queue_size = max(self._dataset.max_queue_size, self.workers)
        # No worker is further behind another one than this.
        self._divided = divided(self._compute, group, self.max_queue_size + self.workers)

    def begin_epoch(self) -> None:
        """Begins an epoch; call it before batches of another epoch are read."""
        self._begun = True
        self.looked_at.clear()
        if self._divided is not None:
            self._divided.begin_epoch()

    def on_epoch_begin(self) -> None:
        self._dataset.on_epoch_begin()

    def on_epoch_end(self) -> None:
        if self._divided is not None:  # the first batch may have drawn random numbers
            share_random_state(self._group)
        self._dataset.on_epoch_end()

    def draw(self) -> None:
        """Draws an order, if batches are shuffled."""
        if self.shuffled:
            self._shuffle(random, python_state())

    def restore(self, drawn_from: Any) -> None:
        """Sets the order of a pass of an interrupted run; see `EpochHooks.restore`."""
        if self.shuffled:
            drawing = random.Random()
            drawing.setstate(as_python_state(drawn_from))
            self._shuffle(drawing, drawn_from)

    def _shuffle(self, generator: Any, state: Any) -> None:
        self.drawn_from = state
        self._order = list(range(self._dataset.num_batches))
        generator.shuffle(self._order)


class PyDatasetHooks(EpochHooks):
    """Hooks for a `PyDataset`, called through Keras's adapter."""

    def __init__(self, dataset: OrderedPyDataset, adapter: Any, group: Group):
        self._dataset, self._adapter, self._group = dataset, adapter, group

    def state(self, batches: int) -> Any:
        return self._dataset.drawn_from

    def length(self) -> int | None:
        return self._dataset.num_batches

    def reset(self) -> None:
        share_random_state(self._group)
        self._adapter.on_epoch_end()

    def begin(self, new_pass: bool, continued: bool) -> None:
        if continued:  # the interrupted run has called the hook, and drawn
            before = random_state()
            self._dataset.begin_epoch()
            self._adapter.on_epoch_begin()
            restore_random_state(before)
            return
        if new_pass:
            self._dataset.start_at(0)
            share_random_state(self._group)
        threads = datasets.has_own_readers(self._adapter)
        if threads:  # threads begin to read in the hook, in another order in each epoch
            self._dataset.draw()
        self._dataset.begin_epoch()
        self._adapter.on_epoch_begin()
        if new_pass and not threads:
            self._dataset.draw()

    def end(self) -> None:
        self._adapter.on_epoch_end()

    def skip(self) -> None:
        # The hooks of Keras's adapter would start to read batches.
        self._dataset.on_epoch_begin()
        self._dataset.draw()
        self._dataset.on_epoch_end()

    def restore(self, state: Any) -> None:
        self._dataset.restore(state)
