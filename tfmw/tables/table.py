"""A table: the handle that a Keras variable holds in place of rows that are on parameter servers.

    table.sparse_read(ids)      # the rows of these ids, in the process that calls
    table.numpy()               # all of it, if that is not too much

The coordinator has the handle only: shape, dtype, and where the shards are. Lookups fetch rows, on
the coordinator as on workers. Only parameter-server training updates rows, on their servers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

import tensorflow as tf

from tfmw.compat import models, parameter_servers
from tfmw.errors import TfmwError, UsageError
from tfmw.tables.shards import VariableShard, blocks, look_up, read_whole, server

_numbers = itertools.count()


class NeedsAllRows(TfmwError):
    """All rows of a table were requested, and they are too many for one process.

    No ValueError: TensorFlow and Keras would wrap it in errors of their own.
    """

    status = 2

    def __init__(self, message: str):
        super().__init__(message)
        models.keep_message(self)


class Table(parameter_servers.RemoteRows):
    """The rows of one Keras variable, on parameter servers.

    Args:
        path: path of the Keras variable.
        shape: shape of the whole variable.
        shards: the shards in the order of the rows; also an attribute.
        trainable: whether gradients are recorded.
        max_whole_bytes: larger tables are never read or assigned as a whole.
    """

    def __init__(
        self,
        path: str,
        shape: list[int],
        dtype: tf.DType,
        shards: list[VariableShard],
        trainable: bool,
        max_whole_bytes: int,
    ):
        self.path = path
        self.shards = shards
        self._most = max_whole_bytes
        self._keeps_rows = False
        name = f"tfmw_table_{next(_numbers)}"
        with tf.device("CPU:0"):
            super().__init__(
                name, shape, dtype, functools.partial(look_up, shards), self.read_all, trainable
            )

    @property
    def bytes(self) -> int:
        """Size of all rows in bytes."""
        return math.prod(self.shape.as_list()) * int(self.dtype.size)

    @property
    def row_bytes(self) -> int:
        """Size of one row in bytes."""
        return self.bytes // int(self.shape[0])

    def read_all(self) -> tf.Tensor:
        """All rows, in the process that calls. Raises NeedsAllRows if they are too many."""
        self._refuse_whole("reading")
        return read_whole(self.shards)

    def assign(self, value: Any, *arguments: Any, **options: Any) -> None:
        """Replaces all rows. Raises NeedsAllRows if they are too many."""
        del arguments, options  # arguments of `tf.Variable.assign`, which do not apply here
        self._refuse_whole("assigning")
        if not self._keeps_rows:
            self.replace(tf.cast(value, self.dtype))

    def replace(self, value: Any) -> None:
        """Sends all rows to their servers; `value` is in this process already."""
        for shard in self.shards:
            with tf.device(server(shard.server)):
                shard.mark_changed()
            for start, stop in blocks(shard.start, shard.stop, self.row_bytes):
                shard.store(start, value[start:stop])

    @contextlib.contextmanager
    def unchanged(self) -> Iterator[None]:
        """Disables assignments within this context."""
        self._keeps_rows = True
        try:
            yield
        finally:
            self._keeps_rows = False

    def _refuse_whole(self, what: str) -> None:
        if self.bytes > self._most:
            raise NeedsAllRows(
                f"{self.path} is a table of {_size(self.bytes)} on {len(self.shards)} shards of "
                f"parameter servers; {what} it as a whole takes at least as much memory in one "
                f"process, more than max_whole_bytes={self._most}: look up rows with "
                "keras.ops.take(table, ids, axis=0); a layer, regularizer or callback that needs "
                "all rows cannot be used with it, unless the memory is there and "
                "tfmw.strategies.parameter_server(..., max_whole_bytes=) allows it."
            )

    def _refuse_update(self, *arguments: Any, **options: Any) -> NoReturn:
        raise _updated_elsewhere(self.path)

    assign_add = assign_sub = _refuse_update
    scatter_add = scatter_sub = scatter_update = scatter_nd_update = _refuse_update

    def is_initialized(self, name: str | None = None) -> tf.Tensor:
        """True: tables are filled when they are made."""
        del name
        return tf.constant(True)

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise UsageError(
            f"{self.path} is a table on parameter servers and cannot be copied with its model: "
            "make another model by calling its constructor again."
        )

    def __repr__(self) -> str:
        servers = len({shard.server for shard in self.shards})
        return (
            f"<Table {self.path}: {self.dtype.name} {self.shape.as_list()}, {_size(self.bytes)} on "
            f"{servers} parameter servers>"
        )


@dataclasses.dataclass(frozen=True)
class Slice:
    """Some rows of a table, in one of its shards.

    Attributes:
        name: name of the table in files.
        start, stop: rows of the whole table.
    """

    name: str
    table: Table
    shard: VariableShard
    start: int
    stop: int

    @property
    def bytes(self) -> int:
        """Size of these rows in bytes."""
        return self.table.row_bytes * (self.stop - self.start)


def slices(name: str, table: Table, most: int) -> Iterator[Slice]:
    """All rows of a table, in slices of at most `most` bytes."""
    for shard in table.shards:
        for start, stop in blocks(shard.start, shard.stop, table.row_bytes, most):
            yield Slice(name, table, shard, start, stop)


def table_of(variable: Any) -> Table | None:
    """The table that a Keras variable holds, or None."""
    held = models.native(variable)
    return held if isinstance(held, Table) else None


def is_table(variable: Any) -> bool:
    """Whether a Keras variable holds a table."""
    return table_of(variable) is not None


def tables_among(variables: Iterable[Any]) -> list[Any]:
    """The Keras variables that hold tables."""
    return [variable for variable in variables if is_table(variable)]


def refuse_tables(variables: Iterable[Any]) -> None:
    """Raises UsageError if one of the Keras variables, which this process updates, is a table."""
    for variable in tables_among(variables):
        raise _updated_elsewhere(variable.path)


def _updated_elsewhere(path: str) -> UsageError:
    return UsageError(
        f"{path} is a table on parameter servers, and only tfmw.fit on their strategy updates it: "
        "leave strategy= out; to train on this machine, make the model before "
        "tfmw.strategies.parameter_server(...)."
    )


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"
