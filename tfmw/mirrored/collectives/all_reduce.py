"""The exchanges of workers over rings, and the cuts of an array into a part for each worker.

    total = ring.sum(local)         # float32 [n]: the sum over workers, bit for bit the same on all
    own = ring.reduce_scatter(local, cuts)  # this worker's part of it, and then
    total = ring.all_gather(own, cuts)      # all parts, on all
    rows, = ring.gather([local])    # float32 [sum of n]: all workers' arrays, one after the other
    first = ring.broadcast(local)   # float32 [n]: the first worker's array

`ring.py` is one ring, `hierarchy.py` is rings in two levels.
"""

from __future__ import annotations

import abc
import collections
import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

Add = Callable[[np.ndarray, np.ndarray, np.ndarray], Any]  # (a, b, out)
Cuts = Sequence[int]  # of an array into a part for each worker: N + 1 numbers from 0 to its length

# Elements; of 64 bytes and more. TensorFlow cuts an array there without a copy.
_ALIGNED, _LARGE = 32, 1024


class RingBroken(ConnectionError):
    """A neighbour in the ring is lost, or hangs."""


def add_arrays(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
    """Writes the sum of two arrays to a third."""
    with np.errstate(all="ignore"):  # the optimizer handles infinities
        np.add(a, b, out=out)


def even_cuts(elements: int, workers: int) -> list[int]:
    """An array of `elements`, cut into parts of about equal sizes; large ones at aligned bytes."""
    unit = _ALIGNED if elements >= _LARGE * workers else 1
    cuts = [elements * part // workers // unit * unit for part in range(workers)]
    return [*cuts, elements]


class Parts(abc.ABC):
    """The part of a sum that each worker, or replica, has first; see `AllReduce.reduce_scatter`."""

    @abc.abstractmethod
    def part_number(self, rank: int) -> int:
        """The number of the part of a sum that a worker has first."""

    def part_of(self, cuts: Cuts, rank: int) -> slice:
        """The elements of a sum that a worker has first."""
        number = self.part_number(rank)
        return slice(cuts[number], cuts[number + 1])


class AllReduce(Parts):
    """Exchanges between workers, as one of them. All workers make all calls, in the same order.

    After an error no further exchange is possible. Each of them raises:

    - RingBroken: a worker is lost.
    - RuntimeError: workers are in different exchanges.

    Attributes:
        rank: of this worker.
        size: number of workers.
        timeout_s: seconds without a byte after which an exchange fails; None waits as long as the
            neighbours respond.
        exchanges: number of exchanges so far.
        counts: number of exchanges by kind: "gradients", "metrics", "gather", ...
        on_exchange: called after each with its kind, and its begin and end by
            `time.perf_counter`; None for nothing.
    """

    timeout_s: float | None

    def __init__(self, rank: int, size: int):
        self.rank, self.size = rank, size
        self.exchanges = 0
        self.counts: collections.Counter[str] = collections.Counter()
        self.on_exchange: Callable[[str, float, float], object] | None = None
        self._what = ""  # kind of the current exchange
        self._broken: Exception | None = None
        self._one_at_a_time = threading.Lock()

    @property
    def broken(self) -> Exception | None:
        """The error after which no exchange is possible; None before it."""
        return self._broken

    def own_part(self, cuts: Cuts) -> slice:
        """The elements of a sum that this worker has first."""
        return self.part_of(cuts, self.rank)

    def sum(
        self,
        local: np.ndarray,
        add: Add = add_arrays,
        what: str = "sum",
        in_place: bool = False,
    ) -> np.ndarray:
        """The sum of all workers' arrays.

        Args:
            local: [n], of the same n and dtype on all workers.
            add: (a, b, out): writes the sum of two arrays to a third, or to b.
            what: kind of the exchange, at most 16 bytes; must be the same on all workers.
            in_place: whether the result is put into `local`; otherwise `local` is not changed.
        """
        with self._exchange(what):
            return self._sum(local if in_place else local.copy(), add)

    def reduce_scatter(
        self,
        local: np.ndarray,
        cuts: Cuts,
        add: Add = add_arrays,
        what: str = "reduce_scatter",
        in_place: bool = False,
    ) -> np.ndarray:
        """This worker's part of the sum of all workers' arrays: the first half of `sum`.

        With `even_cuts` it is bit for bit the same part of what `sum` returns.

        Args:
            local, add, what: as in `sum`.
            cuts: where the array is cut into a part for each worker; the same on all.
            in_place: whether `local` is overwritten: its own part by the result, and the others by
                other values. Otherwise it is not changed.

        Returns:
            [m], of the elements `own_part(cuts)`.
        """
        with self._exchange(what):
            return self._reduce_scatter(local if in_place else local.copy(), cuts, add)

    def all_gather(
        self,
        own: np.ndarray,
        cuts: Cuts,
        what: str = "all_gather",
        out: np.ndarray | None = None,
    ) -> np.ndarray:
        """The parts of all workers, in order: the second half of `sum`.

        Args:
            own: [m], of the elements `own_part(cuts)`.
            cuts, what: as in `reduce_scatter`.
            out: [n], where the result is put; by default a new array.

        Returns:
            [n], the same on all workers.
        """
        with self._exchange(what):
            return self._all_gather(
                own, cuts, np.empty(cuts[-1], own.dtype) if out is None else out
            )

    def gather(self, local: Sequence[np.ndarray]) -> list[np.ndarray]:
        """All workers' arrays, joined along the first axis by rank.

        Args:
            local: arrays [rows, ...] with the same number of rows, which may differ between
                workers.
        """
        with self._exchange("gather"):
            return self._gather([np.ascontiguousarray(array) for array in local])

    def broadcast(
        self, local: np.ndarray, in_place: bool = False, what: str = "broadcast"
    ) -> np.ndarray:
        """The first worker's array.

        Args:
            local: [n], of the same n and dtype on all workers.
            in_place: whether the result is put into `local`; otherwise `local` is not changed.
            what: as in `sum`.
        """
        with self._exchange(what):
            return self._broadcast(np.ascontiguousarray(local), in_place)

    @abc.abstractmethod
    def close(self) -> None:
        """Closes the links; exchanges of the neighbours fail."""

    @contextlib.contextmanager
    def _exchange(self, what: str) -> Iterator[None]:
        with self._one_at_a_time:
            self.counts[what] += 1
            self._what = what
            if self.broken is not None:
                raise self.broken
            begin = time.perf_counter()
            try:
                yield
            except Exception as e:
                self._broken = self.broken or e
                self._shut()
                raise
            self.exchanges += 1
            if self.on_exchange is not None:
                self.on_exchange(what, begin, time.perf_counter())

    @abc.abstractmethod
    def _shut(self) -> None:
        """Closes the links after an error, so that neighbours that wait fail, too."""

    @abc.abstractmethod
    def _sum(self, total: np.ndarray, add: Add) -> np.ndarray: ...

    @abc.abstractmethod
    def _reduce_scatter(self, total: np.ndarray, cuts: Cuts, add: Add) -> np.ndarray: ...

    @abc.abstractmethod
    def _all_gather(self, own: np.ndarray, cuts: Cuts, total: np.ndarray) -> np.ndarray: ...

    @abc.abstractmethod
    def _gather(self, local: list[np.ndarray]) -> list[np.ndarray]: ...

    @abc.abstractmethod
    def _broadcast(self, local: np.ndarray, in_place: bool) -> np.ndarray: ...
