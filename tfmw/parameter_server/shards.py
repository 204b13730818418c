"""Gradients of variables whose rows are spread over parameter servers.

    for shard, grads, ids in split_by_shard(shards, gradient): ...   # each server gets its own rows
    Rows(server_variable, ids)                        # on a server: the rows that an update changes

The gradients of a row that occurs several times in a batch are added on the worker. So each server
receives each row at most once in a step. `tfmw.tables` has the shards and their lookups.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfmw.tables import VariableShard, owners


def split_by_shard(shards: Sequence[VariableShard], gradient: Any) -> list[tuple[Any, ...]]:
    """Divides the gradient of a divided variable among its servers.

    Args:
        gradient: dense, or `tf.IndexedSlices` with rows of the whole, repeated or not.

    Returns:
        For each shard (shard, gradients [n, ...], rows int64 [n] counted from its start), on the
        worker; (shard, gradients) for gradients of all its rows.
    """
    if not isinstance(gradient, tf.IndexedSlices):
        return [(p, gradient[p.start : p.stop] if p.stop else gradient) for p in shards]
    unique, positions = tf.unique(tf.cast(gradient.indices, tf.int64), out_idx=tf.int64)
    summed = tf.math.unsorted_segment_sum(gradient.values, positions, tf.size(unique))
    owned_by = owners(shards, unique)
    ids = tf.dynamic_partition(unique, owned_by, len(shards))
    values = tf.dynamic_partition(summed, owned_by, len(shards))
    return [
        (shard, rows, local_ids - shard.start)
        for shard, local_ids, rows in zip(shards, ids, values, strict=True)
    ]


class Rows:
    """Some rows of a server's variable, in place of the variable during an optimizer's update.

    Assignments change these rows in place; other rows are neither read nor written.

    Args:
        server_variable: the variable, on the server that runs this.
        ids: int64 [n], each row at most once.
    """

    def __init__(self, server_variable: tf.Variable, ids: tf.Tensor):
        self._variable = server_variable
        self._ids = ids
        self._rows = tf.gather(server_variable, ids)
        self.dtype = server_variable.dtype
        self._unique_id = server_variable._unique_id

    @property
    def shape(self) -> tf.TensorShape:
        """[n, ...]."""
        return self._rows.shape

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> tf.Tensor:
        return tf.convert_to_tensor(self._rows, dtype=dtype, name=name)

    def assign(self, value: tf.Tensor) -> None:
        """Replaces the rows."""
        self._rows = tf.identity(value)
        self._variable.scatter_update(tf.IndexedSlices(value, self._ids))

    def assign_add(self, value: tf.Tensor) -> None:
        """Adds to the rows."""
        self._rows = self._rows + value
        self._variable.scatter_add(tf.IndexedSlices(value, self._ids))

    def assign_sub(self, value: tf.Tensor) -> None:
        """Subtracts from the rows."""
        self._rows = self._rows - value
        self._variable.scatter_sub(tf.IndexedSlices(value, self._ids))
