"""Shuffles of tf.data: the order of a pass from any position on, and the seeds of passes.

    order = ShuffleOrder(1000, length, pair_of_pass([7, 1], number=3))
    for block in order.blocks(start=80_000_000): ...      # int64 [n]: positions in the input
    ShuffleSeeds(shuffle).passes = 3                      # the next pass is the fourth

A shuffle holds `buffer_size` elements. Output t is the buffer's element j with `j = t + random(t) %
number held`, and element t takes the place of j (tensorflow/core/kernels/data/
shuffle_dataset_op.cc). Random numbers come from Philox with the pass's two seeds, so the number of
any output can be computed alone. The buffer at output t depends on a few buffers of earlier
outputs, so the cost does not grow with t.

A shuffle with `reshuffle_each_iteration` has a generator, from which each pass draws a pair of
seeds. The generator belongs to the dataset object, so the order of a pass depends on all passes
before it. TensorFlow reads and writes its state only as a part of an iterator's (`SaveInternal` and
`RestoreInternal` there).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import tensor_pb2

from tfmw.compat import datasets
from tfmw.errors import UsageError

_BLOCK = 1 << 17
_PHILOX = tf.random.Algorithm.PHILOX.value
_HISTORY = 16  # length of the simulated history at first, in buffers of outputs

_DRAWN = b"epoch_num_random_samples"
_PER_PASS = 2  # numbers that a pass draws
_MOST_BEGUN = 3
_IGNORE = tf.data.experimental.ExternalStatePolicy.IGNORE.value


class ShuffleOrder:
    """The order of one pass of a shuffle.

    Args:
        buffer_size: buffer size of the shuffle.
        length: number of elements of its input; None if it is infinite.
        seeds: the pair of seeds of this pass.
    """

    def __init__(self, buffer_size: int, length: int | None, seeds: Sequence[int]):
        self._buffer = buffer_size if length is None else min(buffer_size, length)
        self._length = length
        self._seeds = seeds

    def blocks(self, start: int) -> Iterator[np.ndarray]:
        """Yields the input positions of outputs start, start + 1, ..., in blocks."""
        held, end = self._held_at(start), self._length
        while end is None or start < end:
            count = _BLOCK if end is None else min(_BLOCK, end - start)
            out, held = self._run(start, held, count)
            yield out
            start += count

    def _held_at(self, start: int) -> np.ndarray:
        """The buffer before output `start`, as input positions."""
        history = _HISTORY * self._buffer
        while True:
            first = max(0, start - history)
            # The buffer at `first` is unknown, unless nothing has moved yet.
            held = np.full(self._buffer, -1) if first else np.arange(self._buffer)
            while first < start:
                count = min(max(_BLOCK, self._buffer), start - first)
                held = self._run(first, held, count)[1]
                first += count
            if (held >= 0).all():
                return held
            history *= 4

    def _run(self, first: int, held: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        """(outputs first, first + 1, ..., the buffer after `count` outputs)."""
        numbers = np.arange(count)
        sizes: np.ndarray | int = self._buffer
        stop = first + count + self._buffer
        if self._length is not None:
            sizes = np.minimum(self._buffer, self._length - first - numbers)
            stop = min(stop, self._length)
        contents = np.concatenate([held, np.arange(first + len(held), stop)])
        chosen = numbers + _random(self._seeds, first, count) % sizes
        # The output that moved an element to each position last; its own position does not count.
        moved_by = np.full(len(contents), -1)
        moves = chosen != numbers
        moved_by[chosen[moves]] = numbers[moves]
        # The moved element came from an earlier position, and so on.
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
def has_known_order() -> bool:
    """Whether this TensorFlow's shuffles have the order that this module computes."""
    shuffle = datasets.shuffled(tf.data.Dataset.range(50), 7, [3, 2**40 + 5], True)
    for number in range(2):
        theirs = [int(i) for i in shuffle]
        order = ShuffleOrder(7, 50, pair_of_pass([3, 2**40 + 5], number))
        if np.concatenate(list(order.blocks(40))).tolist() != theirs[40:]:
            return False
    return True


@functools.cache
def has_known_states() -> bool:
    """Whether the position of a shuffle can be read and set in this TensorFlow: a test of both.

    If it cannot, each pass has a shuffle of its own, and a resumed one is read again.
    """
    seeds = [3, 2**40 + 5]
    shuffle, same = (datasets.shuffled(tf.data.Dataset.range(9), 9, seeds, True) for _ in range(2))
    expected = list(same.batch(9).repeat(3).as_numpy_iterator())
    fixed = datasets.small_shuffle(seeds, reshuffle_each_iteration=False)
    try:
        place = ShuffleSeeds(shuffle, tested=True)
        found = place.passes == 0 and ShuffleSeeds(fixed, tested=True).pair == seeds
        for number in (2, 0):
            place._set(number * _PER_PASS)
            found &= np.array_equal(next(iter(shuffle.batch(9))), expected[number])
            found &= place.passes == number + 1
        return found
    except Exception:  # any error that another form of the state may raise
        return False


