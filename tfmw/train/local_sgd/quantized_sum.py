"""A sum over workers in 8 or 4 bits, with error feedback. NumPy only.

    quantized = QuantizedSum(elements, "int8")
    total = quantized(ring, local)       # float32 [n], bit for bit the same on all workers

Values are sent in blocks of 1024: integers, and a scale that makes the largest of them 127 or 7. A
worker adds its own values to each partial sum and rounds the result again. It adds its rounding
errors to its own values in the next sum. So errors are delayed, not lost: the sum of all results,
plus all errors that workers still keep, is exact to float rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from tfmw.train.mirrored.collectives.all_reduce import AllReduce

BLOCK = 1024
_PIECE = 32  # blocks in a chunk of 128 KB
LEVELS = {"int8": 127, "int4": 7}
"""Largest absolute integer of each format."""

Blocks: TypeAlias = npt.NDArray[np.float32]  # shape [blocks, BLOCK]


class QuantizedSum:
    """Sums arrays with at most so many elements.

    Args:
        elements: most elements of an array.
        kind: "int8" or "int4".

    Attributes:
        left: float32 [blocks, BLOCK], rounding errors that this worker still has to add.
    """

    def __init__(self, elements: int, kind: str):
        self._levels = LEVELS[kind]
        bits = np.dtype("i1" if kind == "int8" else "u1")
        sent = BLOCK if kind == "int8" else BLOCK // 2
        self._dtype = np.dtype([("scale", "<f4"), ("values", bits, (sent,))])
        self.left: Blocks = np.zeros([-(-elements // BLOCK), BLOCK], np.float32)

    @np.errstate(all="ignore")  # a block with a NaN or an infinity becomes NaN
    def __call__(self, ring: AllReduce, local: np.ndarray) -> np.ndarray:
        """The sum of all workers' arrays: float32 [n] -> [n]. All workers must call it.

        Args:
            ring: a ring of one level: each worker adds its own values to received ones, once.
        """
        own, self.left = self.left, np.empty_like(self.left)
        own.reshape(-1)[: len(local)] += local
        packed: np.ndarray = np.empty(len(own), self._dtype)
        self._round(own, packed, self.left)

        def add(coming: np.ndarray, here: np.ndarray, out: np.ndarray) -> None:
            # `here` has this worker's values of the same elements, already rounded.
            first = (here.ctypes.data - packed.ctypes.data) // self._dtype.itemsize
            blocks = slice(first, first + len(here))
            self._round(own[blocks], out, self.left[blocks], coming)

        total = ring.sum(packed, add=add, what="rounds")
        for piece in _pieces(len(own)):
            own[piece] = self.unpacked(total[piece])
        return own.reshape(-1)[: len(local)]

    def _round(
        self, own: Blocks, out: np.ndarray, left: Blocks, coming: np.ndarray | None = None
    ) -> None:
        """Packs values, or their sum with others, and keeps the rounding errors.

        Args:
            out: takes the packed values; may be the memory of `coming`.
            left: takes the rest.
            coming: packed values of other workers.
        """
        for piece in _pieces(len(own)):
            total = own[piece]
            if coming is not None:
                total = self.unpacked(coming[piece]) + total
            out[piece] = self.packed(total)
            np.subtract(total, self.unpacked(out[piece]), out=left[piece])

    @np.errstate(all="ignore")
    def packed(self, blocks: Blocks) -> np.ndarray:
        """Blocks in their format on the network."""
        out: np.ndarray = np.empty(len(blocks), self._dtype)
        scale = np.abs(blocks).max(axis=1, initial=0.0) / self._levels
        safe = np.where(scale == 0, np.float32(1), scale)
        whole = np.rint(blocks / safe[:, None]).astype(np.int8)
        out["scale"] = scale
        if self._levels == 127:
            out["values"] = whole
        else:
            nibbles = (whole + 8).astype(np.uint8)
            out["values"] = nibbles[:, ::2] | (nibbles[:, 1::2] << 4)
        return out

    @np.errstate(all="ignore")
    def unpacked(self, packed: np.ndarray) -> Blocks:
        """Values of received blocks."""
        values = packed["values"]
        whole: Blocks = np.empty([len(packed), BLOCK], np.float32)
        if self._levels == 127:
            whole[...] = values
        else:
            whole[:, ::2] = values & 15
            whole[:, 1::2] = values >> 4
            whole -= 8
        whole *= packed["scale"][:, None]
        return whole


def _pieces(blocks: int) -> Iterator[slice]:
    """Chunks of blocks that stay in a core's cache from one operation on them to the next."""
    for first in range(0, blocks, _PIECE):
        yield slice(first, first + _PIECE)
