"""Tables in TensorFlow's checkpoints: each server writes and reads its own rows.

    files = TableFiles({"000001/embeddings": table, ...})
    parts = files.write("/shared/parts")              # the prefixes of checkpoints of slices
    files.read("/shared/tensors", layout)             # with any number of servers

A checkpoint may have a tensor in slices. Each server writes slices of at most `SLICE_BYTES`, a few
of them in a file, so a server needs memory for one file beside its rows. All servers write and read
at the same time, and no row goes through the coordinator. `MergeV2Checkpoints` joins the parts.
"""

from __future__ import annotations

import dataclasses
import functools
import posixpath
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent import futures
from typing import Any

import tensorflow as tf

from tfmw import storage
from tfmw.errors import TfmwError
from tfmw.tables.shards import VariableShard, blocks, server
from tfmw.tables.table import Table, store_rows

SLICE_BYTES = 32 << 20
FILE_BYTES = 128 << 20

Layout = dict[str, list[list[int]]]
"""By name of a table, the [start, stop) of its rows in each slice of a checkpoint."""


class NotFinite(TfmwError):
    """A table has a NaN or an infinity.

    Attributes:
        name: of the table.
    """

    def __init__(self, name: str):
        super().__init__(f"{name} is not finite")
        self.name = name


class ServerCannotRead(TfmwError):
    """A parameter server cannot read a checkpoint that the coordinator can read."""

    def __init__(self, where: int, prefix: str, error: tf.errors.OpError):
        reason = (error.message or type(error).__name__).splitlines()[0]
        super().__init__(
            f"parameter server {where} cannot read {prefix!r} ({reason[:200]}), and the "
            "coordinator can: expected a running server, and a directory that all tasks share."
        )


@dataclasses.dataclass(frozen=True)
class _Slice:
    """Some rows of a table in a checkpoint."""

    name: str
    table: Table
    shard: VariableShard
    start: int
    stop: int

    @property
    def bytes(self) -> int:
        return self.table.row_bytes * (self.stop - self.start)

    @property
    def spec(self) -> str:
        return _spec(self.table.shape.as_list(), self.start, self.stop)

    def rows(self) -> tf.Tensor:
        first = self.start - self.shard.start
        ids = tf.range(first, self.stop - self.shard.start, dtype=tf.int64)
        return tf.gather(self.shard.variable, ids)


