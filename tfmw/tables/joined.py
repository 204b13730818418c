"""Rows of several small tables, which a server keeps in one variable.

    joined = Joined(server(0), row_bytes=64)
    rows, marks = joined.table([1000, 16], tf.float32)
    slot = joined.slot(rows, tf.float32)              # of these rows

A recommender has dozens of small tables, and a step looks up and updates a few rows of each. With
ops for each table and slot, a server would spend most of its time on starting them. Rows of a
table, its marks and its slots have the same places in their variables. So for each kind one op with
the ids of all tables is enough.

A table is created with its layer, before the number of tables is known. So the variables have room
for many. Unused room takes no memory, as the operating system allocates pages on the first write.
"""

from __future__ import annotations

import itertools
import math
import weakref
from typing import Any

import tensorflow as tf

from tfmw.compat.models import own_variable

TABLE_BYTES = 16 << 20
"""Most bytes of a table's rows on one server that share a variable."""

_BYTES = 128 << 20  # size of a variable with rows of several tables


class Joined:
    """Variables of one server that hold the rows of several tables.

    Args:
        server: its device.
        row_bytes: bytes of a row of the tables.

    The variables live as long as one of their parts is referenced.
    """

    def __init__(self, server: str, row_bytes: int):
        self._server = server
        self._room = _BYTES // row_bytes
        self._rows = 0
        self._variables = weakref.WeakValueDictionary[Any, tf.Variable]()
        self._parts = weakref.WeakValueDictionary[Any, JoinedRows]()

    def has_room(self, rows: int) -> bool:
        """Whether this many more rows fit."""
        return self._rows + rows <= self._room

    def table(self, shape: list[int], dtype: tf.DType) -> tuple[JoinedRows, JoinedRows]:
        """(zeros of this shape for the rows of one more table, a mark for each row: false)."""
        first = self._rows
        self._rows += shape[0]
        marks = self._part("changed", first, shape[:1], tf.bool)
        return self._part("rows", first, shape, dtype), marks

    def slot(self, rows: JoinedRows, dtype: tf.DType) -> JoinedRows:
        """Zeros for a slot of the rows of a table."""
        # An optimizer creates slots of all tables in one order, so slots of one kind get one
        # number.
        free = (number for number in itertools.count() if (number, rows.first) not in self._parts)
        return self._part(next(free), rows.first, rows.shape.as_list(), dtype)

    def _part(self, kind: Any, first: int, shape: list[int], dtype: tf.DType) -> JoinedRows:
        key = kind, dtype, *shape[1:]
        with tf.device(self._server):
            variable = self._variables.get(key)
            if variable is None:
                room = [self._room, *shape[1:]]
                variable = own_variable(
                    lambda: tf.raw_ops.Empty(shape=room, dtype=dtype, init=False),
                    trainable=False,
                    name=f"joined_{kind}",
                )
                self._variables[key] = variable
            part = JoinedRows(self, variable, first, shape)
            part.assign(tf.zeros(shape, dtype))
        self._parts[kind, first] = part
        return part


class JoinedRows:
    """Some rows of a server's variable, which behave like a variable of these rows alone.

    Attributes:
        joined: the object that has them.
        variable: the variable that holds them.
        first: the index of their first row in it.
        shape, dtype: shape and type of these rows.
    """

    def __init__(self, joined: Joined, variable: tf.Variable, first: int, shape: list[int]):
        self.joined = joined
        self.variable = variable
        self.first = first
        self.shape = tf.TensorShape(shape)
        self.dtype = variable.dtype
        self._unique_id = f"{variable._unique_id}_{first}"

    def sparse_read(self, indices: tf.Tensor, name: str | None = None) -> tf.Tensor:
        """The rows at `indices`; `tf.gather` calls it. Raises for indices of a neighbour's rows.

        Raises:
            tf.errors.InvalidArgumentError: an index that is none of these rows.
        """
        del name
        rows = self.shape[0]
        are_rows = tf.reduce_all((indices >= 0) & (indices < rows))
        checked = tf.raw_ops.Assert(
            condition=are_rows, data=["received indices", indices, f"expected 0 to {rows - 1}"]
        )
        with tf.control_dependencies([checked] if checked is not None else []):
            return tf.gather(self.variable, self._places(indices))

    def read_value(self) -> tf.Tensor:
        """All of these rows."""
        rows = tf.gather(self.variable, self._all())
        rows.set_shape(self.shape)
        return rows

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> tf.Tensor:
        return tf.convert_to_tensor(self.read_value(), dtype=dtype, name=name)

    def assign(self, value: Any) -> Any:
        """Replaces all of these rows."""
        return self.variable.scatter_update(self._slices(value))

    def assign_add(self, value: Any) -> Any:
        """Adds to all of these rows."""
        return self.variable.scatter_add(self._slices(value))

    def assign_sub(self, value: Any) -> Any:
        """Subtracts from all of these rows."""
        return self.variable.scatter_sub(self._slices(value))

    def scatter_update(self, rows: tf.IndexedSlices) -> Any:
        """Replaces some of these rows."""
        return self.variable.scatter_update(self._those_of(rows))

    def scatter_add(self, rows: tf.IndexedSlices) -> Any:
        """Adds to some of these rows."""
        return self.variable.scatter_add(self._those_of(rows))

    def scatter_sub(self, rows: tf.IndexedSlices) -> Any:
        """Subtracts from some of these rows."""
        return self.variable.scatter_sub(self._those_of(rows))

    def _those_of(self, rows: tf.IndexedSlices) -> tf.IndexedSlices:
        return tf.IndexedSlices(rows.values, self._places(rows.indices))

    def _slices(self, value: Any) -> tf.IndexedSlices:
        values = tf.broadcast_to(tf.cast(value, self.dtype), self.shape)
        return tf.IndexedSlices(values, self._all())

    def _places(self, indices: tf.Tensor) -> tf.Tensor:
        return indices + tf.constant(self.first, indices.dtype)

    def _all(self) -> tf.Tensor:
        return tf.range(self.first, self.first + self.shape[0], dtype=tf.int64)


def may_join(shape: list[int], dtype: tf.DType) -> bool:
    """Whether one server's rows of a table, of this shape, may join those of other tables."""
    return 0 < math.prod(shape) * dtype.size <= TABLE_BYTES
