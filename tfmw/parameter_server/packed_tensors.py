"""Several tensors as one: a server gets, and gives, one message in place of many.

    message = pack([sizes, ids, rows])                # where they are made
    sizes, ids, rows = unpack(message, specs)         # where they are used

Each tensor that goes from one process to another is a message of its own, of a tenth of a
millisecond and more, whatever its size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import tensorflow as tf


def spec_of(tensor: tf.Tensor) -> tf.TensorSpec:
    """Shape, of which the first axis may vary, and dtype."""
    shape = tensor.shape.as_list()
    return tf.TensorSpec([None, *shape[1:]] if shape else [], tensor.dtype)


def pack(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """One tensor of some; uint8 [bytes], unless it is one only.

    Args:
        tensors: [n, ...] or [], of any types of fixed size, not bool.
    """
    if len(tensors) == 1:
        return tensors[0]
    parts = [tf.reshape(tf.bitcast(tensor, tf.uint8), [-1]) for tensor in tensors]
    lengths = tf.concat(tf.raw_ops.ShapeN(input=parts, out_type=tf.int64), axis=0)
    return tf.concat([tf.reshape(tf.bitcast(lengths, tf.uint8), [-1]), *parts], axis=0)


def unpack(message: tf.Tensor, specs: Sequence[tf.TensorSpec]) -> list[tf.Tensor]:
    """The tensors of `pack`.

    Args:
        specs: `spec_of` each of them.
    """
    if len(specs) == 1:
        return [message]
    header = tf.int64.size * len(specs)
    lengths = tf.bitcast(tf.reshape(message[:header], [-1, tf.int64.size]), tf.int64)
    parts = tf.split(message[header:], lengths, num=len(specs))
    return [_restored(part, spec) for part, spec in zip(parts, specs, strict=True)]


def _restored(part: tf.Tensor, spec: tf.TensorSpec) -> tf.Tensor:
    size = spec.dtype.size
    flat = tf.bitcast(tf.reshape(part, [-1, size] if size > 1 else [-1]), spec.dtype)
    shape = spec.shape.as_list()
    assert all(axis is not None for axis in shape[1:]), spec
    if not shape:
        return tf.reshape(flat, [])
    if math.prod(shape[1:]) == 0:
        raise ValueError(f"{spec} has no elements: its first axis cannot be told from its bytes")
    return tf.reshape(flat, [-1, *shape[1:]])
