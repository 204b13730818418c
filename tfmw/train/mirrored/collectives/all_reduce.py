"""Collectives of workers over rings, and cuts of an array into a shard for each worker.

    ring.sum(values)                # float32 [n]: the sum over workers, bit for bit the same on all
    own = ring.reduce_scatter(values, cuts)     # this worker's shard of it, and then
    ring.all_gather(own, cuts, out=values)      # all shards, on all workers
    rows, = ring.gather([local])    # float32 [sum of n]: all workers' arrays, concatenated
    ring.broadcast(values)          # float32 [n]: the first worker's array, or that of `root`
    ring.shift([local])             # uint8 [n]: the bytes of the previous worker's arrays

`ring.py` is one ring, `hierarchy.py` is rings in two levels.
"""

from __future__ import annotations

import abc
import collections
import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

Add = Callable[[np.ndarray, np.ndarray, np.ndarray], Any]  # (a, b, out)
# cuts of an array into a shard for each worker: N + 1 numbers from 0 to its length
Cuts = Sequence[int]

# In elements; a cut is at a multiple of 64 bytes or more, where TensorFlow does not copy.
_ALIGNED, _LARGE = 32, 1024


class RingBroken(ConnectionError):
    """Error for a neighbour in the ring that is lost, or hangs."""


def add_arrays(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
    """Writes the sum of two arrays to a third."""
    with np.errstate(all="ignore"):  # the optimizer handles infinities
        np.add(a, b, out=out)


def even_cuts(elements: int, workers: int) -> list[int]:
    """Cuts of an array of `elements` into about equal shards; large ones at aligned bytes."""
    unit = _ALIGNED if elements >= _LARGE * workers else 1
    cuts = [elements * part // workers // unit * unit for part in range(workers)]
    return [*cuts, elements]


class AllReduce(abc.ABC):
    """Collectives of one worker. All workers must make all calls, in the same order.

    After an error no further collective is possible. Each of them raises:

    - RingBroken: a worker is lost.
    - RuntimeError: workers are in different collectives.

    `timeout_s`: seconds without a byte after which a collective fails; None waits as long as the
    neighbours respond.
    """

    timeout_s: float | None

    def __init__(self, rank: int, size: int):
        self.rank, self.size = rank, size
        self.exchanges = 0  # number of exchanges so far
        self.counts: collections.Counter[str] = collections.Counter()  # number of exchanges by kind
        self.turn: Any = None  # the variable that orders the exchanges of traced steps: `OverRing`
        self._what = ""  # kind of the current exchange
        self._broken: Exception | None = None
        self._one_at_a_time = threading.Lock()

    @property
    def broken(self) -> Exception | None:
        """The error after which no collective is possible; None if there was none."""
        return self._broken

    @abc.abstractmethod
    def part_number(self, rank: int) -> int:
        """Number of the shard of a sum that a worker has first; see `reduce_scatter`."""

    def own_part(self, cuts: Cuts) -> slice:
        """Elements of a sum that this worker has first."""
        number = self.part_number(self.rank)
        return slice(cuts[number], cuts[number + 1])

    def sum(self, values: np.ndarray, add: Add = add_arrays, what: str = "sum") -> np.ndarray:
        """Replaces an array by the sum of all workers' arrays (all-reduce); returns it.

        Args:
            values: [n], with the same n and dtype on all workers.
            add: (a, b, out): writes the sum of two arrays to a third, or to b.
            what: name of the kind, at most 16 bytes; must be the same on all workers.
        """
        with self._exchange(what):
            return self._sum(values, add)

    def reduce_scatter(
        self, values: np.ndarray, cuts: Cuts, add: Add = add_arrays, what: str = "reduce_scatter"
    ) -> np.ndarray:
        """This worker's shard of the sum of all workers' arrays: the first half of `sum`.

        With `even_cuts` it is bit for bit equal to that shard of the result of `sum`.

        Args:
            values, add, what: see `sum`; the other shards are overwritten.
            cuts: boundaries of each worker's shard of the array; the same on all workers.

        Returns:
            [m], the elements `own_part(cuts)` of `values`.
        """
        with self._exchange(what):
            return self._reduce_scatter(values, cuts, add)

    def all_gather(
        self, own: np.ndarray, cuts: Cuts, out: np.ndarray, what: str = "all_gather"
    ) -> np.ndarray:
        """The shards of all workers, in order: the second half of `sum`.

        Args:
            own: [m], the elements `own_part(cuts)`.
            cuts, what: see `reduce_scatter`.
            out: [n], array for the result, with the same n on all workers; it is returned.
        """
        with self._exchange(what):
            return self._all_gather(own, cuts, out)

    def gather(self, local: Sequence[np.ndarray]) -> list[np.ndarray]:
        """All workers' arrays, concatenated along the first axis by rank.

        Args:
            local: arrays [rows, ...] with the same number of rows; the number may differ between
                workers.
        """
        with self._exchange("gather"):
            return self._gather([np.ascontiguousarray(array) for array in local])

    def broadcast(self, values: np.ndarray, what: str = "broadcast", root: int = 0) -> np.ndarray:
        """Replaces an array by one worker's; returns it.

        Args:
            values: [n], with the same n and dtype on all workers; the root only reads it.
            what: see `sum`.
            root: rank of the worker whose array it is.
        """
        with self._exchange(what):
            return self._broadcast(values, root)

    @property
    @abc.abstractmethod
    def previous(self) -> int:
        """Rank in the training of the worker that sends to this one in `shift`."""

    def shift(self, local: Sequence[np.ndarray], what: str = "shift") -> np.ndarray:
        """uint8 [n], the bytes of the previous worker's arrays; this one's go to the next worker.

        Args:
            local: arrays of any shapes, which may differ between workers.
            what: see `sum`.
        """
        own = [np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in local]
        with self._exchange(what):
            return self._shift(np.concatenate([np.zeros(0, np.uint8), *own]))

    def continue_over(self, new: AllReduce) -> None:
        """Takes the links of a new ring with the same ranks, for steps traced with this one."""
        vars(self).update(vars(new), turn=self.turn)

    @abc.abstractmethod
    def close(self) -> None:
        """Closes the links, so that collectives of the neighbours fail."""

    @contextlib.contextmanager
    def _exchange(self, what: str) -> Iterator[None]:
        with self._one_at_a_time:
            self.counts[what] += 1
            self._what = what
            if self.broken is not None:
                raise self.broken
            try:
                yield
            except Exception as e:
                self._broken = self.broken or e
                self._shut()
                raise
            self.exchanges += 1

    @abc.abstractmethod
    def _shut(self) -> None:
        """Closes the links after an error, so that waiting neighbours fail, too."""

    @abc.abstractmethod
    def _sum(self, total: np.ndarray, add: Add) -> np.ndarray: ...

    @abc.abstractmethod
    def _reduce_scatter(self, total: np.ndarray, cuts: Cuts, add: Add) -> np.ndarray: ...

    @abc.abstractmethod
    def _all_gather(self, own: np.ndarray, cuts: Cuts, total: np.ndarray) -> np.ndarray: ...

    @abc.abstractmethod
    def _gather(self, local: list[np.ndarray]) -> list[np.ndarray]: ...

    @abc.abstractmethod
    def _broadcast(self, values: np.ndarray, root: int) -> np.ndarray: ...

    @abc.abstractmethod
    def _shift(self, local: np.ndarray) -> np.ndarray: ...
