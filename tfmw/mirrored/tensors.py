"""Helpers for tensors of a step: gradients without examples, and packs for collectives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfmw.data import examples_of


def batch_rows(batch: Any) -> tf.Tensor:
    """int32 []: the number of examples of a batch, from its first tensor."""
    return tf.cast(examples_of(batch), tf.int32)


def of_any_rows(tensor: Any) -> Any:
    """The tensor without a static number of rows.

    A trace must not divide by one replica's, nor take a number for one of examples.
    """
    if isinstance(tensor, tf.Tensor) and not hasattr(tensor, "numpy"):
        return tf.compat.v1.placeholder_with_default(tensor, [None, *tensor.shape[1:]])
    return tensor


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
        values: the same shapes and dtypes on all replicas.
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
        sizes = [tf.size(values[i]) for i in positions]
        parts = tf.split(exchange(flat), sizes, num=len(positions))
        for i, part in zip(positions, parts, strict=True):
            out[i] = tf.cast(tf.reshape(part, tf.shape(values[i])), values[i].dtype)
            out[i].set_shape(values[i].shape)
    return out