def _random(seeds: Sequence[int], first: int, count: int) -> np.ndarray:
    """int64 [count]: 32-bit samples first, first + 1, ... of Philox4x32-10.

    See Salmon et al., "Parallel random numbers: as easy as 1, 2, 3".
    """
    key, high = (np.uint64(seed % 2**64) for seed in seeds)
    with tf.init_scope(), tf.device("cpu:0"):
        samples = tf.raw_ops.StatelessRandomUniformFullIntV2(
            shape=[first % 4 + count],
            key=[key],
            counter=[np.uint64(first // 4), high],  # one counter gives four samples
            alg=_PHILOX,
            dtype=tf.uint32,
        )
    return samples.numpy()[first % 4 :].astype(np.int64)


class ShuffleSeeds:
    """The seeds of the shuffle at the end of `dataset`.

    No element is read: a shuffle opens its input at its first element.

    Raises:
        UsageError: not `has_known_states`.
    """

    def __init__(self, dataset: tf.data.Dataset, tested: bool = False):
        if not tested and not has_known_states():
            raise UsageError(
                f"TensorFlow {tf.__version__} keeps the place of a shuffle in a form that this "
                "version of tfmw does not know: pass shuffle(..., reshuffle_each_iteration=False) "
                "with a seed, or install a version of TensorFlow that tfmw supports."
            )
        self._dataset = dataset
        self._iterator = iter(dataset)
        self._number = 0  # index of the shuffle's state among those of all iterators
        self._set(self._read()[_DRAWN] - _PER_PASS)

    @property
    def passes(self) -> int:
        """Number of passes over the shuffle that have begun."""
        return self._read()[_DRAWN] // _PER_PASS

    @passes.setter
    def passes(self, passes: int) -> None:
        self.set(passes)

    def set(self, passes: int, now: int | None = None) -> None:
        """Sets the number of passes that have begun.

        Args:
            now: the current number, if it is known.
        """
        missing = passes - (self.passes if now is None else now)
        if 0 <= missing <= _MOST_BEGUN:
            self.begin(missing)
        else:
            self._set(passes * _PER_PASS)

    def begin(self, passes: int) -> None:
        """Begins passes without reading them; faster than setting their number."""
        for _ in range(passes):
            tf.raw_ops.MakeIterator(
                dataset=self._dataset._variant_tensor, iterator=self._iterator._iterator_resource
            )

    @property
    def pair(self) -> list[int]:
        """The shuffle's own pair of seeds, which every pass has without reshuffling."""
        state = self._read()
        return [state[b"seed"], state[b"seed2"]]

    def _read(self) -> dict[bytes, int]:
        _, _, names, values = self._found()
        return dict(zip(names, map(int, values), strict=True))

    def _set(self, drawn: int) -> None:
        states, number, names, values = self._found()
        values[names.index(_DRAWN)] = tf.constant(drawn, tf.int64)
        state = _variant(states[number])
        state.tensors[0].CopyFrom(_proto(tf.raw_ops.CompressElement(components=values)))
        changed = tensor_pb2.TensorProto(dtype=tf.variant.as_datatype_enum, variant_val=[state])
        states[number] = tf.io.parse_tensor(changed.SerializeToString(), tf.variant)
        tf.raw_ops.DeserializeIterator(
            resource_handle=self._iterator._iterator_resource, serialized=tf.stack(states)
        )

    def _found(self) -> tuple[list[tf.Tensor], int, list[bytes], list[tf.Tensor]]:
        """(states of all iterators, index of the shuffle's state, its names, its int64 values)."""
        states = tf.unstack(
            tf.raw_ops.SerializeIterator(
                resource_handle=self._iterator._iterator_resource, external_state_policy=_IGNORE
            )
        )
        for number in range(self._number, len(states)):
            proto = _variant(states[number])
            names = proto.metadata.split(b"@@")[1:]
            if _DRAWN in names:
                self._number = number
                compressed = tf.io.parse_tensor(proto.tensors[0].SerializeToString(), tf.variant)
                values = tf.raw_ops.UncompressElement(
                    compressed=compressed,
                    output_types=[tf.int64] * len(names),
                    output_shapes=[[]] * len(names),
                )
                return states, number, names, list(values)
        raise AssertionError("an iterator over a shuffle has its seeds in its state")


def _proto(tensor: tf.Tensor) -> Any:
    return tensor_pb2.TensorProto.FromString(tf.io.serialize_tensor(tensor).numpy())


def _variant(scalar: tf.Tensor) -> Any:
    """VariantTensorDataProto of a scalar, after its size in bytes as a varint."""
    content = _proto(scalar).tensor_content
    begin = next(i for i, byte in enumerate(content) if byte < 0x80) + 1
    return tensor_pb2.VariantTensorDataProto.FromString(content[begin:])
