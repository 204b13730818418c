"""Tables in TensorFlow's checkpoints: each server writes and reads its own rows.

    files = TableFiles({"000001/embeddings": table, ...})
    parts = files.write("/shared/parts")              # the prefixes of checkpoints of slices
    files.clear_marks()
    parts = files.write_changed("/shared/parts")      # rows that have changed since
    files.read("/shared/tables", layout)              # with any number of servers
    files.read_changed("/shared/tensors", layout)

    with whole_tables(model.variables) as written:     # in the checkpoint of a SavedModel
        ...                                            # write the SavedModel to `path`
        written.write_into(path)

A checkpoint may have a tensor in slices. Each server writes slices of at most `SLICE_BYTES`, a few
of them in a file, so a server needs memory for one file beside its rows. All servers write and read
at the same time, and no row goes through the coordinator. `MergeV2Checkpoints` joins the parts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import posixpath
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfmw import storage
from tfmw.errors import TfmwError
from tfmw.keras_compat import models, table_variables
from tfmw.runtime import disk
from tfmw.tables.shards import on_each, require_written, server
from tfmw.tables.table import Slice, Table, slices, store_rows, tables_among

SLICE_BYTES = 32 << 20
FILE_BYTES = 128 << 20
_CHANGED = ".tfmw_changed"
_MARK = "tfmw: the rows of table"

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


class TableFiles:
    """Writes tables into checkpoints, and reads them from checkpoints.

    Args:
        tables: by their names in a checkpoint.
    """

    def __init__(self, tables: Mapping[str, Table]):
        self.tables = dict(tables)
        of_servers: dict[int, list[Slice]] = {}
        for name, table in self.tables.items():
            for one in slices(name, table, SLICE_BYTES):
                of_servers.setdefault(one.shard.server, []).append(one)
        self._parts = {where: _grouped(of) for where, of in of_servers.items()}
        self._writers = {where: self._writer(where, _whole) for where in self._parts}
        self._writers_of_changed = {where: self._writer(where, _changed) for where in self._parts}

    @property
    def layout(self) -> Layout:
        """The slices that `write` writes."""
        return {
            name: [[s.start, s.stop] for s in slices(name, table, SLICE_BYTES)]
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
        return self._write(self._writers, directory, must_be_finite)

    def write_changed(self, directory: str, must_be_finite: Collection[str] = ()) -> list[str]:
        """As `write`, of rows that have changed since `clear_marks`; see `changed_name`."""
        return self._write(self._writers_of_changed, directory, must_be_finite)

    def clear_marks(self) -> None:
        """From now on `write_changed` writes rows that change after this call."""
        for changed, where in self._marks():
            with tf.device(server(where)):
                changed.assign(tf.zeros(changed.shape, tf.bool))

    def share_changed(self) -> float:
        """The share of all tables' bytes that `write_changed` would write."""
        counts = {}
        for changed, where in self._marks():
            with tf.device(server(where)):
                counts[id(changed)] = int(tf.math.count_nonzero(changed.read_value()))
        shards = [(table, shard) for table in self.tables.values() for shard in table.shards]
        marked = [(table.row_bytes, s.changed) for table, s in shards if s.changed is not None]
        all_bytes = sum(size * int(changed.shape[0]) for size, changed in marked)
        return sum(size * counts[id(changed)] for size, changed in marked) / max(1, all_bytes)

    def _marks(self) -> list[tuple[tf.Variable, int]]:
        shards = [shard for table in self.tables.values() for shard in table.shards]
        found = {id(s.changed): (s.changed, s.server) for s in shards if s.changed is not None}
        return list(found.values())

    def _write(
        self,
        writers: dict[int, Callable[[Any], Any]],
        directory: str,
        must_be_finite: Collection[str],
    ) -> list[str]:
        directory = disk.absolute(directory)  # servers may run in another directory
        finite = on_each({where: functools.partial(w, directory) for where, w in writers.items()})
        for where, flags in finite.items():
            every = [one for part in self._parts[where] for one in part]
            for one, is_finite in zip(every, flags.numpy(), strict=True):
                if one.name in must_be_finite and not is_finite:
                    raise NotFinite(one.name)
        prefixes = [
            posixpath.join(directory, _part_name(where, number))
            for where, parts in sorted(self._parts.items())
            for number in range(len(parts))
        ]
        require_written(directory, (f"{prefix}.index" for prefix in prefixes))
        return prefixes

    def read(self, prefix: str, layout: Layout) -> None:
        """Restores all tables from a checkpoint, each server its own rows.

        Args:
            prefix: of the checkpoint.
            layout: the slices in it; tables that are not in it are left as they are.
        """
        self._read(prefix, layout, _restore)

    def read_changed(self, prefix: str, layout: Layout) -> None:
        """Restores the rows of `write_changed`, after those of `read`; with the same arguments."""
        self._read(prefix, layout, _restore_changed)

    def _read(self, prefix: str, layout: Layout, restore: Callable[[str, Slice, int], Any]) -> None:
        """Calls `restore` for all rows, each server for its own, one slice after the other.

        Args:
            restore: (prefix, rows of one slice in the checkpoint, where that slice begins) -> the
                op that is last, on the server.
        """
        prefix = disk.absolute(prefix)  # servers may run in another directory
        wanted: dict[int, list[Callable[[], Any]]] = {}
        for name, table in self.tables.items():
            for shard in table.shards:
                # Reading a part of a slice reads all of it: each slice is read once by a shard.
                for a, b in layout.get(name, ()):
                    start, stop = max(a, shard.start), min(b, shard.stop)
                    if start < stop:
                        one = Slice(name, table, shard, start, stop)
                        call = functools.partial(restore, prefix, one, a)
                        wanted.setdefault(shard.server, []).append(call)
        on_each({where: _one_by_one(where, calls) for where, calls in wanted.items()})

    def _writer(
        self, where: int, tensors_of: Callable[[Slice], list[tuple[str, str, tf.Tensor]]]
    ) -> Callable[[str], tf.Tensor]:
        """A function that writes the files of one server: which of its slices are finite.

        Args:
            tensors_of: (name, slice of the tensor, values) of what is written of each, rows last.
        """

        def write(directory: tf.Tensor) -> tf.Tensor:
            finite: list[tf.Tensor] = []
            with tf.device(server(where)):
                written: list[Any] = []
                for number, part in enumerate(self._parts[where]):
                    with tf.control_dependencies(written):  # one file after the other is in memory
                        found = [tensors_of(one) for one in part]
                    finite += [_are_finite(of[-1][2]) for of in found]
                    every = [one for of in found for one in of]
                    written = [
                        save_tensors(
                            tf.strings.join([directory, "/", _part_name(where, number)]), {}, every
                        )
                    ]
                with tf.control_dependencies(written):
                    flags = tf.stack(finite)
            return tf.identity(flags)

        traced = tf.function(write, autograph=False, input_signature=[tf.TensorSpec([], tf.string)])
        # TensorFlow would warn of calls of `traced`: each server has a function of this name.
        return lambda directory: traced.get_concrete_function()(tf.constant(directory))


