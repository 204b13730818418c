"""Tables in TensorFlow's checkpoints: each server writes and reads its own rows.

A checkpoint may have a tensor in slices. Each server writes slices of at most `SLICE_BYTES`, a few
of them in a file. So it needs memory for one file in addition to its rows. All servers write and
read at the same time, and no row goes through the coordinator. `MergeV2Checkpoints` joins the
parts.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import posixpath
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfmw.compat import models, table_variables
from tfmw.errors import TfmwError
from tfmw.storage import directories, disk
from tfmw.tables.shards import (
    VariableShard,
    on_each,
    require_written,
    server,
    server_function,
)
from tfmw.tables.table import Slice, Table, slices, tables_among

SLICE_BYTES = 32 << 20
FILE_BYTES = 128 << 20
_CHANGED = ".tfmw_changed"

Layout = dict[str, list[list[int]]]
"""Name of a table -> the [start, stop) of its rows in each slice of a checkpoint."""

TensorSlice = tuple[str, str, tf.Tensor]
"""(name of a tensor in a checkpoint, its slice in the format of `slice_spec`, the values there)."""

ExportedTables = tuple[Any, Callable[[str], None]]
"""(the asset that the archive of a SavedModel needs, or None; a function of the SavedModel's
directory, into which it writes the rows of tables, each server its own)."""


class NotFinite(TfmwError):
    """A table has a NaN or an infinity.

    Attributes:
        name: name of the table.
    """

    def __init__(self, name: str):
        super().__init__(f"{name} is not finite")
        self.name = name


class TableFiles:
    """Writes tables into checkpoints, and reads them from checkpoints.

    Args:
        tables: the tables by their names in a checkpoint.
    """

    def __init__(self, tables: Mapping[str, Table]):
        self.tables = dict(tables)
        self._files = _files(self.tables)
        self._writer = functools.cache(self._made_writer)

    @property
    def layout(self) -> Layout:
        """The slices that `write` writes."""
        return {
            name: [[s.start, s.stop] for s in slices(name, table, SLICE_BYTES)]
            for name, table in self.tables.items()
        }

    def write(
        self, directory: str, must_be_finite: Collection[str] = (), only_changed: bool = False
    ) -> list[str]:
        """Writes the rows of all tables, each server its own; returns the prefixes of the shards.

        Args:
            directory: exists, and is the same on all servers and here.
            must_be_finite: names of tables whose rows are checked.
            only_changed: writes the rows that have changed since `clear_marks`; see `changed_name`.

        Raises:
            NotFinite: a row is not finite; files may have been written all the same.
            tf.errors.OpError, OSError: a server could not write, or writes elsewhere.
        """
        directory = disk.absolute(directory)  # servers may run in another directory
        calls = []
        for name, of_file in self._files.items():
            write = functools.partial(self._writer(name, only_changed), tf.constant(directory))
            calls.append((of_file[0].shard.server, write))
        for of_file, finite in zip(self._files.values(), on_each(calls), strict=True):
            for one, is_finite in zip(of_file, finite.numpy(), strict=True):
                if one.name in must_be_finite and not is_finite:
                    raise NotFinite(one.name)
        prefixes = [posixpath.join(directory, name) for name in sorted(self._files)]
        require_written(directory, (f"{prefix}.index" for prefix in prefixes))
        return prefixes

    def clear_marks(self) -> None:
        """Resets the marks: only rows that change after this call count as changed."""
        for shard in self._marked().values():
            with tf.device(server(shard.server)):
                shard.mark_all(False)

    def share_changed(self) -> float:
        """Fraction of all tables' bytes that a `write` of changed rows would write."""
        counts = {}
        for key, shard in self._marked().items():
            with tf.device(server(shard.server)):
                counts[key] = int(tf.math.count_nonzero(shard.marks()))
        tables = self.tables.values()
        of_changed = (t.row_bytes * counts[_marks_of(s)] for t in tables for s in t.shards)
        return sum(of_changed) / max(1, sum(table.bytes for table in tables))

    def _marked(self) -> dict[Any, VariableShard]:
        """A shard for all marks that tables share with their slots."""
        return {_marks_of(s): s for table in self.tables.values() for s in table.shards}

    def read(self, prefix: str, layout: Layout, only_changed: bool = False) -> None:
        """Restores all tables from a checkpoint, each server its own rows, slice after slice.

        Args:
            prefix: prefix of the checkpoint.
            layout: the slices in it; tables that are not in it are left as they are.
            only_changed: the checkpoint has the rows that changed after another one, which was read
                before.
        """
        prefix = disk.absolute(prefix)  # servers may run in another directory
        calls = []
        for name, table in self.tables.items():
            for shard in table.shards:
                # Reading a part of a slice reads all of it, so each slice is read once per shard.
                for a, b in layout.get(name, ()):
                    start, stop = max(a, shard.start), min(b, shard.stop)
                    if start < stop:
                        one = Slice(name, table, shard, start, stop)
                        call = functools.partial(_restore, one, a, prefix, only_changed)
                        calls.append((shard.server, call))
        on_each(calls)

    def _made_writer(self, name: str, only_changed: bool) -> Callable[[tf.Tensor], tf.Tensor]:
        """A function that writes a file to a directory: bool [n], which slices are finite."""
        of_file = self._files[name]

        def write(directory: tf.Tensor) -> tuple[Any, tf.Tensor]:
            found = [(_changed if only_changed else _whole)(one) for one in of_file]
            prefix = tf.strings.join([directory, "/", name])
            saved = save_tensors(prefix, {}, list(itertools.chain(*found)))
            return saved, tf.stack([_are_finite(of[-1][2]) for of in found])

        return server_function(of_file[0].shard.server, write, tf.TensorSpec([], tf.string))


