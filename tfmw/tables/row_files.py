"""Tables in files whose rows are looked up by ops that any TensorFlow has.

A file is a TFRecord file. Each record has some successive rows, about 4 KB, as a serialized tensor.
All records of a table have the same length. So a lookup computes the file and the offset of the
record that has a row, reads this record and verifies its checksum; it reads nothing else. The graph
of a lookup is a part of a SavedModel and contains no Python. The operating system's page cache
holds the records that are read often.

Other ops of TensorFlow are worse for this. `RestoreV2` reads all of a slice for one of its rows,
and opens the checkpoint each time. `FixedLengthRecordDataset` reads all records before the one it
needs. `ImmutableConst` maps a file into memory, but TensorFlow copies it, as a constant.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math
import posixpath
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn

import tensorflow as tf

from tfmw.compat import models, table_variables
from tfmw.errors import TfmwError
from tfmw.storage import disk
from tfmw.tables.files import ExportedTables
from tfmw.tables.shards import VariableShard, on_each, require_written, server_function
from tfmw.tables.table import NeedsAllRows, Slice, Table, slices, tables_among

FILE_BYTES = 128 << 20  # memory that a server needs to write its rows
_RECORD_BYTES = 4096
_FRAME = 16  # bytes that a TFRecord adds to its content: length, and two checksums
_AT_ONCE = 16  # records that are read at the same time


class _Records:
    """Layout of the rows of one table in records."""

    def __init__(self, table: Table):
        self.dtype: tf.DType = table.dtype
        self.rows = max(1, min(_RECORD_BYTES // table.row_bytes, int(table.shape[0])))
        self.shape = [self.rows, *table.shape.as_list()[1:]]
        self.content = math.prod(self.shape) * self.dtype.size
        self.length = len(tf.io.serialize_tensor(tf.zeros(self.shape, self.dtype)).numpy())

    def of(self, rows: tf.Tensor) -> tf.data.Dataset:
        """The records of rows [n, ...]; the last is padded with zeros."""
        rest = -tf.shape(rows)[0] % self.rows
        filled = tf.pad(rows, [[0, rest], *[[0, 0]] * (len(self.shape) - 1)])
        records = tf.data.Dataset.from_tensor_slices(tf.reshape(filled, [-1, *self.shape]))
        return records.map(tf.io.serialize_tensor)

    def decoded(self, records: tf.Tensor) -> tf.Tensor:
        """[n, rows, ...], the rows of records: the values end each serialized tensor."""
        values = tf.strings.substr(records, self.length - self.content, self.content)
        return tf.reshape(tf.io.decode_raw(values, self.dtype), [-1, *self.shape])


class RowFiles:
    """Writes tables into files, and looks up their rows there.

    Args:
        tables: the tables by name.
    """

    def __init__(self, tables: Mapping[str, Table]):
        self.tables = dict(tables)
        self._records = {name: _Records(table) for name, table in self.tables.items()}
        numbers = itertools.count()
        self._files: dict[str, list[tuple[str, Slice]]] = {
            name: [
                (f"rows-{next(numbers):05d}.tfrecord", one)
                for one in slices(name, table, FILE_BYTES)
            ]
            for name, table in self.tables.items()
        }  # table -> (name, rows) of its files

    def as_json(self) -> dict[str, Any]:
        """The description for readers: for each table, its files and the content of a record."""
        return {
            name: {
                "shape": table.shape.as_list(),
                "dtype": table.dtype.name,
                "rows_per_record": self._records[name].rows,
                "files": [[file, rows.start, rows.stop] for file, rows in self._files[name]],
            }
            for name, table in self.tables.items()
        }

    def write(self, directory: str) -> None:
        """Writes all rows, each server its own.

        Args:
            directory: exists, and is the same on all servers and here.

        Raises:
            OSError or tf.errors.OpError: a server could not write, or writes elsewhere.
        """
        calls = []
        for name, files in self._files.items():
            writers = {
                id(shard): _writer(shard, self._records[name]) for shard in self.tables[name].shards
            }
            for file, rows in files:
                write = functools.partial(
                    writers[id(rows.shard)],
                    tf.constant(posixpath.join(directory, file)),
                    tf.constant(rows.start - rows.shard.start, tf.int64),
                    tf.constant(rows.stop - rows.shard.start, tf.int64),
                )
                calls.append((rows.shard.server, write))
        on_each(calls)
        written = (file for files in self._files.values() for file, _ in files)
        require_written(directory, (posixpath.join(directory, file) for file in written))

    def first_and_last(self, name: str) -> tf.Tensor:
        """int64 [n], the first and the last row of each file of a table."""
        ends = [row for _, rows in self._files[name] for row in (rows.start, rows.stop - 1)]
        return tf.constant(ends, tf.int64)

    def look_up(self, name: str, directory: tf.Tensor, ids: tf.Tensor) -> tf.Tensor:
        """Reads rows of a table.

        Args:
            directory: string [].
            ids: int64 [n], row indices in the whole table, in any order, repeated or not.

        Returns:
            [n, ...].
        """
        count = int(self.tables[name].shape[0])
        _require(tf.reduce_all((ids >= 0) & (ids < count)), f"ids of {name} are below {count}", ids)
        unique, positions = tf.unique(ids, out_idx=tf.int64)
        return tf.gather(self._read(name, directory, unique), positions)

    def _read(self, name: str, directory: tf.Tensor, ids: tf.Tensor) -> tf.Tensor:
        files, records = self._files[name], self._records[name]
        starts = tf.constant([rows.start for _, rows in files], tf.int64)
        where = tf.searchsorted(starts[1:], ids, side="right")
        row = ids - tf.gather(starts, where)
        begins = row // records.rows * (records.length + _FRAME)
        names = tf.gather(tf.constant([file for file, _ in files]), where)

        def record(path: tf.Tensor, begin: tf.Tensor) -> tf.data.Dataset:
            found = tf.raw_ops.TFRecordDatasetV2(
                filenames=path,
                compression_type="",
                buffer_size=tf.constant(records.length + _FRAME, tf.int64),
                byte_offsets=begin,
            )
            spec = tf.TensorSpec([], tf.string)
            return tf.data.experimental.from_variant(found, spec).take(1)

        paths = tf.strings.join([directory, "/", names])
        wanted = tf.data.Dataset.from_tensor_slices((paths, begins))
        found = wanted.interleave(record, _AT_ONCE, 1, num_parallel_calls=tf.data.AUTOTUNE)
        # A pipeline without elements could not end in one batch, so a last element is added.
        every = found.concatenate(tf.data.Dataset.from_tensors("")).batch(
            tf.size(ids, tf.int64) + 1
        )
        content = every.get_single_element()[:-1]
        is_whole = tf.equal(tf.size(content), tf.size(ids))  # a file may be truncated
        with tf.control_dependencies([_require(is_whole, f"files of {name} are whole", directory)]):
            blocks_of_rows = records.decoded(content)
        return tf.gather(blocks_of_rows, row % records.rows, batch_dims=1)


def _require(holds: tf.Tensor, expected: str, found: tf.Tensor) -> Any:
    return tf.debugging.Assert(holds, [f"tfmw: expected that {expected}; received:", found])


def _writer(shard: VariableShard, records: _Records) -> Callable[[Any, Any, Any], tf.Tensor]:
    """A function (path, first and last row, in the shard) that writes a file on the server."""

    def write(path: tf.Tensor, start: tf.Tensor, stop: tf.Tensor) -> tuple[Any, int]:
        rows = shard.sparse_read(tf.range(start, stop, dtype=tf.int64))
        written = tf.raw_ops.DatasetToTFRecord(
            input_dataset=tf.data.experimental.to_variant(records.of(rows)),
            filename=path,
            compression_type="",
        )
        return written, 0

    number = tf.TensorSpec([], tf.int64)
    return server_function(shard.server, write, tf.TensorSpec([], tf.string), number, number)


# ---------------------------------------------------------------- in SavedModels


@contextlib.contextmanager
def tables_in_files(
    variables: Iterable[object], weights: Iterable[object]
) -> Iterator[ExportedTables]:
    """Makes Keras variables that are tables look up rows in files, in graphs of this context.

    The SavedModel gets an asset, `assets/tables.json`, which names the files of rows, and the files
    beside it, which the servers write.

    Args:
        variables: variables of the model, its optimizer and its metrics.
        weights: variables of the model. Other ones, such as slots, are not written.
    """
    of_model = {id(variable) for variable in weights}
    named: dict[str, Any] = {}
    for variable in tables_among(variables):
        name = variable.path
        named[name if name not in named else f"{name} ({len(named)})"] = variable
    files = RowFiles({name: models.native(v) for name, v in named.items() if id(v) in of_model})
    with tempfile.TemporaryDirectory() as folder:
        path = posixpath.join(folder, "tables.json")
        with open(path, "w") as file:
            json.dump(files.as_json(), file)
        asset = tf.saved_model.Asset(path)

        def look_up(name: str, ids: tf.Tensor) -> tf.Tensor:
            path: tf.Tensor = asset.asset_path  # the directory that the SavedModel is loaded from
            return files.look_up(name, tf.strings.regex_replace(path, "/[^/]*$", ""), ids)

        pairs = []
        for number, (name, variable) in enumerate(named.items()):
            table: Table = models.native(variable)
            rows = table_variables.ExternalRows(
                f"tfmw_exported_{number}",
                table.shape.as_list(),
                table.dtype,
                functools.partial(look_up, name),
                functools.partial(_refuse_whole, table.path),
                table.trainable,
            )
            pairs.append((variable, rows))
        with models.substituted(pairs):
            yield asset if files.tables else None, functools.partial(_write_into, files)


def _write_into(files: RowFiles, directory: str) -> None:
    """Adds the files to a SavedModel. Raises TfmwError if a lookup would not read the rows."""
    if not files.tables:
        return
    folder = disk.absolute(posixpath.join(directory, "assets"))
    files.write(folder)
    for name, table in files.tables.items():
        ids = files.first_and_last(name)
        with tf.device("CPU:0"):
            written = files.look_up(name, tf.constant(folder), ids)
        if written.numpy().tobytes() != table.sparse_read(ids).numpy().tobytes():
            raise TfmwError(
                f"the rows of {name} in {folder!r} are not those of the parameter servers: "
                "this TensorFlow writes records in another way than those that tfmw knows; "
                'export with tables="whole".'
            )


def _refuse_whole(path: str) -> NoReturn:
    raise NeedsAllRows(
        f'{path} cannot be exported with tables="sharded": a layer reads all rows of it, '
        'and a sharded table serves the rows of some ids only; export with tables="whole".'
    )
