"""The variables that become tables; their first rows are made on their servers, in blocks."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfmw.compat import models, table_variables
from tfmw.compat.table_variables import NewVariable, Partitioning
from tfmw.tables.joined import Joined, JoinedRows, may_join
from tfmw.tables.shards import VariableShard, blocks, server
from tfmw.tables.table import Table, store_rows, table_of

logger = logging.getLogger("tfmw")

_INITIAL_BYTES = 16 << 20  # allocated at once: a draw takes three times its size on the server
_TYPES = (tf.float16, tf.bfloat16, tf.float32, tf.float64)

Partition = Callable[[Sequence[int], tf.DType], int]


def create_on_servers(partition: Partition, servers: int, max_whole_bytes: int) -> None:
    """Makes tables of the later Keras variables of this process that `partition` divides.

    An optimizer's slots are divided as the variable is, and share its servers.

    Args:
        partition: (shape, dtype) -> number of shards, along the first axis.
        servers: number of parameter servers.
        max_whole_bytes: larger tables are never read or assigned as a whole.
    """
    table_variables.make_variables_by(_Creation(partition, servers, max_whole_bytes))


class _Creation:
    """Makes tables; its calls are those of `table_variables.make_variables_by`."""

    def __init__(self, partition: Partition, servers: int, max_whole_bytes: int):
        self._partition = partition
        self._most = max_whole_bytes
        self._load = [0] * servers
        self._joined = weakref.WeakValueDictionary[Any, Joined]()

    def __call__(self, new: NewVariable) -> Table | None:
        places = self._places(new)
        if not places:
            return None
        rows = table_variables.initial_rows(new.initializer, new.shape, new.dtype)
        if rows is None:
            logger.warning(
                "%s is made in this process and then sent to the servers: its initializer (%s) "
                "makes all rows at once. Keras's random and constant initializers make them on the "
                "servers",
                new.path,
                type(new.initializer).__name__,
            )
            return None
        with tf.init_scope():
            like = _shares_rows(new)
            of_table = [] if like is None else models.native(like).shards
            shards = [
                self._shard(new, rows, *place, other)
                for place, other in zip(places, of_table or [None] * len(places), strict=True)
            ]
            return Table(new.path, new.shape, new.dtype, shards, new.trainable, self._most)

    def _places(self, new: NewVariable) -> list[tuple[int, int, int]]:
        """(server, start, stop) of each shard; [] for a variable that is no table."""
        if new.slot_of is not None:
            table = table_of(new.slot_of)
            if table is None or new.shape != table.shape.as_list():
                return []
            return [(shard.server, shard.start, shard.stop) for shard in table.shards]
        partitioning = new.partitioning or Partitioning(new.shape[0] if new.shape else 0, 1)
        if partitioning.follows is not None:
            return _following(partitioning)
        if not new.trainable or new.dtype not in _TYPES:
            return []
        count = min(self._partition(new.shape, new.dtype), partitioning.units)
        if count <= 1:
            return []
        if tf.distribute.has_strategy():
            logger.warning(
                "%s is made whole, and divided when training begins, as its model is made in "
                "strategy.scope(): make the model outside, so that the servers make the rows",
                new.path,
            )
            return []
        load, places = list(self._load), []
        for start, stop in partitioning.ranges(count):
            where = min(range(len(load)), key=load.__getitem__)
            load[where] += (stop - start) * new.row_bytes
            places.append((where, start, stop))
        return places

    def _shard(
        self,
        new: NewVariable,
        rows: table_variables.InitialRows,
        where: int,
        start: int,
        stop: int,
        other: VariableShard | None,
    ) -> VariableShard:
        """Creates some rows on their server.

        Args:
            other: the shard whose rows change together with these, if any.
        """
        shape = [stop - start, *new.shape[1:]]
        self._load[where] += shape[0] * new.row_bytes
        variable, changed = self._joined_rows(new, where, shape, other) or _rows_alone(
            new, where, shape, other
        )
        shard = VariableShard(variable, where, start, stop, changed=changed)
        for a, b in blocks(start, stop, new.row_bytes, _INITIAL_BYTES):
            with tf.device(server(where)):
                store_rows(shard, a, rows(a, b))
        return shard

    def _joined_rows(
        self, new: NewVariable, where: int, shape: list[int], other: VariableShard | None
    ) -> tuple[JoinedRows, Any] | None:
        """(rows, their marks) beside those of other small tables; None if the table has its own."""
        if new.slot_of is not None:
            if other is None or not isinstance(other.variable, JoinedRows):
                return None
            return other.variable.joined.slot(other.variable, new.dtype), other.changed
        if new.partitioning is not None or not may_join(shape, new.dtype):
            return None
        kind = where, new.dtype, *shape[1:]
        found = self._joined.get(kind)
        if found is None or not found.has_room(shape[0]):
            found = self._joined[kind] = Joined(server(where), new.row_bytes)
        return found.table(shape, new.dtype)


def _rows_alone(
    new: NewVariable, where: int, shape: list[int], other: VariableShard | None
) -> tuple[tf.Variable, tf.Variable]:
    """(rows, their marks) in variables of their own."""
    with tf.device(server(where)):
        variable = models.own_variable(
            lambda: tf.zeros(shape, new.dtype), trainable=new.trainable, name="table_shard"
        )
        if other is not None and other.changed is not None:
            return variable, other.changed
        marks = models.own_variable(
            lambda: tf.zeros(shape[:1], tf.bool), trainable=False, name="changed"
        )
        return variable, marks


def _following(partitioning: Partitioning) -> list[tuple[int, int, int]]:
    """(server, start, stop) of each shard of a variable that is divided like another one."""
    leader = partitioning.follows
    table, other = table_of(leader), table_variables.partitioning_of(leader)
    if table is None or other is None:
        return []
    return [
        (shard.server, *partitioning.rows_beside(other, shard.start, shard.stop))
        for shard in table.shards
    ]


def _shares_rows(new: NewVariable) -> Any:
    """The Keras variable whose rows change together with those of a new one, or None."""
    if new.slot_of is not None or new.partitioning is None:
        return new.slot_of
    other = table_variables.partitioning_of(new.partitioning.follows)
    is_alike = other is not None and new.partitioning.has_rows_of(other)
    return new.partitioning.follows if is_alike else None
