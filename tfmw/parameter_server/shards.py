"""Variables whose rows are spread over parameter servers.

    rows = look_up(pieces, ids)                       # on a worker: only the rows asked for move
    for piece, grads, ids in to_pieces(pieces, gradient): ...     # each server gets its own rows
    Rows(master, ids)                                 # on a server: an optimizer updates just those

A variable is divided along its first axis into contiguous ranges, one `Piece` each, so putting the
pieces one after the other gives the whole back, and a backup or an export never knows how many
there were. Rows that a batch names twice travel once, and their gradients are added before they
leave the worker, so each server sees each row at most once in a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfmw.parameter_server.variables import Piece, server


def look_up(pieces: Sequence[Piece], ids: tf.Tensor) -> tf.Tensor:
    """Rows of a divided variable.

    Args:
        pieces: where it is, in the order of its rows.
        ids: int64 [n], rows of the whole, in any order, repeated or not.

    Returns:
        [n, ...] on the worker.
    """
    unique, positions = tf.unique(ids, out_idx=tf.int64)
    if len(pieces) == 1:
        with tf.device(server(pieces[0].server)):
            rows = tf.gather(pieces[0].master, unique)
        return tf.gather(tf.identity(rows), positions)
    owners = _owners(pieces, unique)
    asked = tf.dynamic_partition(unique, owners, len(pieces))
    places = tf.dynamic_partition(tf.range(tf.size(unique)), owners, len(pieces))
    found = []
    for piece, mine in zip(pieces, asked, strict=True):
        with tf.device(server(piece.server)):
            rows = tf.gather(piece.master, mine - piece.start)
        found.append(tf.identity(rows))
    return tf.gather(tf.dynamic_stitch(places, found), positions)


def read_whole(pieces: Sequence[Piece]) -> tf.Tensor:
    """All rows of a variable, on the worker: for kernels, which a step needs whole."""
    values = []
    for piece in pieces:
        with tf.device(server(piece.server)):
            value = piece.master.read_value()
        values.append(tf.identity(value))
    return values[0] if len(values) == 1 else tf.concat(values, axis=0)


def to_pieces(pieces: Sequence[Piece], gradient: Any) -> list[tuple[Any, ...]]:
    """Divides the gradient of a divided variable among its servers.

    Args:
        gradient: dense, or `tf.IndexedSlices` with rows of the whole, repeated or not.

    Returns:
        For each piece (piece, gradients [n, ...], rows int64 [n] counted from its start), still on
        the worker; (piece, gradients) where they are of all its rows.
    """
    if not isinstance(gradient, tf.IndexedSlices):
        return [(p, gradient[p.start : p.stop] if p.stop else gradient) for p in pieces]
    unique, positions = tf.unique(tf.cast(gradient.indices, tf.int64), out_idx=tf.int64)
    summed = tf.math.unsorted_segment_sum(gradient.values, positions, tf.size(unique))
    owners = _owners(pieces, unique)
    ids = tf.dynamic_partition(unique, owners, len(pieces))
    values = tf.dynamic_partition(summed, owners, len(pieces))
    return [
        (piece, rows, mine - piece.start)
        for piece, mine, rows in zip(pieces, ids, values, strict=True)
    ]


def _owners(pieces: Sequence[Piece], ids: tf.Tensor) -> tf.Tensor:
    """int32 [n], which piece each row is in."""
    starts = tf.constant([piece.start for piece in pieces[1:]], tf.int64)
    return tf.searchsorted(starts, ids, side="right", out_type=tf.int32)


class Rows:
    """Some rows of a server's variable, as an optimizer's update sees them: a small variable.

    What is added is added to the rows in place, and what is assigned replaces them; the others are
    neither read nor written.

    Args:
        master: the variable, on the server that runs this.
        ids: int64 [n], each row at most once.
    """

    def __init__(self, master: tf.Variable, ids: tf.Tensor):
        self._master = master
        self._ids = ids
        self._rows = tf.gather(master, ids)
        self.dtype = master.dtype
        self._unique_id = master._unique_id

    @property
    def shape(self) -> tf.TensorShape:
        """[n, ...]."""
        return self._rows.shape

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> tf.Tensor:
        return tf.convert_to_tensor(self._rows, dtype=dtype, name=name)

    def assign(self, value: tf.Tensor) -> None:
        """Replaces the rows."""
        self._rows = tf.identity(value)
        self._master.scatter_update(tf.IndexedSlices(value, self._ids))

    def assign_add(self, value: tf.Tensor) -> None:
        """Adds to the rows."""
        self._rows = self._rows + value
        self._master.scatter_add(tf.IndexedSlices(value, self._ids))

    def assign_sub(self, value: tf.Tensor) -> None:
        """Subtracts from the rows."""
        self._rows = self._rows - value
        self._master.scatter_sub(tf.IndexedSlices(value, self._ids))
