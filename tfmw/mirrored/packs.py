"""Variables whose gradients travel together over a ring, and which part of them a worker has."""

from __future__ import annotations

import dataclasses

import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class Pack:
    """Variables whose gradients travel together.

    Attributes:
        indices: of the variables, in the order in which they travel.
        starts: of each variable in the pack, in elements, and the end of the last one.
        cuts: into a part for each worker.
        dtype: of all of them.
    """

    indices: list[int]
    starts: list[int]
    cuts: list[int]
    dtype: tf.DType

    def elements(self, position: int, part: slice) -> slice:
        """The slice of a flattened variable that lies in a part of the pack."""
        start, end = self.starts[position], self.starts[position + 1]
        begin = min(max(part.start, start), end)
        return slice(begin - start, max(begin, min(part.stop, end)) - start)

    def elements_in(self, part: slice) -> list[tuple[int, slice]]:
        """(index, elements) of the variables that have some in a part of the pack."""
        found = [(i, self.elements(n, part)) for n, i in enumerate(self.indices)]
        return [(i, elements) for i, elements in found if elements.stop > elements.start]

    @property
    def sizes(self) -> list[int]:
        """Elements of each variable."""
        return [end - start for start, end in zip(self.starts, self.starts[1:], strict=False)]