def save_tensors(
    prefix: str | tf.Tensor,
    tensors: Mapping[str, Any],
    slices: Sequence[tuple[str, str, tf.Tensor]] = (),
) -> Any:
    """Saves tensors, and slices of other ones, in a TensorFlow checkpoint.

    Args:
        prefix: of the checkpoint.
        tensors: by name.
        slices: (name of the tensor; its shape with begin,length of each dimension, as
            `tf.raw_ops.SaveV2` takes them; the values there).

    Returns:
        The operation, in a graph.
    """
    whole = [(name, "", tf.convert_to_tensor(tensors[name])) for name in sorted(tensors)]
    every = [*whole, *slices]
    return tf.raw_ops.SaveV2(
        prefix=prefix,
        tensor_names=[name for name, _, _ in every],
        shape_and_slices=[spec for _, spec, _ in every],
        tensors=[values for _, _, values in every],
    )


def write_checkpoint(
    prefix: str,
    parts: str,
    write: Callable[[str], list[str]],
    tensors: Mapping[str, Any] | None = None,
) -> None:
    """Writes one checkpoint: what servers write of tables, and other tensors.

    Args:
        prefix: of the checkpoint; its directory exists, and is the same on all servers.
        parts: a directory for the parts, until they are one.
        write: `TableFiles.write` or `write_changed`.
        tensors: the others, by name, which this process writes.

    Raises:
        NotFinite, tf.errors.OpError, OSError: as `write`.
    """
    tf.io.gfile.makedirs(parts)
    prefixes = write(parts)
    with tf.device("/CPU:0"):
        if tensors is not None:
            prefixes.insert(0, posixpath.join(parts, "coordinator"))
            save_tensors(prefixes[0], tensors)
        tf.raw_ops.MergeV2Checkpoints(
            checkpoint_prefixes=prefixes, destination_prefix=prefix, delete_old_dirs=False
        )
    storage.remove(parts)


