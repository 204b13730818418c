"""Helpers for tensors of a step: batches without examples, and packs for collectives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfmw.data import examples_of, gather_rows, map_tensors


def batch_rows(batch: Any) -> tf.Tensor:
    """int32 []: the number of examples of a batch, from its first tensor."""
    return tf.cast(examples_of(batch), tf.int32)


def or_one_example(batch: Any, present: tf.Tensor) -> Any:
    """The batch, or one example of zeros where `present` is false, as long as the others are."""
    return map_tensors(lambda tensor: _or_one_row(tensor, present), batch)


def _or_one_row(tensor: Any, present: tf.Tensor) -> Any:
    if isinstance(tensor, tf.RaggedTensor):
        one_row = tf.constant([0, 0], tensor.row_splits.dtype)
        splits = tf.cond(present, lambda: tensor.row_splits, lambda: one_row)
        return tf.RaggedTensor.from_row_splits(tensor.values, splits, validate=False)
    if isinstance(tensor, tf.SparseTensor):
        rows = tf.maximum(tensor.dense_shape[:1], 1)
        shape = tf.concat([rows, tensor.dense_shape[1:]], axis=0)
        out = tf.SparseTensor(tensor.indices, tensor.values, shape)
    else:
        # An empty part of a batch has the batch's other dimensions, which the model may rely on.
        shape = tf.concat([[1], tf.maximum(tf.shape(tensor)[1:], 1)], axis=0)
        out = tf.cond(present, lambda: tensor, lambda: tf.zeros(shape, tensor.dtype))
    out.set_shape([None, *tensor.shape[1:]])
    return out


def first_rows(tensor: Any, rows: tf.Tensor) -> Any:
    """The first `rows` (int32 []) rows of a dense, ragged or sparse tensor."""
    if isinstance(tensor, tf.SparseTensor):
        return gather_rows(tensor, tf.range(tf.cast(rows, tf.int64)))
    return tensor[:rows]


def or_zeros(grad: Any, present: tf.Tensor) -> Any:
    """A gradient, or zeros where `present` is false; None stays None."""
    if grad is None:
        return None
    if isinstance(grad, tf.IndexedSlices):
        return tf.IndexedSlices(or_zeros(grad.values, present), grad.indices, grad.dense_shape)
    return tf.cond(present, lambda: grad, lambda: tf.zeros_like(grad))


def carrier_of(dtype: tf.DType) -> tf.DType:
    """The dtype in which values of `dtype` are sent unchanged: collectives support only a few."""
    if dtype.is_floating:
        return tf.float64 if dtype == tf.float64 else tf.float32
    return tf.int64


def in_packs(
    values: Sequence[tf.Tensor], exchange: Callable[[tf.Tensor], tf.Tensor]
) -> list[tf.Tensor]:
    """Calls a collective on one flat tensor per carrier dtype, instead of on each value.

    Args:
        values: of static shapes; the same shapes and dtypes on all replicas.
        exchange: a collective, [n] -> [n], such as a sum over replicas.

    Returns:
        The results in the shapes and dtypes of `values`.
    """
    out: list[Any] = [None] * len(values)
    by_carrier: dict[tf.DType, list[int]] = {}
    for i, value in enumerate(values):
        by_carrier.setdefault(carrier_of(value.dtype), []).append(i)
    for carrier, positions in sorted(by_carrier.items(), key=lambda item: item[0].name):
        flat = tf.concat([tf.reshape(tf.cast(values[i], carrier), [-1]) for i in positions], axis=0)
        sizes = [int(np.prod(values[i].shape.as_list())) for i in positions]
        for i, part in zip(positions, tf.split(exchange(flat), sizes), strict=True):
            out[i] = tf.cast(tf.reshape(part, values[i].shape), values[i].dtype)
    return out
