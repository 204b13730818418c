"""The rows of a server's variables that an update changes.

    ServerRows([server_variable], [ids], sizes)

The gradients of a row that occurs several times in a batch are added on the worker. So each server
receives each row at most once in a step. `tfmw.tables` has the shards and their lookups.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf


class ServerRows:
    """Some rows of a server's variables, in place of a variable during an optimizer's update.

    Assignments change these rows in place; other rows are neither read nor written. One update of
    all of them is the same arithmetic as an update of each, in fewer ops.

    Args:
        server_variables: on the server that runs this; their rows have one shape and type.
        ids: for each int64 [n], each row at most once.
        sizes: int64 [variables], how many ids of each.
    """

    def __init__(
        self, server_variables: Sequence[tf.Variable], ids: Sequence[tf.Tensor], sizes: tf.Tensor
    ):
        self._variables = server_variables
        self._sizes = sizes
        self._ids = ids
        # Read even where an update only adds: a gather fetches rows into the cache ahead, a scatter
        # would wait for each.
        of_each = zip(server_variables, ids, strict=True)
        self._rows = _joined([tf.gather(variable, own) for variable, own in of_each])
        self.dtype = server_variables[0].dtype
        self._unique_id = server_variables[0]._unique_id

    @property
    def shape(self) -> tf.TensorShape:
        """[n, ...], the rows of all variables."""
        return self._rows.shape

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> tf.Tensor:
        return tf.convert_to_tensor(self._rows, dtype=dtype, name=name)

    def assign(self, value: tf.Tensor) -> None:
        """Replaces the rows."""
        self._rows = tf.identity(value)
        for variable, rows in self._of_each(value):
            variable.scatter_update(rows)

    def assign_add(self, value: tf.Tensor) -> None:
        """Adds to the rows."""
        self._rows = self._rows + value
        for variable, rows in self._of_each(value):
            variable.scatter_add(rows)

    def assign_sub(self, value: tf.Tensor) -> None:
        """Subtracts from the rows."""
        self._rows = self._rows - value
        for variable, rows in self._of_each(value):
            variable.scatter_sub(rows)

    def _of_each(self, value: tf.Tensor) -> list[tuple[tf.Variable, tf.IndexedSlices]]:
        if len(self._ids) == 1:
            return [(self._variables[0], tf.IndexedSlices(value, self._ids[0]))]
        parts = tf.split(value, self._sizes, num=len(self._ids))
        return [
            (variable, tf.IndexedSlices(part, own))
            for variable, part, own in zip(self._variables, parts, self._ids, strict=True)
        ]


def _joined(parts: list[tf.Tensor]) -> tf.Tensor:
    return parts[0] if len(parts) == 1 else tf.concat(parts, axis=0)
