"""An array cut into a part for each worker, and who has which."""

from __future__ import annotations

import abc
from collections.abc import Sequence

Cuts = Sequence[int]  # of an array into a part for each worker: N + 1 numbers from 0 to its length

# Elements; of 64 bytes and more. TensorFlow cuts an array there without a copy.
_ALIGNED, _LARGE = 32, 1024


def even_cuts(elements: int, workers: int) -> list[int]:
    """An array of `elements`, cut into parts of about equal sizes; large ones at aligned bytes."""
    unit = _ALIGNED if elements >= _LARGE * workers else 1
    cuts = [elements * part // workers // unit * unit for part in range(workers)]
    return [*cuts, elements]


class Parts(abc.ABC):
    """The part of a sum that each worker, or replica, has first; see `Ring.reduce_scatter`."""

    @abc.abstractmethod
    def part_number(self, rank: int) -> int:
        """The number of the part of a sum that a worker has first."""

    def part_of(self, cuts: Cuts, rank: int) -> slice:
        """The elements of a sum that a worker has first."""
        number = self.part_number(rank)
        return slice(cuts[number], cuts[number + 1])


class OwnPart(Parts):
    """The same as one of the workers.

    Attributes:
        rank: of this worker.
    """

    rank: int

    def own_part(self, cuts: Cuts) -> slice:
        """The elements of a sum that this worker has first."""
        return self.part_of(cuts, self.rank)
