"""The exchanges of workers over rings, and the cuts of an array into a part for each worker.

    ring.sum(values)                # float32 [n]: the sum over workers, bit for bit the same on all
    own = ring.reduce_scatter(values, cuts)     # this worker's part of it, and then
    ring.all_gather(own, cuts, out=values)      # all parts, on all
    rows, = ring.gather([local])    # float32 [sum of n]: all workers' arrays, one after the other
    ring.broadcast(values)          # float32 [n]: the first worker's array

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


class AllReduce(abc.ABC):
    """Exchanges between workers, as one of them. All workers make all calls, in the same order.

    After an error no further exchange is possible. Each of them raises:

    - RingBroken: a worker is lost.
    - RuntimeError: workers are in different exchanges.

    `timeout_s`: seconds without a byte after which an exchange fails; None waits as long as the
    neighbours respond.
    """

    timeout_s: float | None

    def __init__(self, rank: int, size: int):
        self.rank, self.size = rank, size
        self.exchanges = 0  # number of them so far
        self.counts: collections.Counter[str] = collections.Counter()  # the same, by kind
        self._what = ""  # kind of the current exchange
        self._broken: Exception | None = None
        self._one_at_a_time = threading.Lock()

    @property
    def broken(self) -> Exception | None:
        """The error after which no exchange is possible; None before it."""
        return self._broken

    @abc.abstractmethod
    def part_number(self, rank: int) -> int:
        """The number of the part of a sum that a worker has first; see `reduce_scatter`."""

    def own_part(self, cuts: Cuts) -> slice:
        """The elements of a sum that this worker has first."""
        number = self.part_number(self.rank)
        return slice(cuts[number], cuts[number + 1])

    def sum(self, values: np.ndarray, add: Add = add_arrays, what: str = "sum") -> np.ndarray:
        """Replaces an array by the sum of all workers' arrays; returns it.

        Args:
            values: [n], of the same n and dtype on all workers.
            add: (a, b, out): writes the sum of two arrays to a third, or to b.
            what: kind of the exchange, at most 16 bytes; must be the same on all workers.
        """
        with self._exchange(what):
            return self._sum(values, add)

    def reduce_scatter(
        self, values: np.ndarray, cuts: Cuts, add: Add = add_arrays, what: str = "reduce_scatter"
    ) -> np.ndarray:
        """This worker's part of the sum of all workers' arrays: the first half of `sum`.

        With `even_cuts` it is bit for bit the same part of what `sum` returns.

        Args:
            values, add, what: as in `sum`; the other parts are overwritten by other values.
            cuts: where the array is cut into a part for each worker; the same on all.

        Returns:
            [m], the elements `own_part(cuts)` of `values`.
        """
        with self._exchange(what):
            return self._reduce_scatter(values, cuts, add)

    def all_gather(
        self, own: np.ndarray, cuts: Cuts, out: np.ndarray, what: str = "all_gather"
    ) -> np.ndarray:
        """The parts of all workers, in order: the second half of `sum`.

        Args:
            own: [m], of the elements `own_part(cuts)`.
            cuts, what: as in `reduce_scatter`.
            out: [n], where the result is put, the same on all workers; it is returned.
        """
        with self._exchange(what):
            return self._all_gather(own, cuts, out)

    def gather(self, local: Sequence[np.ndarray]) -> list[np.ndarray]:
        """All workers' arrays, joined along the first axis by rank.

        Args:
            local: arrays [rows, ...] with the same number of rows, which may differ between
                workers.
        """
        with self._exchange("gather"):
            return self._gather([np.ascontiguousarray(array) for array in local])

    def broadcast(self, values: np.ndarray, what: str = "broadcast") -> np.ndarray:
        """Replaces an array by the first worker's; returns it.

        Args:
            values: [n], of the same n and dtype on all workers; on the first it is only read.
            what: as in `sum`.
        """
        with self._exchange(what):
            return self._broadcast(values)

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
            try:
                yield
            except Exception as e:
                self._broken = self.broken or e
                self._shut()
                raise
            self.exchanges += 1

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
    def _broadcast(self, values: np.ndarray) -> np.ndarray: ...
