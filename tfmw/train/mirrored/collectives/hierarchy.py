"""Hierarchical all-reduce of workers on several machines: within each machine, then between them.

    ring = connect(rank, machines, join)
    ring.sum(values)                # and the other methods of all_reduce.py

One ring of all workers sends 2 (N - 1) / N times the bytes of an array over the network of each
machine. It needs 2 (N - 1) messages, one after the other. Here the K workers of a machine first
reduce-scatter through their shared memory, so that each has 1/K of the machine's sum. Each then
all-reduces its shard with one worker of each of the other machines, M in all. At the end the
workers of a machine all-gather their shards. This sends 2 (M - 1) / M times the bytes over the
network of each machine, in 2 (M - 1) messages.

Each element is summed on one worker and copied from there, so all workers have the same sum, bit
for bit. Elements are added in another order than in one ring, so the two differ by rounding.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Hashable, Sequence

import numpy as np

from tfmw.train.mirrored.collectives.all_reduce import Add, AllReduce, Cuts, even_cuts
from tfmw.train.mirrored.collectives.ring import Ring

HIERARCHY = "TFMW_HIERARCHY"
"""Variable: with 0, one ring connects all workers, on any machines."""


class HierarchicalRing(AllReduce):
    """All-reduce of workers in two levels.

    Args:
        machines: the ranks of each machine's workers, the same number on each; rank 0 is the first.
        rank: rank of this worker.
        within: the ring of this machine's workers.
        between: the ring of one worker of each machine.
    """

    def __init__(self, machines: Sequence[Sequence[int]], rank: int, within: Ring, between: Ring):
        super().__init__(rank, sum(map(len, machines)))
        self.within = within
        self._between = between
        self._machines = machines
        self._place = {
            worker: (machine, place)
            for machine, workers in enumerate(machines)
            for place, worker in enumerate(workers)
        }

    @property
    def broken(self) -> Exception | None:
        return self._broken or self.within.broken or self._between.broken

    @property
    def timeout_s(self) -> float | None:
        return self.within.timeout_s

    @timeout_s.setter
    def timeout_s(self, seconds: float | None) -> None:
        self.within.timeout_s = self._between.timeout_s = seconds

    def longest_part(self, elements: int) -> int:
        """The most elements of an array that a worker has in `sum_with`."""
        cuts = even_cuts(elements, self.within.size)
        return max(end - begin for begin, end in itertools.pairwise(cuts))

    def sum_with(
        self,
        between: Callable[[Ring, np.ndarray], np.ndarray],
        values: np.ndarray,
        what: str = "sum",
    ) -> np.ndarray:
        """Replaces an array by its sum, with a function for the sum between machines.

        Args:
            between: (the ring of one worker of each machine, its part of the machine's sum) -> the
                sum of these parts over machines, the same on all.
        """
        with self._exchange(what):
            cuts = even_cuts(len(values), self.within.size)
            own = self.within.reduce_scatter(values, cuts, what=what)
            own[...] = between(self._between, own)
            return self.within.all_gather(own, cuts, values, what)

    def part_number(self, rank: int) -> int:
        """The shard of a sum that a worker has first; its machine's sum gives it M in a row."""
        machine, place = self._place[rank]
        first = self.within.part_number(place) * len(self._machines)
        return first + self._between.part_number(machine)

    def close(self) -> None:
        self.within.close()
        self._between.close()

    def _shut(self) -> None:
        self.close()  # workers that wait at the other level fail, too

    def _levels(self, cuts: Cuts) -> tuple[Cuts, Cuts]:
        """Cuts of an array within a machine, and of this worker's shard of it between machines."""
        machines = len(self._machines)
        first = self.within.part_number(self.within.rank) * machines
        own = cuts[first : first + machines + 1]
        return cuts[::machines], [cut - own[0] for cut in own]

    def _sum(self, total: np.ndarray, add: Add) -> np.ndarray:
        cuts = even_cuts(len(total), self.size)
        return self._all_gather(self._reduce_scatter(total, cuts, add), cuts, total)

    def _reduce_scatter(self, total: np.ndarray, cuts: Cuts, add: Add) -> np.ndarray:
        within, between = self._levels(cuts)
        of_machine = self.within.reduce_scatter(total, within, add, self._what)
        return self._between.reduce_scatter(of_machine, between, add, self._what)

    def _all_gather(self, own: np.ndarray, cuts: Cuts, total: np.ndarray) -> np.ndarray:
        within, between = self._levels(cuts)
        of_machine = total[self.within.own_part(within)]
        self._between.all_gather(own, between, of_machine, self._what)
        return self.within.all_gather(of_machine, within, total, self._what)

    def _gather(self, local: list[np.ndarray]) -> list[np.ndarray]:
        (rows,) = self._by_place([np.array([len(local[0])])])
        # The results are ordered by position in a machine, then by machine.
        order = np.array(self._machines).T.reshape(-1)
        starts = np.split(np.arange(rows.sum()), np.cumsum(rows)[:-1])
        by_rank = np.concatenate([starts[i] for i in np.argsort(order)])
        return [array[by_rank] for array in self._by_place(local)]

    def _by_place(self, local: list[np.ndarray]) -> list[np.ndarray]:
        return self.within.gather(self._between.gather(local))

    def _broadcast(self, values: np.ndarray, root: int) -> np.ndarray:
        machine, place = self._place[root]
        if self.within.rank == place:
            self._between.broadcast(values, self._what, machine)
        return self.within.broadcast(values, self._what, place)

    @property
    def previous(self) -> int:
        return self._between.previous

    def _shift(self, local: np.ndarray) -> np.ndarray:
        return self._between.shift([local], self._what)


def by_machine(machines: Sequence[Hashable]) -> list[list[int]] | None:
    """Ranks of each machine's workers; None if one ring is as good, or the only possibility.

    Args:
        machines: id of each worker's machine by rank, equal for workers of one machine; None if
            unknown.
    """
    found: dict[Hashable, list[int]] = {}
    for rank, machine in enumerate(machines):
        found.setdefault((rank,) if machine is None else machine, []).append(rank)
    sizes = {len(workers) for workers in found.values()}
    return list(found.values()) if len(found) > 1 and len(sizes) == 1 and sizes != {1} else None


def connect(
    rank: int, machines: Sequence[Hashable], join: Callable[[Sequence[int]], Ring]
) -> AllReduce:
    """Joins one ring of all workers, or the two levels. All workers must call it.

    Args:
        rank: rank of this worker.
        machines: see `by_machine`.
        join: function that joins the ring of these ranks, as `ring.connect` does.
    """
    groups = by_machine(machines)
    if groups is None:
        return join(range(len(machines)))
    own = next(group for group in groups if rank in group)
    place = own.index(rank)
    with contextlib.ExitStack() as undo:
        within = join(own)
        undo.callback(within.close)
        between = join([group[place] for group in groups])
        undo.pop_all()
    return HierarchicalRing(groups, rank, within, between)
