"""Lookups in several tables at once: the ids of all of them are routed to their servers together.

    lookup = MultiTableLookup([shards, other_shards])       # rows of one shape and type
    route = lookup.route([ids, other_ids])
    route.asked[server]                               # (how many of each variable, its rows)
    rows, other_rows = route.deliver(answers)         # answers[server]: [n, ...], in that order

What one table needs (which ids are different, who has them), all need: each op of it runs once for
all tables. A row that occurs several times is sent once.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfmw.keras_compat import parameter_servers
from tfmw.tables.shards import VariableShard


@dataclasses.dataclass(frozen=True)
class Route:
    """Ids on their way to servers.

    Attributes:
        asked: by server (int64 [variables there], how many ids of each; int64 [n], these ids,
            counted from the start of their variable, each at most once).
    """

    asked: dict[int, tuple[tf.Tensor, tf.Tensor]]
    _positions: tf.Tensor  # int32 [n], of each id of all tables among those asked for, all servers'
    _lengths: tf.Tensor  # int64 [tables], how many ids of each

    def deliver(self, answers: dict[int, tf.Tensor]) -> list[tf.Tensor]:
        """For each table the rows [n, ...] of its ids, repeated as these are.

        Args:
            answers: by server, the rows [n, ...] that were asked for there.
        """
        here = [answers[server] for server in self.asked]
        rows: list[tf.Tensor] = _deliver()(here, self._positions, self._lengths)
        return rows

    def send(self, values: Sequence[tf.Tensor]) -> dict[int, tf.Tensor]:
        """By server the values [n, ...] of the ids that are asked for there.

        Args:
            values: for each table [n, ...], one for each of its ids; those of one row are added.
        """
        sent = _send()(list(values), [ids for _, ids in self.asked.values()], self._positions)
        return dict(zip(self.asked, sent, strict=True))


@functools.cache
def _deliver() -> Callable[..., list[tf.Tensor]]:
    def deliver(
        answers: list[tf.Tensor], positions: tf.Tensor, lengths: tf.Tensor
    ) -> list[tf.Tensor]:
        rows = tf.gather(tf.concat(answers, axis=0), positions)
        parts: list[tf.Tensor] = tf.split(rows, lengths, num=lengths.shape[0])
        return parts

    return parameter_servers.one_op(deliver, waits=False)


@functools.cache
def _send() -> Callable[..., list[tf.Tensor]]:
    def send(
        values: list[tf.Tensor], asked: list[tf.Tensor], positions: tf.Tensor
    ) -> list[tf.Tensor]:
        counts = tf.concat(tf.raw_ops.ShapeN(input=asked, out_type=tf.int32), axis=0)
        every = tf.concat(values, axis=0)
        summed = tf.math.unsorted_segment_sum(every, positions, tf.reduce_sum(counts))
        parts: list[tf.Tensor] = tf.split(summed, counts, num=len(asked))
        return parts

    return parameter_servers.one_op(send, waits=False)


class MultiTableLookup:
    """Several tables whose rows have one shape and type.

    Args:
        tables: the shards of each, in the order of its rows; one may be there twice.

    Attributes:
        shards: by server its variables, each as (number of a table that has rows in it, a shard of
            all of its rows).
    """

    def __init__(self, tables: Sequence[Sequence[VariableShard]]):
        self._rows = [_rows_of(table) for table in tables]
        self._offsets = [0, *itertools.accumulate(self._rows)]
        self.shards: dict[int, list[tuple[int, VariableShard]]] = {}
        self._one_op = parameter_servers.one_op(self.route_tensors, waits=False)
        # Of each shard: its first row among those of all tables, what is to be added to get its
        # place in its variable, and which variable that is.
        self._starts: list[int] = []
        self._shifts: list[int] = []
        self._variables: list[int] = []
        self._numbers: dict[int, list[int]] = {}  # by server its variables
        known: dict[Any, int] = {}
        for table, (offset, shards) in enumerate(zip(self._offsets, tables, strict=False)):
            for shard in shards:
                held, first = shard.with_others()
                same = _identity(held)
                if same not in known:
                    known[same] = len(known)
                    self.shards.setdefault(shard.server, []).append((table, held))
                    self._numbers.setdefault(shard.server, []).append(known[same])
                self._starts.append(offset + shard.start)
                self._shifts.append(first - offset - shard.start)
                self._variables.append(known[same])

    def route(self, ids: Sequence[tf.Tensor]) -> Route:
        """The places of ids.

        Args:
            ids: for each table int64 [n], its rows, in any order, repeated or not.

        Returns:
            The route. An id that is no row of its table is an error when the graph runs.
        """
        return self.route_of(self._one_op(list(ids)))

    def route_of(self, tensors: Any) -> Route:
        """The route that `route_tensors` has computed, here or in a function that was called."""
        asked, positions, lengths = tensors
        return Route(dict(zip(self._numbers, asked, strict=True)), positions, lengths)

    def route_tensors(self, ids: list[tf.Tensor]) -> Any:
        """As `route`, as a structure of tensors, in the function that is being traced."""
        lengths = tf.concat(tf.raw_ops.ShapeN(input=ids, out_type=tf.int64), axis=0)
        every = tf.concat(ids, axis=0)
        limits = _of_each(self._rows, ids)
        # Of a table alone, a row behind its last one would be missed; here it is the next table's.
        are_rows = tf.logical_and(every >= 0, every < limits)
        checked = tf.raw_ops.Assert(  # as `tf.debugging.Assert`, without a `tf.cond`
            condition=tf.reduce_all(are_rows),
            data=[
                "received ids that are no rows of their table:",
                tf.boolean_mask(every, tf.logical_not(are_rows)),
                "expected 0 to rows - 1, of",
                tf.constant(self._rows, tf.int64),
                "rows",
            ],
        )
        with tf.control_dependencies([checked]):
            offsets = tf.identity(_of_each(self._offsets[:-1], ids))
        unique, positions = tf.unique(every + offsets)
        starts = tf.constant(self._starts, tf.int64)
        number = tf.searchsorted(starts[1:], unique, side="right", out_type=tf.int32)
        places_there = unique + tf.gather(tf.constant(self._shifts, tf.int64), number)
        variable = tf.gather(tf.constant(self._variables), number)
        count = max(self._variables) + 1
        local = tf.dynamic_partition(places_there, variable, count)
        places = tf.dynamic_partition(tf.range(tf.size(unique)), variable, count)
        sizes = tf.concat(tf.raw_ops.ShapeN(input=local, out_type=tf.int64), axis=0)
        asked, order = [], []
        for numbers in self._numbers.values():
            own = tf.gather(sizes, numbers), tf.concat([local[n] for n in numbers], axis=0)
            asked.append(own)
            order += [places[n] for n in numbers]
        positions = tf.gather(tf.math.invert_permutation(tf.concat(order, axis=0)), positions)
        return asked, positions, lengths


def _of_each(values: list[int], ids: list[tf.Tensor]) -> tf.Tensor:
    """int64, a table's value for each of its ids."""
    lengths = [own.shape[0] for own in ids]
    if None in lengths:
        return tf.repeat(tf.constant(values, tf.int64), tf.stack([tf.size(own) for own in ids]))
    return tf.constant(np.repeat(np.asarray(values, np.int64), lengths))


def _identity(shard: VariableShard) -> Any:
    """Equal for shards whose rows and slots are in the same variables."""
    return id(shard.variable), tuple(map(id, shard.slots.values())), id(shard.changed)


def _rows_of(shards: Sequence[VariableShard]) -> int:
    return shards[-1].stop or int(shards[0].variable.shape[0])
