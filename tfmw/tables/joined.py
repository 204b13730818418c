"""Variables of a server for the rows of tables, their marks and slots, at the same places in each.

    joined = Joined(0, room=1000)
    shard = joined.table(new, 0, 600)          # rows 0 to 600 of a new table
    slot = joined.beside(shard, new_slot)      # for an optimizer's slot of these rows

A recommender has dozens of small tables, and a step looks up and updates a few rows of each. With
ops for each table and slot, a server would spend most of its time on starting them. So small tables
share variables: for each kind one op with the ids of all tables is enough. A large table has
variables of its own.

A table is created with its layer, before the number of tables is known. So shared variables have
room for many. Unused room takes no memory, as the operating system allocates pages on the first
write.
"""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from typing import Any

import tensorflow as tf

from tfmw.compat.models import own_variable
from tfmw.compat.table_variables import NewVariable
from tfmw.tables.shards import VariableShard, server

TABLE_BYTES = 16 << 20
"""Most bytes of a table's rows on one server that share a variable."""

SHARED_BYTES = 128 << 20
"""Size of a variable with rows of several tables."""


class Joined:
    """Variables of one server, each with `room` rows.

    The variables live as long as one of their shards is referenced.
    """

    def __init__(self, where: int, room: int):
        self.room = room
        self._server = where
        self._rows = 0
        self._variables = weakref.WeakValueDictionary[Any, tf.Variable]()
        self._shards = weakref.WeakValueDictionary[Any, VariableShard]()

    def has_room(self, rows: int) -> bool:
        """Whether this many more rows fit."""
        return self._rows + rows <= self.room

    def table(self, new: NewVariable, start: int, stop: int) -> VariableShard:
        """Makes room for rows of one more table; they have no values yet, and are unmarked."""
        changed = self._variable("changed", [], tf.bool)
        variable = self._variable("rows", new.shape[1:], new.dtype)
        first, self._rows = self._rows, self._rows + stop - start
        shard = VariableShard(
            variable, self._server, start, stop, changed=changed, first=first, joined=self
        )
        with tf.device(server(self._server)):
            shard.mark_all(False)
        return shard

    def beside(self, shard: VariableShard, new: NewVariable) -> VariableShard:
        """Makes room for other values of the rows of a shard, such as those of a slot."""
        # An optimizer creates slots of all tables in one order, so slots of one kind get one
        # number.
        free = (number for number in itertools.count() if (number, shard.first) not in self._shards)
        number = next(free)
        variable = self._variable(number, new.shape[1:], new.dtype)
        beside = dataclasses.replace(shard, variable=variable)
        self._shards[number, shard.first] = beside
        return beside

    def _variable(self, kind: Any, row: list[int], dtype: tf.DType) -> tf.Variable:
        key = kind, dtype, *row
        variable = self._variables.get(key)
        if variable is None:
            with tf.device(server(self._server)):
                variable = own_variable(
                    lambda: tf.raw_ops.Empty(shape=[self.room, *row], dtype=dtype, init=False),
                    trainable=False,
                    name=f"table_{kind}",
                )
            self._variables[key] = variable
        return variable