def _marks_of(shard: VariableShard) -> tuple[int, int]:
    return id(shard.changed), shard.first


def save_tensors(
    prefix: str | tf.Tensor,
    tensors: Mapping[str, Any],
    slices: Sequence[TensorSlice] = (),
) -> Any:
    """Saves tensors, and slices of other ones, in a TensorFlow checkpoint.

    Args:
        prefix: prefix of the checkpoint.
        tensors: whole tensors by name.
        slices: slices of other tensors.

    Returns:
        The operation, if it is called in a graph.
    """
    whole = [(name, "", tf.convert_to_tensor(tensors[name])) for name in sorted(tensors)]
    names, specs, values = zip(*whole, *slices, strict=True)
    with tf.device("/CPU:0"):
        return tf.raw_ops.SaveV2(
            prefix=prefix, tensor_names=names, shape_and_slices=specs, tensors=values
        )


def write_checkpoint(
    prefix: str,
    write: Callable[[str], list[str]],
    tensors: Mapping[str, Any] | None = None,
) -> None:
    """Writes one checkpoint of the rows that servers write and of other tensors.

    Args:
        prefix: prefix of the checkpoint; its directory exists, and is the same on all servers.
        write: a function that writes tables to a directory, as `TableFiles.write` does.
        tensors: the tensors that this process writes, by name.

    Raises:
        NotFinite, tf.errors.OpError, OSError: `write` raised it.
    """
    parts = f"{prefix}.parts"
    tf.io.gfile.makedirs(parts)
    prefixes = write(parts)
    if tensors is not None:
        prefixes.insert(0, posixpath.join(parts, "coordinator"))
        save_tensors(prefixes[0], tensors)
    with tf.device("/CPU:0"):
        tf.raw_ops.MergeV2Checkpoints(
            checkpoint_prefixes=prefixes, destination_prefix=prefix, delete_old_dirs=False
        )
    directories.remove(parts)


@contextlib.contextmanager
def whole_tables(variables: Iterable[object]) -> Iterator[ExportedTables]:
    """Replaces the values of tables by marks while a SavedModel is written in this context.

    The checkpoint of the SavedModel has a mark in place of each table. The rows replace it
    afterwards.
    """
    found: dict[bytes, Table] = {}
    pairs = []
    for number, variable in enumerate(tables_among(variables)):
        table: Table = models.native(variable)
        mark = f"tfmw: the rows of table {number}"
        found[mark.encode()] = table
        name = f"tfmw_exported_{number}"
        valueless = table_variables.ValuelessVariable(
            name, table.shape, table.dtype, table.trainable, mark
        )
        pairs.append((variable, valueless))

    def write_into(directory: str) -> None:
        if not found:
            return
        prefix = posixpath.join(directory, "variables", "variables")
        tables, tensors = {}, {}
        with directories.checkpoint_reader(prefix) as reader:
            for name in sorted(reader.get_variable_to_shape_map()):
                tensor = reader.get_tensor(name)
                if isinstance(tensor, bytes) and tensor in found:
                    tables[name] = found[tensor]
                else:
                    tensors[name] = tensor
        for file in directories.files_of(f"{prefix}."):
            tf.io.gfile.remove(file)
        write_checkpoint(prefix, TableFiles(tables).write, tensors)

    with models.substituted(pairs):
        yield None, write_into


