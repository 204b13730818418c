"""Sums of sparse gradients: of all replicas' rows, those of one lookup are added up.

sent = parts_of(gradient)                  # each is summed or gathered over the replicas
total = summed(received, replicas)         # one gradient again, the same on all replicas
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfmw.keras_compat.row_origins import Origin, row_parts


def parts_of(grad: Any) -> list[tuple[Origin | None, Any]]:
    """(origin of its rows, part) of a gradient; a dense one is its only part, None has none."""
    if grad is None:
        return []
    return [*row_parts(grad)] if isinstance(grad, tf.IndexedSlices) else [(None, grad)]


def summed(parts: list[tuple[Origin | None, Any]], replicas: int) -> Any:
    """The gradient of the global batch.

    Args:
        parts: of `parts_of`, dense ones summed over replicas, slices of all replicas joined.
        replicas: number of them.
    """
    origin, first = parts[0]
    if origin is None:
        return first
    slices = [_added_up(origin, part, replicas) for origin, part in parts if origin is not None]
    if len(slices) == 1:
        return slices[0]
    return tf.IndexedSlices(
        tf.concat([part.values for part in slices], 0),
        tf.concat([part.indices for part in slices], 0),
        first.dense_shape,
    )


def _added_up(origin: Origin, part: tf.IndexedSlices, replicas: int) -> tf.IndexedSlices:
    """The rows of one lookup on all replicas, as one process has them."""
    if origin is Origin.EXAMPLES:
        return part
    rows, size = part.indices, tf.size(part.indices)
    of_one = size // replicas
    blocks = tf.reshape(rows[: of_one * replicas], [replicas, of_one])
    equal = tf.logical_and(of_one * replicas == size, tf.reduce_all(blocks == blocks[:1]))
    distinct, position = tf.unique(rows)
    number = tf.size(distinct)
    if origin is Origin.SAME:  # each occurrence for itself, if they can be told apart
        position = tf.where(equal, tf.range(size) % tf.maximum(of_one, 1), position)
        number = tf.where(equal, of_one, number)
    elif origin is Origin.UNKNOWN:
        alike = tf.logical_and(equal, number == of_one)
        position = tf.where(alike, position, tf.range(size))
        number = tf.where(alike, number, size)
    return tf.IndexedSlices(
        tf.math.unsorted_segment_sum(part.values, position, number),
        tf.math.unsorted_segment_max(rows, position, number),
        part.dense_shape,
    )