@dataclasses.dataclass
class WholeTables:
    """The stand-ins of tables in a SavedModel.

    While the SavedModel is made a table has no value, and in the checkpoint of its variables there
    is a mark in its place.

    Args:
        tables: by the marks in the checkpoint.
    """

    tables: dict[str, Table]

    def track(self, archive: Any) -> None:
        """Makes an archive ready to be written: it has all that it needs."""

    def write_into(self, directory: str) -> None:
        """Replaces the marks in a SavedModel by the tables' rows, which their servers write.

        Raises:
            OSError or tf.errors.OpError: a file could not be written.
        """
        if not self.tables:
            return
        prefix = posixpath.join(directory, "variables", "variables")
        tables, tensors = {}, {}
        with storage.checkpoint_reader(prefix) as reader:
            for name in sorted(reader.get_variable_to_shape_map()):
                tensor = reader.get_tensor(name)
                if isinstance(tensor, bytes) and tensor.decode(errors="replace") in self.tables:
                    tables[name] = self.tables[tensor.decode()]
                else:
                    tensors[name] = tensor
        for file in storage.files_of(f"{prefix}."):
            tf.io.gfile.remove(file)
        write_checkpoint(prefix, f"{prefix}.parts", TableFiles(tables).write, tensors)


@contextlib.contextmanager
def whole_tables(variables: Iterable[object]) -> Iterator[WholeTables]:
    """Within this context Keras variables that are tables hold variables without values."""
    found: dict[str, Table] = {}
    pairs = []
    for number, variable in enumerate(tables_among(variables)):
        table: Table = models.native(variable)
        mark = f"{_MARK} {number}"
        found[mark] = table
        name = f"tfmw_exported_{number}"
        stand_in = table_variables.StandIn(name, table.shape, table.dtype, table.trainable, mark)
        pairs.append((variable, stand_in))
    with models.substituted(pairs):
        yield WholeTables(found)


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
    for name, ranges in layout.items():
        if [0, *(b for _, b in ranges)] != [*(a for a, _ in ranges), shapes[name][0]]:
            raise ValueError(f"the slices {ranges} of {name} are not all of its {shapes[name]}")
    every = [
        (name, _spec(shapes[name], a, b), types[name])
        for name, ranges in layout.items()
        for a, b in ranges
    ]
    _compare_checksums(prefix, every, servers)


def verify_changed(prefix: str, layout: Layout, types: Mapping[str, Any], servers: int) -> None:
    """As `verify`, of the tensors of `TableFiles.write_changed`."""
    names = [changed_name(name, a) for name, ranges in layout.items() for a, _ in ranges]
    every = [(each, "", types[each]) for name in names for each in (name, ids_of(name))]
    _compare_checksums(prefix, every, servers)


def _compare_checksums(prefix: str, every: list[tuple[str, str, tf.DType]], servers: int) -> None:
    """Reads (name, slice, dtype), each server some of them; reading compares their checksums."""
    prefix = disk.absolute(prefix)
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

    on_each({where: functools.partial(check, where) for where in range(count)})


