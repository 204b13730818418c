"""Variables whose rows are spread over parameter servers.

    rows = look_up(shards, ids)                       # on a worker: only these rows are sent
    for shard, grads, ids in split_by_shard(shards, gradient): ...   # each server gets its own rows
    Rows(server_variable, ids)                        # on a server: the rows that an update changes

A variable is divided along its first axis into contiguous ranges, one `VariableShard` each. The
shards concatenated are the whole variable, so backups and exports do not depend on their number. A
row that occurs several times in a batch is sent once, and its gradients are added on the worker. So
each server receives each row at most once in a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfmw.parameter_server.variables import VariableShard, server


def look_up(shards: Sequence[VariableShard], ids: tf.Tensor) -> tf.Tensor:
    """Rows of a divided variable.

    Args:
        shards: of the variable, in the order of its rows.
        ids: int64 [n], rows of the whole, in any order, repeated or not.

    Returns:
        [n, ...] on the worker.
    """
    unique, positions = tf.unique(ids, out_idx=tf.int64)
    if len(shards) == 1:
        with tf.device(server(shards[0].server)):
            rows = tf.gather(shards[0].variable, unique)
        return tf.gather(tf.identity(rows), positions)
    owners = _owners(shards, unique)
    asked = tf.dynamic_partition(unique, owners, len(shards))
    places = tf.dynamic_partition(tf.range(tf.size(unique)), owners, len(shards))
    found = []
    for shard, local_ids in zip(shards, asked, strict=True):
        with tf.device(server(shard.server)):
            rows = tf.gather(shard.variable, local_ids - shard.start)
        found.append(tf.identity(rows))
    return tf.gather(tf.dynamic_stitch(places, found), positions)


def read_whole(shards: Sequence[VariableShard]) -> tf.Tensor:
    """All rows of a variable, on the worker: for kernels, of which a step needs all rows."""
    values = []
    for shard in shards:
        with tf.device(server(shard.server)):
            value = shard.variable.read_value()
        values.append(tf.identity(value))
    return values[0] if len(values) == 1 else tf.concat(values, axis=0)


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
    owners = _owners(shards, unique)
    ids = tf.dynamic_partition(unique, owners, len(shards))
    values = tf.dynamic_partition(summed, owners, len(shards))
    return [
        (shard, rows, local_ids - shard.start)
        for shard, local_ids, rows in zip(shards, ids, values, strict=True)
    ]


def _owners(shards: Sequence[VariableShard], ids: tf.Tensor) -> tf.Tensor:
    """int32 [n], which shard each row is in."""
    starts = tf.constant([shard.start for shard in shards[1:]], tf.int64)
    return tf.searchsorted(starts, ids, side="right", out_type=tf.int32)


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