class TableFiles:
    """Writes tables into checkpoints, and reads them from checkpoints.

    Args:
        tables: by their names in a checkpoint.
    """

    def __init__(self, tables: Mapping[str, Table]):
        self.tables = dict(tables)
        self._parts = {where: _grouped(slices) for where, slices in self._by_server().items()}
        self._writers = {where: self._writer(where) for where in self._parts}

    @property
    def layout(self) -> Layout:
        """The slices that `write` writes."""
        return {
            name: [[s.start, s.stop] for s in _slices(name, table)]
            for name, table in self.tables.items()
        }

    def write(self, directory: str, must_be_finite: Collection[str] = ()) -> list[str]:
        """Writes the rows of all tables, each server its own; returns the parts' prefixes.

        Args:
            directory: exists, and is the same on all servers and here.
            must_be_finite: names of tables whose rows are checked.

        Raises:
            NotFinite: a row is not finite; files may have been written all the same.
            tf.errors.OpError, OSError: a server could not write, or writes elsewhere.
        """
        directory = storage.absolute(directory)  # servers may run in another directory
        finite = _on_each(
            {where: functools.partial(w, directory) for where, w in self._writers.items()}
        )
        for where, flags in finite.items():
            slices = [one for part in self._parts[where] for one in part]
            for one, is_finite in zip(slices, flags.numpy(), strict=True):
                if one.name in must_be_finite and not is_finite:
                    raise NotFinite(one.name)
        prefixes = [
            posixpath.join(directory, _part_name(where, number))
            for where, parts in sorted(self._parts.items())
            for number in range(len(parts))
        ]
        for prefix in prefixes:
            if not tf.io.gfile.exists(f"{prefix}.index"):
                raise OSError(
                    f"parameter servers wrote tables to {directory!r}, and the coordinator does "
                    "not find them there: expected a directory that all tasks share"
                )
        return prefixes

    def read(self, prefix: str, layout: Layout) -> None:
        """Restores all tables from a checkpoint, each server its own rows.

        Args:
            prefix: of the checkpoint.
            layout: the slices in it; tables that are not in it are left as they are.
        """
        prefix = storage.absolute(prefix)
        stored = {name: t for name, t in self.tables.items() if name in layout}
        wanted: dict[int, list[_Slice]] = {}
        for name, table in stored.items():
            for shard in table.shards:
                # Reading a part of a slice reads all of it: each slice is read once by a shard.
                for a, b in layout[name]:
                    start, stop = max(a, shard.start), min(b, shard.stop)
                    if start < stop:
                        one = _Slice(name, table, shard, start, stop)
                        wanted.setdefault(shard.server, []).append(one)
        _on_each({where: _reader(where, slices, prefix) for where, slices in wanted.items()})

    def _by_server(self) -> dict[int, list[_Slice]]:
        found: dict[int, list[_Slice]] = {}
        for name, table in self.tables.items():
            for one in _slices(name, table):
                found.setdefault(one.shard.server, []).append(one)
        return found

    def _writer(self, where: int) -> Callable[[tf.Tensor], tf.Tensor]:
        """A function that writes the files of one server: which of its slices are finite."""

        def write(directory: tf.Tensor) -> tf.Tensor:
            finite: list[tf.Tensor] = []
            with tf.device(server(where)):
                written: list[Any] = []
                for number, part in enumerate(self._parts[where]):
                    with tf.control_dependencies(written):  # one file after the other is in memory
                        rows = [one.rows() for one in part]
                    finite += [tf.reduce_all(tf.math.is_finite(r)) for r in rows]
                    written = [
                        tf.raw_ops.SaveV2(
                            prefix=tf.strings.join([directory, "/", _part_name(where, number)]),
                            tensor_names=[one.name for one in part],
                            shape_and_slices=[one.spec for one in part],
                            tensors=rows,
                        )
                    ]
                with tf.control_dependencies(written):
                    flags = tf.stack(finite)
            return tf.identity(flags)

        signature = [tf.TensorSpec([], tf.string)]
        return tf.function(write, autograph=False, input_signature=signature)


def write_checkpoint(
    prefix: str,
    parts: str,
    save: Callable[[str], None],
    files: TableFiles,
    must_be_finite: Collection[str] = (),
) -> None:
    """Writes one checkpoint: tables, each server its own rows, and what `save` writes here.

    Args:
        prefix: of the checkpoint; its directory exists, and is the same on all servers.
        parts: a directory for the parts, until they are one.
        save: writes a checkpoint, of other tensors, to the prefix that it is called with.
        files: the tables.
        must_be_finite: names of tables whose rows are checked.

    Raises:
        NotFinite, tf.errors.OpError, OSError: as `TableFiles.write`.
    """
    tf.io.gfile.makedirs(parts)
    prefixes = files.write(parts, must_be_finite)
    own = posixpath.join(parts, "coordinator")
    save(own)
    with tf.device("/CPU:0"):
        tf.raw_ops.MergeV2Checkpoints(
            checkpoint_prefixes=[own, *prefixes], destination_prefix=prefix, delete_old_dirs=False
        )
    storage.remove(parts)


