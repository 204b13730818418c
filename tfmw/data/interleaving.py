"""The order of tf.data's interleave, computed for any positions.

    order = InterleaveOrder([10, 7, 12], cycle_length=2, block_length=1)
    pieces, places = order.at(np.arange(20, 29))

`interleave` reads `cycle_length` datasets in turns, `block_length` elements in each
(tensorflow/core/kernels/data/interleave_dataset_op.cc). A dataset that ends in its turn gives its
place to the next one of the input, which is read in the next turn of that place. Between two ends
the order is regular, so it is kept as one segment.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class InterleaveOrder:
    """One pass over the datasets.

    Args:
        lengths: of each dataset.
        cycle_length: number of datasets that are read in turns.
        block_length: number of elements of a turn.
    """

    def __init__(self, lengths: Sequence[int], cycle_length: int, block_length: int):
        self._block = block_length
        self._begins: list[int] = []  # of each segment, its first position
        self._slots: list[int] = []  # and its first place in the two lists below
        self._piece: list[int] = []  # the datasets that are read in turns
        self._read: list[int] = []  # how many of their elements were read before
        self.length = 0
        self._run([int(length) for length in lengths], cycle_length)
        self._arrays = [
            np.array(values, np.int64)
            for values in (self._begins, [*self._slots, len(self._piece)], self._piece, self._read)
        ]

    def at(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """int64 [n] positions -> (int64 [n], their datasets; int64 [n], positions in those)."""
        begins, slots, piece, read = self._arrays
        segment = np.searchsorted(begins, positions, side="right") - 1
        offset = positions - begins[segment]
        first = slots[segment]
        turn, place = np.divmod(offset, self._block)
        around, slot = np.divmod(turn, slots[segment + 1] - first)
        chosen = first + slot
        return piece[chosen], read[chosen] + around * self._block + place

    def _run(self, lengths: list[int], cycle_length: int) -> None:
        places: list[int | None] = [None] * cycle_length
        read = [0] * len(lengths)
        place = opened = 0
        while opened < len(lengths) or any(piece is not None for piece in places):
            turns = [*places[place:], *places[:place]]
            pieces = [piece for piece in turns if piece is not None]
            if len(pieces) == cycle_length or (pieces and opened == len(lengths)):
                around = min((lengths[piece] - read[piece]) // self._block for piece in pieces)
                if around:
                    self._segment(pieces, read, around * self._block)
            piece = places[place]
            if piece is None and opened < len(lengths):
                piece = places[place] = opened
                opened += 1
            if piece is not None:
                count = min(self._block, lengths[piece] - read[piece])
                if count:
                    self._segment([piece], read, count)
                if count < self._block:
                    places[place] = None
            place = (place + 1) % cycle_length

    def _segment(self, pieces: list[int], read: list[int], count: int) -> None:
        """Reads `count` elements of each of these datasets, in turns."""
        self._begins.append(self.length)
        self._slots.append(len(self._piece))
        self._piece.extend(pieces)
        self._read.extend(read[piece] for piece in pieces)
        for piece in pieces:
            read[piece] += count
        self.length += count * len(pieces)
