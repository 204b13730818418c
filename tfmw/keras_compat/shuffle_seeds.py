"""The seeds that a shuffle draws: how many passes it has begun, read and set.

A shuffle with `reshuffle_each_iteration` has a generator, which each pass asks for a pair of seeds.
The generator belongs to the dataset object, so the order of a pass depends on all passes before it.
TensorFlow reads and writes its state only as a part of an iterator's
(tensorflow/core/kernels/data/shuffle_dataset_op.cc, `SaveInternal` and `RestoreInternal`).
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from tensorflow.core.framework import tensor_pb2
from tensorflow.python.data.ops import iterator_ops

_DRAWN = b"epoch_num_random_samples"
_PER_PASS = 2  # numbers that a pass draws
_MOST_BEGUN = 3
_IGNORE = tf.data.experimental.ExternalStatePolicy.IGNORE.value


class ShuffleSeeds:
    """The seeds of the shuffle that `dataset` ends in.

    No element is read: a shuffle opens its input at its first element.
    """

    def __init__(self, dataset: tf.data.Dataset):
        self._dataset = dataset
        self._iterator = iter(dataset)
        self._number = 0  # of the shuffle's state, among those of all iterators
        self._set(self._read()[_DRAWN] - _PER_PASS)

    @property
    def passes(self) -> int:
        """How many passes over the shuffle have begun."""
        return self._read()[_DRAWN] // _PER_PASS

    @passes.setter
    def passes(self, passes: int) -> None:
        self.set(passes)

    def set(self, passes: int, now: int | None = None) -> None:
        """Sets how many passes have begun.

        Args:
            now: how many have, if it is known.
        """
        missing = passes - (self.passes if now is None else now)
        if 0 <= missing <= _MOST_BEGUN:
            self.begin(missing)
        else:
            self._set(passes * _PER_PASS)

    def begin(self, passes: int) -> None:
        """Begins passes that nobody reads; faster than to set their number."""
        for _ in range(passes):
            tf.raw_ops.MakeIterator(
                dataset=self._dataset._variant_tensor, iterator=self._iterator._iterator_resource
            )

    @property
    def pair(self) -> list[int]:
        """The pair of seeds of an own pass, which every pass has without reshuffles."""
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
        """(states of all iterators, number of the shuffle's, its names, their int64 values)."""
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
    """VariantTensorDataProto of a scalar, which its size in bytes precedes, as a varint."""
    content = _proto(scalar).tensor_content
    begin = next(i for i, byte in enumerate(content) if byte < 0x80) + 1
    return tensor_pb2.VariantTensorDataProto.FromString(content[begin:])


PRIVATE_NAMES: list[tuple[Any, str]] = [
    (iterator_ops.OwnedIterator, "_create_iterator"),  # which sets _iterator_resource
    (tf.data.Dataset, "_variant_tensor"),
]
"""(owner, name) of each private name that this module uses; see `keras_compat.missing_names`."""
