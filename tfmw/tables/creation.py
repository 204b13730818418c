"""The variables that become tables; their first rows are made on their servers, in blocks."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfmw.compat import table_variables
from tfmw.compat.table_variables import NewVariable, Partitioning
from tfmw.tables.joined import SHARED_BYTES, TABLE_BYTES, Joined
from tfmw.tables.shards import VariableShard, blocks, server
from tfmw.tables.table import Table, table_of

logger = logging.getLogger("tfmw")

_INITIAL_BYTES = 16 << 20  # allocated at once: a draw takes three times its size on the server

Partition = Callable[[Sequence[int], tf.DType], int]

_Place = tuple[int, int, int, VariableShard | None]
"""(server, start, stop, the shard whose rows change together with these, if any) of a shard."""


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
            shards = [self._shard(new, rows, *place) for place in places]
            return Table(new.path, new.shape, new.dtype, shards, new.trainable, self._most)

    def _places(self, new: NewVariable) -> list[_Place]:
        """The place of each shard; [] for a variable that is no table."""
        if new.slot_of is not None:
            table = table_of(new.slot_of)
            if table is None or new.shape != table.shape.as_list():
                return []
            return [(shard.server, shard.start, shard.stop, shard) for shard in table.shards]
        partitioning = new.partitioning or Partitioning(new.shape[0] if new.shape else 0, 1)
        if partitioning.follows is not None:
            return _following(partitioning)
        if not (new.trainable and new.dtype.is_floating):
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
        load, places = list(self._load), list[_Place]()
        for start, stop in partitioning.ranges(count):
            where = min(range(len(load)), key=load.__getitem__)
            load[where] += (stop - start) * new.row_bytes
            places.append((where, start, stop, None))
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
        """Creates some rows on their server; for the other arguments see `_Place`."""
        self._load[where] += (stop - start) * new.row_bytes
        if other is not None:
            shard = other.joined.beside(other, new)
        else:
            shard = self._joined_for(new, where, stop - start).table(new, start, stop)
        for a, b in blocks(start, stop, new.row_bytes, _INITIAL_BYTES):
            with tf.device(server(where)):
                shard.store(a, rows(a, b))
        return shard

    def _joined_for(self, new: NewVariable, where: int, rows: int) -> Joined:
        """The variables for rows of a table: those of other small tables, or their own."""
        if new.partitioning is not None or not 0 < rows * new.row_bytes <= TABLE_BYTES:
            return Joined(where, rows)
        kind = where, new.dtype, *new.shape[1:]
        found = self._joined.get(kind)
        if found is None or not found.has_room(rows):
            found = self._joined[kind] = Joined(where, SHARED_BYTES // new.row_bytes)
        return found


def _following(partitioning: Partitioning) -> list[_Place]:
    """The place of each shard of a variable that is divided like another one."""
    leader = partitioning.follows
    table, other = table_of(leader), table_variables.partitioning_of(leader)
    if table is None or other is None:
        return []
    is_alike = partitioning.has_rows_of(other)
    return [
        (s.server, *partitioning.rows_beside(other, s.start, s.stop), s if is_alike else None)
        for s in table.shards
    ]
