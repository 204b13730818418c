"""Rows of variables on parameter servers, looked up from any process of the cluster.

    rows = look_up(shards, ids)                       # only these rows are sent

    lookup = MultiTableLookup([shards, other_shards]) # rows of one shape and type
    route = lookup.route([ids, other_ids])
    route.asked[server]                               # (number of ids by variable, its rows)
    rows, other_rows = route.deliver(answers)         # answers[server]: [n, ...], in that order

A variable is divided along its first axis into contiguous ranges, one `VariableShard` each. The
shards concatenated are the whole variable, so backups and exports do not depend on their number. A
row that occurs several times in a batch is sent once.

A step looks up rows of several tables at once. Each op of a lookup (such as finding the unique ids
and their servers) runs once for all tables.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent import futures
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfmw.compat import parameter_servers
from tfmw.tables.joined import JoinedRows

BLOCK_BYTES = 64 << 20
"""Most bytes of a block in which values are created, sent and written."""


def server(index: int) -> str:
    """The device of a parameter server, which stores and updates its shards of variables."""
    return f"/job:ps/replica:0/task:{index}/device:CPU:0"


def on_each(calls: dict[int, Callable[[], Any]]) -> dict[int, Any]:
    """Runs all calls concurrently; returns the results by key. Raises the first error."""
    if not calls:
        return {}
    with futures.ThreadPoolExecutor(len(calls), "tfmw-tables") as pool:
        running = {key: pool.submit(call) for key, call in calls.items()}
        return {key: call.result() for key, call in running.items()}


def require_written(directory: str, paths: Iterable[str]) -> None:
    """Raises OSError unless this process finds the files that servers wrote to a directory."""
    if not all(tf.io.gfile.exists(path) for path in paths):
        raise OSError(
            f"parameter servers wrote tables to {directory!r}, and the coordinator does not find "
            "them there: expected a directory that all tasks share"
        )


@dataclasses.dataclass(frozen=True)
class VariableShard:
    """Some rows of a variable, on one server.

    Attributes:
        variable: the `tf.Variable` on the server, or a range of its rows.
        server: the index of the server.
        start, stop: rows of the whole variable; 0 and 0 if it is not divided.
        slots: the optimizer's slots for these rows, on the server, by id of the Keras variable.
        changed: bool [rows], on the server: true for rows that have changed since the last full
            backup. A table's slots share it; None for a variable that is no table.
    """

    variable: Any
    server: int
    start: int
    stop: int
    slots: dict[int, Any] = dataclasses.field(default_factory=dict)
    changed: Any = None

    def with_others(self) -> tuple[VariableShard, int]:
        """(all rows of the variables with this shard and its slots, index of its first row).

        Returns the shard itself, and 0, unless all of these variables are shared with other tables.
        """
        rows, slots, changed = self.variable, self.slots, self.changed
        if not all(isinstance(each, JoinedRows) for each in (rows, *slots.values(), changed)):
            return self, 0
        whole = {of: slot.variable for of, slot in slots.items()}
        shard = VariableShard(rows.variable, self.server, 0, 0, whole, changed.variable)
        return shard, rows.first

    def mark_changed(
        self, ids: tf.Tensor | None = None, trues: tf.Tensor | None = None
    ) -> list[Any]:
        """Marks rows that are about to change; call it on the server.

        Args:
            ids: int64 [n], rows of this shard; None for all.
            trues: bool [n], all true, if ids of many shards share them.

        Returns:
            Ops that the change must wait for: a change without a mark would not be backed up.
        """
        if self.changed is None:
            return []
        if ids is None:
            return [self.changed.assign(tf.fill(self.changed.shape, True))]
        trues = tf.fill([tf.size(ids)], True) if trues is None else trues
        return [self.changed.scatter_update(tf.IndexedSlices(trues, ids))]


def blocks(
    start: int, stop: int, row_bytes: int, most: int = BLOCK_BYTES
) -> Iterator[tuple[int, int]]:
    """Ranges of the rows from `start` to `stop`, each of at most `most` bytes, or of one row."""
    rows = max(1, most // max(row_bytes, 1))
    for a in range(start, stop, rows):
        yield a, min(a + rows, stop)


def look_up(shards: Sequence[VariableShard], ids: tf.Tensor) -> tf.Tensor:
    """Rows of a divided variable.

    Args:
        shards: the shards of the variable, in the order of its rows.
        ids: int64 [n], rows of the whole variable, in any order, repeated or not.

    Returns:
        [n, ...] in the process that calls.
    """
    unique, positions = tf.unique(ids, out_idx=tf.int64)
    if len(shards) == 1:
        with tf.device(server(shards[0].server)):
            rows = tf.gather(shards[0].variable, unique)
        return tf.gather(tf.identity(rows), positions)
    starts = tf.constant([shard.start for shard in shards[1:]], tf.int64)
    owned_by = tf.searchsorted(starts, unique, side="right", out_type=tf.int32)
    asked = tf.dynamic_partition(unique, owned_by, len(shards))
    places = tf.dynamic_partition(tf.range(tf.size(unique)), owned_by, len(shards))
    found = []
    for shard, local_ids in zip(shards, asked, strict=True):
        with tf.device(server(shard.server)):
            rows = tf.gather(shard.variable, local_ids - shard.start)
        found.append(tf.identity(rows))
    return tf.gather(tf.dynamic_stitch(places, found), positions)


def read_whole(shards: Sequence[VariableShard]) -> tf.Tensor:
    """All rows of a variable, such as a kernel, which a step needs as a whole."""
    values = []
    for shard in shards:
        with tf.device(server(shard.server)):
            value = shard.variable.read_value()
        values.append(tf.identity(value))
    return values[0] if len(values) == 1 else tf.concat(values, axis=0)


class Route(NamedTuple):
    """Ids on their way to servers; a structure of tensors for TensorFlow, too.

    Attributes:
        asked: server -> (int64 [variables there], the number of ids of each variable; int64 [n],
            these ids without repetitions, relative to the start of their variable).
        positions: int32 [n], the position of each id of all tables among the requested ids of all
            servers.
        lengths: int64 [tables], the number of ids of each table.
    """

    asked: dict[int, tuple[tf.Tensor, tf.Tensor]]
    positions: tf.Tensor
    lengths: tf.Tensor

    def deliver(self, answers: dict[int, tf.Tensor]) -> list[tf.Tensor]:
        """Rows [n, ...] for the ids of each table, repeated as the ids are.

        Args:
            answers: server -> the rows [n, ...] that were requested there.
        """
        here = [answers[server] for server in self.asked]
        rows: list[tf.Tensor] = _deliver_op(here, self.positions, self.lengths)
        return rows

    def send(self, values: Sequence[tf.Tensor]) -> dict[int, tf.Tensor]:
        """Values [n, ...] for the requested ids of each server.

        Args:
            values: for each table [n, ...], one value for each of its ids; values of the same row
                are summed.
        """
        sent = _send_op(list(values), [ids for _, ids in self.asked.values()], self.positions)
        return dict(zip(self.asked, sent, strict=True))


def _deliver(answers: list[tf.Tensor], positions: tf.Tensor, lengths: tf.Tensor) -> Any:
    rows = tf.gather(tf.concat(answers, axis=0), positions)
    return tf.split(rows, lengths, num=lengths.shape[0])


def _send(values: list[tf.Tensor], asked: list[tf.Tensor], positions: tf.Tensor) -> Any:
    counts = tf.concat(tf.raw_ops.ShapeN(input=asked, out_type=tf.int32), axis=0)
    every = tf.concat(values, axis=0)
    summed = tf.math.unsorted_segment_sum(every, positions, tf.reduce_sum(counts))
    return tf.split(summed, counts, num=len(asked))


_deliver_op = parameter_servers.one_op(_deliver, waits=False)
_send_op = parameter_servers.one_op(_send, waits=False)


class MultiTableLookup:
    """Several tables whose rows have one shape and type.

    Args:
        tables: the shards of each, in the order of its rows; one may be there twice.

    Attributes:
        shards: server -> its variables, each as (index of a table that has rows in it, a shard of
            all of its rows).
    """

    def __init__(self, tables: Sequence[Sequence[VariableShard]]):
        self._rows = [of[-1].stop or int(of[0].variable.shape[0]) for of in tables]
        self._offsets = [0, *itertools.accumulate(self._rows)]
        self.shards: dict[int, list[tuple[int, VariableShard]]] = {}
        self._one_op = parameter_servers.one_op(self.traced_route, waits=False)
        # Three values of each shard. The first row among those of all tables; the offset from there
        # to its place in its variable; the index of that variable.
        self._starts: list[int] = []
        self._shifts: list[int] = []
        self._variables: list[int] = []
        self._numbers: dict[int, list[int]] = {}  # server -> indices of its variables
        known: dict[Any, int] = {}
        for table, (offset, shards) in enumerate(zip(self._offsets, tables, strict=False)):
            for shard in shards:
                held, first = shard.with_others()
                same = id(held.variable), tuple(map(id, held.slots.values())), id(held.changed)
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
            ids: for each table int64 [n], row indices, in any order, repeated or not.

        Returns:
            The route. An id that is no row of its table is an error when the graph runs.
        """
        route: Route = self._one_op(list(ids))
        return route

    def traced_route(self, ids: list[tf.Tensor]) -> Route:
        """Computes the route, in the function that is being traced; see `route`."""
        lengths = tf.concat(tf.raw_ops.ShapeN(input=ids, out_type=tf.int64), axis=0)
        every = tf.concat(ids, axis=0)
        limits = _of_each(self._rows, ids)
        # With a single table, TensorFlow reports a row past the end; here it would be a row of the
        # next table.
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
        asked: dict[int, Any] = {}
        order: list[tf.Tensor] = []
        for where, numbers in sorted(self._numbers.items()):  # as traced functions order them
            asked[where] = tf.gather(sizes, numbers), tf.concat([local[n] for n in numbers], axis=0)
            order += [places[n] for n in numbers]
        positions = tf.gather(tf.math.invert_permutation(tf.concat(order, axis=0)), positions)
        return Route(asked, positions, lengths)


def _of_each(values: list[int], ids: list[tf.Tensor]) -> tf.Tensor:
    """int64, the value of a table for each of its ids."""
    lengths = [own.shape[0] for own in ids]
    if None in lengths:
        return tf.repeat(tf.constant(values, tf.int64), tf.stack([tf.size(own) for own in ids]))
    return tf.constant(np.repeat(np.asarray(values, np.int64), lengths))
