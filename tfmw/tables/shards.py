"""Rows of a variable on parameter servers, looked up from any process of the cluster.

    rows = look_up(shards, ids)                       # only these rows are sent

A variable is divided along its first axis into contiguous ranges, one `VariableShard` each. The
shards concatenated are the whole variable, so backups and exports do not depend on their number. A
row that occurs several times in a batch is sent once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent import futures
from typing import Any

import tensorflow as tf

from tfmw.tables.joined import JoinedRows

BLOCK_BYTES = 64 << 20
"""Values are made, sent and written in blocks of at most this many bytes."""


def server(index: int) -> str:
    """The device of a parameter server, which stores and updates its variables."""
    return f"/job:ps/replica:0/task:{index}/device:CPU:0"


def on_each(calls: dict[int, Callable[[], Any]]) -> dict[int, Any]:
    """Calls all at the same time; the results by key. Raises the first error."""
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
        variable: the `tf.Variable` on the server, or some rows of one.
        server: its number.
        start, stop: rows of the whole variable; 0 and 0 if it is not divided.
        slots: the optimizer's slots for these rows, on the server, by id of the Keras variable.
        changed: bool [rows], on the server: which have changed since the last full backup. A
            table's slots share it; None for a variable that is no table.
    """

    variable: Any
    server: int
    start: int
    stop: int
    slots: dict[int, Any] = dataclasses.field(default_factory=dict)
    changed: Any = None

    def with_others(self) -> tuple[VariableShard, int]:
        """(all rows of the variables that have these and their slots, the place of the first one).

        The shard itself, and 0, unless all of these variables are shared with other tables.
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
            ids: int64 [n], in this shard; None for all.
            trues: bool [n], all true, where ids of many shards share them.

        Returns:
            What the change has to wait for: a change without a mark would not be backed up.
        """
        if self.changed is None:
            return []
        if ids is None:
            return [self.changed.assign(tf.fill(self.changed.shape, True))]
        trues = tf.fill([tf.size(ids)], True) if trues is None else trues
        return [self.changed.scatter_update(tf.IndexedSlices(trues, ids))]


def blocks(start: int, stop: int, size: int, most: int = BLOCK_BYTES) -> Iterator[tuple[int, int]]:
    """Ranges of rows from `start` to `stop`, which have `size` bytes, of at most `most` bytes."""
    rows = max(1, (stop - start) * most // max(size, 1))
    for a in range(start, stop, rows):
        yield a, min(a + rows, stop)


def look_up(shards: Sequence[VariableShard], ids: tf.Tensor) -> tf.Tensor:
    """Rows of a divided variable.

    Args:
        shards: of the variable, in the order of its rows.
        ids: int64 [n], rows of the whole, in any order, repeated or not.

    Returns:
        [n, ...] in the process that calls.
    """
    unique, positions = tf.unique(ids, out_idx=tf.int64)
    if len(shards) == 1:
        with tf.device(server(shards[0].server)):
            rows = tf.gather(shards[0].variable, unique)
        return tf.gather(tf.identity(rows), positions)
    owned_by = owners(shards, unique)
    asked = tf.dynamic_partition(unique, owned_by, len(shards))
    places = tf.dynamic_partition(tf.range(tf.size(unique)), owned_by, len(shards))
    found = []
    for shard, local_ids in zip(shards, asked, strict=True):
        with tf.device(server(shard.server)):
            rows = tf.gather(shard.variable, local_ids - shard.start)
        found.append(tf.identity(rows))
    return tf.gather(tf.dynamic_stitch(places, found), positions)


def read_whole(shards: Sequence[VariableShard]) -> tf.Tensor:
    """All rows of a variable: for kernels, of which a step needs all rows."""
    values = []
    for shard in shards:
        with tf.device(server(shard.server)):
            value = shard.variable.read_value()
        values.append(tf.identity(value))
    return values[0] if len(values) == 1 else tf.concat(values, axis=0)


def owners(shards: Sequence[VariableShard], ids: tf.Tensor) -> tf.Tensor:
    """int32 [n], which shard each row is in."""
    starts = tf.constant([shard.start for shard in shards[1:]], tf.int64)
    return tf.searchsorted(starts, ids, side="right", out_type=tf.int32)