def verify(
    prefix: str,
    layout: Layout,
    shapes: Mapping[str, Any],
    types: Mapping[str, Any],
    servers: int,
    only_changed: bool = False,
) -> None:
    """Reads all slices of tables and drops them, which verifies their checksums.

    Args:
        prefix: prefix of a checkpoint.
        layout: the slices of tables in it.
        shapes, types: shapes and types of all its tensors.
        servers: number of parameter servers, which share the work; 0 to read them here.
        only_changed: the argument of `TableFiles.write`, which wrote it.

    Raises:
        tf.errors.OpError, ValueError: a checksum does not match, or rows are missing.
        TfmwError: a server cannot read it; this process reads the same rows.
    """
    every: list[tuple[str, str]] = []  # (name of a tensor, slice)
    for name, ranges in layout.items():
        if only_changed:
            rows = [changed_name(name, a) for a, _ in ranges]
            every += [(each, "") for of in rows for each in (of, ids_of(of))]
            continue
        if [0, *(b for _, b in ranges)] != [*(a for a, _ in ranges), shapes[name][0]]:
            raise ValueError(f"the slices {ranges} of {name} are not all of its {shapes[name]}")
        every += [(name, slice_spec(shapes[name], a, b)) for a, b in ranges]
    prefix = disk.absolute(prefix)
    count = max(1, servers)

    def read_on(device: str, name: str, spec: str) -> None:
        with tf.device(device):
            (rows,) = tf.raw_ops.RestoreV2(
                prefix=prefix, tensor_names=[name], shape_and_slices=[spec], dtypes=[types[name]]
            )
            int(tf.size(rows))  # waits for the server

    def read(where: int, name: str, spec: str) -> None:
        try:
            read_on(server(where) if servers else "/CPU:0", name, spec)
        except tf.errors.OpError as e:
            if not servers:
                raise
            read_on("/CPU:0", name, spec)  # raises if the file is damaged
            reason = (e.message or type(e).__name__).splitlines()[0]
            raise TfmwError(
                f"parameter server {where} cannot read {prefix!r} ({reason[:200]}), and the "
                "coordinator can: expected a running server, and a directory that all tasks share."
            ) from e

    on_each(
        [(n % count, functools.partial(read, n % count, *each)) for n, each in enumerate(every)]
    )


def _restore(one: Slice, begin: int, prefix: str, only_changed: bool) -> None:
    """Reads rows of one slice, which begins at row `begin`, on their server."""
    shard = one.shard

    def rows() -> tuple[Any, int]:
        (values,) = tf.raw_ops.RestoreV2(
            prefix=prefix,
            tensor_names=[one.name],
            shape_and_slices=[slice_spec(one.table.shape, one.start, one.stop)],
            dtypes=[shard.dtype],
        )
        shape = [one.stop - one.start, *one.table.shape[1:]]
        return shard.store(one.start, tf.ensure_shape(values, shape)), 0

    def changed_rows() -> tuple[Any, int]:
        name = changed_name(one.name, begin)
        ids, values = tf.raw_ops.RestoreV2(
            prefix=prefix,
            tensor_names=[ids_of(name), name],
            shape_and_slices=["", ""],
            dtypes=[tf.int64, shard.dtype],
        )
        own = tf.where((ids >= shard.start) & (ids < shard.stop))[:, 0]
        return shard.replace(tf.gather(ids, own) - shard.start, tf.gather(values, own)), 0

    server_function(shard.server, changed_rows if only_changed else rows)()


def changed_name(name: str, start: int) -> str:
    """Name of a table's changed rows [n, ...] in a checkpoint, for the slice from `start` on."""
    return f"{name}{_CHANGED}/{start:015d}"


def ids_of(name: str) -> str:
    """Name of the indices, int64 [n] in the whole table, of the rows `changed_name`."""
    return f"{name}/ids"


def is_changed_rows(name: str) -> bool:
    """Whether a tensor of this name has rows that have changed, or their indices."""
    return _CHANGED in name


def _are_finite(values: tf.Tensor) -> tf.Tensor:
    """Bool []: whether all values are finite; integers always are."""
    if values.dtype.is_integer:
        return tf.constant(True)
    return tf.reduce_all(tf.math.is_finite(values))


def _whole(one: Slice) -> list[TensorSlice]:
    first = one.start - one.shard.start
    ids = tf.range(first, one.stop - one.shard.start, dtype=tf.int64)
    spec = slice_spec(one.table.shape, one.start, one.stop)
    return [(one.name, spec, one.shard.sparse_read(ids))]


def _changed(one: Slice) -> list[TensorSlice]:
    shard, first = one.shard, one.start - one.shard.start
    ids = tf.range(first, one.stop - shard.start, dtype=tf.int64)
    ids = tf.boolean_mask(ids, tf.gather(shard.changed, shard.places(ids)))
    name = changed_name(one.name, one.start)
    return [
        (ids_of(name), "", ids + shard.start),
        (name, "", shard.sparse_read(ids)),
    ]


def _files(tables: Mapping[str, Table]) -> dict[str, list[Slice]]:
    """The slices of each file, by its name; all of a file are on one server."""
    files: dict[str, list[Slice]] = {}
    sizes: dict[int, list[int]] = {}  # server -> bytes of its files
    for table_name, table in tables.items():
        for one in slices(table_name, table, SLICE_BYTES):
            of_server = sizes.setdefault(one.shard.server, [])
            if not of_server or of_server[-1] + one.bytes > FILE_BYTES:
                of_server.append(0)
            of_server[-1] += one.bytes
            name = f"server_{one.shard.server:05d}_{len(of_server) - 1:05d}"
            files.setdefault(name, []).append(one)
    return files


def slice_spec(shape: Any, start: int, stop: int) -> str:
    """The rows [start, stop) of a tensor, in the format of TensorFlow's tensor_slice.h.

    An example is "1000 64 250,250:-": the whole shape, then first row and number of rows, all
    columns.
    """
    columns = ":-" * (len(shape) - 1)
    return f"{' '.join(map(str, shape))} {start},{stop - start}{columns}"
