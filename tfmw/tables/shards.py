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
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent import futures
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfmw.compat import parameter_servers

BLOCK_BYTES = 64 << 20
"""Most bytes of a block in which values are created, sent and written."""


def server(index: int) -> str:
    """The device of a parameter server, which stores and updates its shards of variables."""
    return f"/job:ps/replica:0/task:{index}/device:CPU:0"


def on_each(calls: Sequence[tuple[int, Callable[[], Any]]]) -> list[Any]:
    """Runs calls for servers: those for one in turn, those for several concurrently.

    Args:
        calls: (server, call) of each.

    Returns:
        Their results, in order. Raises the first error.
    """
    of_servers: dict[int, list[Callable[[], Any]]] = {}
    for where, call in calls:
        of_servers.setdefault(where, []).append(call)
    with futures.ThreadPoolExecutor(max(1, len(of_servers)), "tfmw-tables") as pool:
        running = {
            where: pool.submit(list, map(operator.call, own)) for where, own in of_servers.items()
        }
        results = {where: iter(each.result()) for where, each in running.items()}
    return [next(results[where]) for where, _ in calls]


def server_function(
    where: int, function: Callable[..., Any], *specs: tf.TensorSpec
) -> Callable[..., tf.Tensor]:
    """A function whose ops run on a server, which frees their memory at the end of each call.

    Args:
        function: tensors with these specs -> (an op that must run, the result).
    """

    def run(*arguments: tf.Tensor) -> tf.Tensor:
        with tf.device(server(where)):
            op, result = function(*arguments)
            with tf.control_dependencies([op]):
                result = tf.identity(result)
        return tf.identity(result)

    traced = tf.function(run, autograph=False, input_signature=specs)
    # TensorFlow would warn of calls of `traced`, as there are many functions of this name
    return traced.get_concrete_function()


def require_written(directory: str, paths: Iterable[str]) -> None:
    """Raises OSError unless this process finds the files that servers wrote to a directory."""
    if not all(tf.io.gfile.exists(path) for path in paths):
        raise OSError(
            f"parameter servers wrote tables to {directory!r}, and the coordinator does not find "
            "them there: expected a directory that all tasks share"
        )


@dataclasses.dataclass(frozen=True, eq=False)
class VariableShard:
    """Some rows of a variable, on one server.

    Attributes:
        variable: the `tf.Variable` on the server, which may have rows of other tables, too.
        server: the index of the server.
        start, stop: rows of the whole variable; 0 and 0 if it is not divided.
        slots: the optimizer's slots for these rows, by id of the Keras variable.
        changed: bool [...], on the server, in the places of the rows: true for rows that have
            changed since the last full backup. A table's slots share it; None for a variable that
            is no table.
        first: the place of row `start` in `variable`.
        joined: the `joined.Joined` that has the variable; None for a variable that is no table.
    """

    variable: Any
    server: int
    start: int
    stop: int
    slots: dict[int, VariableShard] = dataclasses.field(default_factory=dict)
    changed: Any = None
    first: int = 0
    joined: Any = None

    @property
    def dtype(self) -> tf.DType:
        """The type of the rows."""
        return self.variable.dtype

    @property
    def is_alone(self) -> bool:
        """Whether the variable has no other rows."""
        return self.joined is None or self.joined.room == self.stop - self.start

    def with_others(self) -> VariableShard:
        """All rows of the variables with this shard and its slots, if these have one `Joined`."""
        if self.joined is None or any(s.joined is not self.joined for s in self.slots.values()):
            return self
        whole = {of: VariableShard(s.variable, s.server, 0, 0) for of, s in self.slots.items()}
        return VariableShard(self.variable, self.server, 0, 0, whole, self.changed)

    def places(self, ids: tf.Tensor) -> tf.Tensor:
        """The places in `variable` of rows of this shard."""
        return ids + tf.constant(self.first, ids.dtype) if self.first else ids

    # On the server, the shard is a variable of these rows alone:

    def read_value(self) -> tf.Tensor:
        """All rows."""
        return self._all_of(self.variable)

    def marks(self) -> tf.Tensor:
        """Bool [rows]: whether each has changed."""
        return self._all_of(self.changed)

    def _all_of(self, variable: tf.Variable) -> tf.Tensor:
        if self.is_alone:
            return variable.read_value()
        return tf.gather(variable, tf.range(self.first, self.first + self.stop - self.start))

    def sparse_read(self, indices: tf.Tensor, name: str | None = None) -> tf.Tensor:
        """The rows at `indices`, int64 [n], which are not checked; `tf.gather` calls it."""
        return tf.gather(self.variable, self.places(indices), name=name)

    def scatter_update(self, rows: tf.IndexedSlices) -> Any:
        """Replaces rows, and marks them as changed."""
        with tf.control_dependencies(self.mark_changed(rows.indices)):
            return self.replace(rows.indices, rows.values)

    def store(self, start: int, rows: Any) -> Any:
        """Replaces rows of the whole, from `start` on, by new or stored values, without a mark."""
        with tf.device(server(self.server)):
            first = start - self.start
            ids = tf.range(first, first + tf.shape(rows, tf.int64)[0], dtype=tf.int64)
            return self.replace(ids, tf.identity(rows))

    def replace(self, ids: tf.Tensor, rows: tf.Tensor) -> Any:
        """Replaces the rows `ids`, int64 [n], without a mark."""
        return self.variable.scatter_update(tf.IndexedSlices(rows, self.places(ids)))

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
            return [self.mark_all(True)]
        trues = tf.fill([tf.size(ids)], True) if trues is None else trues
        return [self.changed.scatter_update(tf.IndexedSlices(trues, self.places(ids)))]

    def mark_all(self, changed: bool) -> Any:
        """Marks all rows as changed, or as unchanged; call it on the server."""
        rows = self.stop - self.start
        return tf.raw_ops.ResourceStridedSliceAssign(
            ref=self.changed.handle,
            begin=[self.first],
            end=[self.first + rows],
            strides=[1],
            value=tf.fill([rows], changed),
        )


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
    lookup = MultiTableLookup([shards])
    route = lookup.traced_route([ids])
    answers = []
    for where, asked in route.asked.items():
        with tf.device(server(where)):
            rows = lookup.answer(where, *asked)
        answers.append(tf.identity(rows))
    return tf.gather(tf.concat(answers, axis=0), route.positions)


def read_whole(shards: Sequence[VariableShard]) -> tf.Tensor:
    """All rows of a variable, such as a kernel, which a step needs as a whole."""
    values = []
    for shard in shards:
        with tf.device(server(shard.server)):
            value = shard.read_value()
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
                held = shard.with_others()
                parts = held.variable, *(slot.variable for slot in held.slots.values())
                same = held.first, *map(id, (*parts, held.changed))
                if same not in known:
                    known[same] = len(known)
                    self.shards.setdefault(shard.server, []).append((table, held))
                    self._numbers.setdefault(shard.server, []).append(known[same])
                self._starts.append(offset + shard.start)
                self._shifts.append(shard.first - held.first - offset - shard.start)
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

    def answer(self, where: int, sizes: tf.Tensor, ids: tf.Tensor) -> tf.Tensor:
        """[n, ...], rows that a `Route` asks for on a server; call it there."""
        shards = [shard for _, shard in self.shards[where]]
        each = tf.split(ids, sizes, num=len(shards))
        rows = [shard.sparse_read(own) for shard, own in zip(shards, each, strict=True)]
        return tf.concat(rows, axis=0)

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