def verify(
    prefix: str, layout: Layout, shapes: Mapping[str, Any], types: Mapping[str, Any], servers: int
) -> None:
    """Reads all slices of tables and drops them: their checksums are compared.

    Args:
        prefix: of a checkpoint.
        layout: the slices of tables in it.
        shapes, types: of all its tensors.
        servers: number of parameter servers, which share the work; 0 to read them here.

    Raises:
        tf.errors.OpError, ValueError: a checksum does not match, or rows are missing.
        ServerCannotRead: of a server; this process reads the same rows.
    """
    prefix = storage.absolute(prefix)
    for name, ranges in layout.items():
        if [0, *(b for _, b in ranges)] != [*(a for a, _ in ranges), shapes[name][0]]:
            raise ValueError(f"the slices {ranges} of {name} are not all of its {shapes[name]}")
    every = [
        (name, _spec(shapes[name], a, b), types[name])
        for name, ranges in layout.items()
        for a, b in ranges
    ]
    count = max(1, servers)

    def check(where: int) -> None:
        for one in every[where::count]:
            try:
                _read_and_drop(prefix, *one, server(where) if servers else "/CPU:0")
            except tf.errors.OpError as e:
                if not servers:
                    raise
                _read_and_drop(prefix, *one, "/CPU:0")  # raises if the file is damaged
                raise ServerCannotRead(where, prefix, e) from e

    _on_each({where: functools.partial(check, where) for where in range(count)})


def _read_and_drop(prefix: str, name: str, spec: str, dtype: tf.DType, device: str) -> None:
    with tf.device(device):
        (rows,) = tf.raw_ops.RestoreV2(
            prefix=prefix, tensor_names=[name], shape_and_slices=[spec], dtypes=[dtype]
        )
        int(tf.size(rows))  # waits for the server


def _reader(where: int, slices: list[_Slice], prefix: str) -> Callable[[], Any]:
    """Reads rows of one server from a checkpoint."""

    def read() -> tf.Tensor:
        with tf.device(server(where)):
            done: list[Any] = []
            for one in slices:
                with tf.control_dependencies(done):
                    (rows,) = tf.raw_ops.RestoreV2(
                        prefix=prefix,
                        tensor_names=[one.name],
                        shape_and_slices=[one.spec],
                        dtypes=[one.table.dtype],
                    )
                    rows = tf.ensure_shape(rows, [one.stop - one.start, *one.table.shape[1:]])
                    done = [store_rows(one.shard, one.start, rows)]
            with tf.control_dependencies(done):
                end = tf.constant(0)
        return tf.identity(end)

    return tf.function(read, autograph=False)


def _on_each(calls: dict[int, Callable[[], Any]]) -> dict[int, Any]:
    """Calls all at the same time; the results by key. Raises the first error."""
    if not calls:
        return {}
    with futures.ThreadPoolExecutor(len(calls), "tfmw-tables") as pool:
        running = {key: pool.submit(call) for key, call in calls.items()}
        return {key: call.result() for key, call in running.items()}


def _slices(name: str, table: Table) -> Iterator[_Slice]:
    """The slices in which a table is written."""
    for shard in table.shards:
        size = table.row_bytes * (shard.stop - shard.start)
        for start, stop in blocks(shard.start, shard.stop, size, SLICE_BYTES):
            yield _Slice(name, table, shard, start, stop)


def _grouped(slices: list[_Slice]) -> list[list[_Slice]]:
    """The slices of each file."""
    files: list[list[_Slice]] = []
    size = 0
    for one in slices:
        if not files or size + one.bytes > FILE_BYTES:
            files.append([])
            size = 0
        files[-1].append(one)
        size += one.bytes
    return files


def _part_name(where: int, number: int) -> str:
    return f"server_{where:05d}_{number:05d}"


def _spec(shape: Any, start: int, stop: int) -> str:
    """The rows [start, stop) of a tensor, as tensorflow/core/framework/tensor_slice.h has it.

    Such as "1000 64 250,250:-": the whole shape, then first row and number of rows, all columns.
    """
    columns = ":-" * (len(shape) - 1)
    return f"{' '.join(map(str, shape))} {start},{stop - start}{columns}"