def _read_and_drop(prefix: str, name: str, spec: str, dtype: tf.DType, device: str) -> None:
    with tf.device(device):
        (rows,) = tf.raw_ops.RestoreV2(
            prefix=prefix, tensor_names=[name], shape_and_slices=[spec], dtypes=[dtype]
        )
        int(tf.size(rows))  # waits for the server


def _one_by_one(where: int, calls: list[Callable[[], Any]]) -> Callable[[], Any]:
    """Makes the ops of one server, each after the one before."""

    def run() -> tf.Tensor:
        with tf.device(server(where)):
            done: list[Any] = []
            for call in calls:
                with tf.control_dependencies(done):
                    done = [call()]
            with tf.control_dependencies(done):
                end = tf.constant(0)
        return tf.identity(end)

    traced = tf.function(run, autograph=False)
    return lambda: traced.get_concrete_function()()  # without a warning, as in `_writer`


def _restore(prefix: str, one: Slice, begin: int) -> Any:
    """Reads rows of `write` on their server."""
    del begin
    (rows,) = tf.raw_ops.RestoreV2(
        prefix=prefix,
        tensor_names=[one.name],
        shape_and_slices=[_spec(one.table.shape, one.start, one.stop)],
        dtypes=[one.table.dtype],
    )
    rows = tf.ensure_shape(rows, [one.stop - one.start, *one.table.shape[1:]])
    return store_rows(one.shard, one.start, rows)


def _restore_changed(prefix: str, one: Slice, begin: int) -> Any:
    """Reads the rows of `write_changed` that are in a shard, on its server."""
    name, shard = changed_name(one.name, begin), one.shard
    ids, rows = tf.raw_ops.RestoreV2(
        prefix=prefix,
        tensor_names=[ids_of(name), name],
        shape_and_slices=["", ""],
        dtypes=[tf.int64, one.table.dtype],
    )
    own = tf.where((ids >= shard.start) & (ids < shard.stop))[:, 0]
    changed = tf.IndexedSlices(tf.gather(rows, own), tf.gather(ids, own) - shard.start)
    return shard.variable.scatter_update(changed)


def changed_name(name: str, start: int) -> str:
    """In a checkpoint: rows [n, ...] of a table that have changed, of the slice from `start` on."""
    return f"{name}{_CHANGED}/{start:015d}"


def ids_of(name: str) -> str:
    """In a checkpoint: the indices, int64 [n] in the whole table, of the rows `changed_name`."""
    return f"{name}/ids"


def is_changed_rows(name: str) -> bool:
    """Whether `write_changed` wrote a tensor of this name."""
    return _CHANGED in name


def _are_finite(values: tf.Tensor) -> tf.Tensor:
    """Bool []; integers are."""
    if values.dtype.is_integer:
        return tf.constant(True)
    return tf.reduce_all(tf.math.is_finite(values))


def _whole(one: Slice) -> list[tuple[str, str, tf.Tensor]]:
    first = one.start - one.shard.start
    ids = tf.range(first, one.stop - one.shard.start, dtype=tf.int64)
    spec = _spec(one.table.shape, one.start, one.stop)
    return [(one.name, spec, tf.gather(one.shard.variable, ids))]


def _changed(one: Slice) -> list[tuple[str, str, tf.Tensor]]:
    first, changed = one.start - one.shard.start, one.shard.changed
    marks = tf.gather(changed, tf.range(first, one.stop - one.shard.start, dtype=tf.int64))
    ids = tf.where(marks)[:, 0] + first
    name = changed_name(one.name, one.start)
    return [
        (ids_of(name), "", ids + one.shard.start),
        (name, "", tf.gather(one.shard.variable, ids)),
    ]


def _grouped(of_server: list[Slice]) -> list[list[Slice]]:
    """The slices of each file."""
    files: list[list[Slice]] = []
    size = 0
    for one in of_server:
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
