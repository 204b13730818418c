"""The order of tf.data's shuffle, computed from any position on.

A shuffle holds `buffer_size` elements. Output t is element j of those held, `j = t + random(t) %
number held`, and element t takes the place of j (tensorflow/core/kernels/data/
shuffle_dataset_op.cc). Random numbers come from Philox with the pass's two seeds, so that of any
output can be computed alone. The elements held at output t depend on a few buffers of outputs
before it, so the cost does not grow with t.

    order = ShuffleOrder(1000, length, pair_of_pass([7, 1], number=3))
    for block in order.blocks(start=80_000_000): ...      # int64 [n]: positions in the input
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import numpy as np
import tensorflow as tf

from tfmw.keras_compat import datasets

_BLOCK = 1 << 17
_HISTORY = 16  # buffers of outputs that are computed to know the elements held, at first


class ShuffleOrder:
    """One pass of a shuffle.

    Args:
        buffer_size: of the shuffle.
        length: of its input; None if it is infinite.
        seeds: the pair of this pass.
    """

    def __init__(self, buffer_size: int, length: int | None, seeds: Sequence[int]):
        self._buffer = buffer_size if length is None else min(buffer_size, length)
        self._length = length
        self._seeds = seeds

    def blocks(self, start: int) -> Iterator[np.ndarray]:
        """Yields the positions of outputs start, start + 1, ... in the input, block by block."""
        held, end = self._held_at(start), self._length
        while end is None or start < end:
            count = _BLOCK if end is None else min(_BLOCK, end - start)
            out, held = self._run(start, held, count)
            yield out
            start += count

    def _held_at(self, start: int) -> np.ndarray:
        """The contents of positions start, start + 1, ... before output `start`."""
        history = _HISTORY * self._buffer
        while True:
            first = max(0, start - history)
            # What a position has at `first` is not known, unless nothing has moved yet.
            held = np.full(self._buffer, -1) if first else np.arange(self._buffer)
            while first < start:
                count = min(max(_BLOCK, self._buffer), start - first)
                held = self._run(first, held, count)[1]
                first += count
            if (held >= 0).all():
                return held
            history *= 4

    def _run(self, first: int, held: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        """(outputs first, first + 1, ..., the contents of positions from first + count on)."""
        numbers = np.arange(count)
        sizes: np.ndarray | int = self._buffer
        stop = first + count + self._buffer
        if self._length is not None:
            sizes = np.minimum(self._buffer, self._length - first - numbers)
            stop = min(stop, self._length)
        contents = np.concatenate([held, np.arange(first + len(held), stop)])
        chosen = numbers + _random(self._seeds, first, count) % sizes
        # The output that moved something to each position last; itself does not count.
        moved_by = np.full(len(contents), -1)
        moves = chosen != numbers
        moved_by[chosen[moves]] = numbers[moves]
        # What moves to a position was moved there before, and so on.
        root = np.where(moved_by[:count] >= 0, moved_by[:count], numbers)
        while not np.array_equal(further := root[root], root):
            root = further
        moved = contents[root]
        by_choice = np.argsort(chosen, kind="stable")
        again = chosen[by_choice[1:]] == chosen[by_choice[:-1]]
        out = contents[chosen]
        out[by_choice[1:][again]] = moved[by_choice[:-1][again]]
        rest = moved_by[count:]
        return out, np.where(rest >= 0, moved[rest], contents[count:])


def pair_of_pass(seeds: Sequence[int], number: int, reshuffles: bool = True) -> list[int]:
    """The pair of seeds of pass `number` of a shuffle with these seeds."""
    return [int(s) for s in _random(seeds, 2 * number, 2)] if reshuffles else list(seeds)


@functools.cache
def is_known() -> bool:
    """Whether the shuffles of this TensorFlow have the order that is computed here."""
    shuffle = datasets.shuffled(tf.data.Dataset.range(50), 7, [3, 2**40 + 5], True)
    for number in range(2):
        theirs = [int(i) for i in shuffle]
        order = ShuffleOrder(7, 50, pair_of_pass([3, 2**40 + 5], number))
        if np.concatenate(list(order.blocks(40))).tolist() != theirs[40:]:
            return False
    return True


def _random(seeds: Sequence[int], first: int, count: int) -> np.ndarray:
    """int64 [count]: 32-bit samples first, first + 1, ... of Philox4x32-10.

    See Salmon et al., "Parallel random numbers: as easy as 1, 2, 3".
    """
    low, bits = np.uint64(0xFFFFFFFF), np.uint64(32)
    blocks: np.ndarray = np.arange(first // 4, (first + count + 3) // 4, dtype=np.uint64)
    key, high = (np.uint64(seed % 2**64) for seed in seeds)
    keys = [key & low, key >> bits]
    words = [blocks & low, blocks >> bits, high & low, high >> bits]
    for _ in range(10):
        products = [words[0] * np.uint64(0xD2511F53), words[2] * np.uint64(0xCD9E8D57)]
        words = [
            (products[1] >> bits) ^ words[1] ^ keys[0],
            products[1] & low,
            (products[0] >> bits) ^ words[3] ^ keys[1],
            products[0] & low,
        ]
        keys = [
            (keys[0] + np.uint64(0x9E3779B9)) & low,
            (keys[1] + np.uint64(0xBB67AE85)) & low,
        ]
    samples = np.stack(np.broadcast_arrays(*words), axis=1).reshape(-1).astype(np.int64)
    return samples[first % 4 :][:count]
