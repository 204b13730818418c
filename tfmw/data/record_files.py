"""Rows of files, by their index: records of TFRecord, text and tar files, rows of parquet files.

records = tfmw.data.from_records(files, index_dir="index")     # bytes, one by one
train = records.map(parse).shuffle(100_000).batch(64)

samples = tfmw.data.from_tars(files, index_dir="index")        # {"jpg": bytes, "cls": bytes}

rows = tfmw.data.from_parquet("part-*.parquet", columns=["x", "y"])
train = rows.map(lambda row: (row["x"], row["y"])).shuffle(10_000).batch(64)
"""

from __future__ import annotations

import functools
import glob
import os
import threading
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfmw.data.by_index import from_index, stacked
from tfmw.data.record_index import index_of
from tfmw.errors import UsageError

_GROUPS = 8  # decoded row groups of parquet files that are kept


def from_records(
    files: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    *,
    kind: str = "tfrecord",
    index_dir: str | os.PathLike[str] | None = None,
) -> tf.data.Dataset:
    """The records of files, one by one, as strings.

    They have the order of `TFRecordDataset(files)` or `TextLineDataset(files)`. Workers read their
    own records only, also after a shuffle, and a resumed run reads no record again. Checksums of
    the bytes are not compared.

    Args:
        files: one path or several, on a disk that all workers see, without compression.
        kind: "tfrecord", or "text" for lines.
        index_dir: keeps the index, 16 bytes a record; a file that has changed gets a new one.
            Without it each start goes through the headers of all records, or through all lines.

    Raises:
        UsageError: a missing, compressed or incomplete file, no records, another kind.
    """
    if kind not in ("tfrecord", "text"):
        raise UsageError(f'received kind={kind!r}: expected "tfrecord" or "text".')
    return from_index(Records(_paths(files), kind, index_dir), in_threads=True)


def from_tars(
    files: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    extensions: Sequence[str],
    *,
    index_dir: str | os.PathLike[str] | None = None,
) -> tf.data.Dataset:
    """The samples of tar files, one by one, as WebDataset writes them.

        samples = tfmw.data.from_tars(files, ["jpg", "cls"], index_dir="index")
        train = samples.map(lambda s: (tf.io.decode_jpeg(s["jpg"]), s["cls"]))

    A sample is a dict: extension -> the bytes of that member. Members of a sample have one name up
    to the first dot, and follow each other. The order is that of the files. Workers read their own
    samples only, and of them these members only; a resumed run reads no sample again.

    Args:
        files: one path or several, on a disk that all workers see, without compression.
        extensions: of the members to read: the part of a name after its first dot.
        index_dir: keeps the index; see `from_records`.

    Raises:
        UsageError: a missing or compressed file, no samples, or a sample without such a member.
    """
    if isinstance(extensions, str) or not extensions:
        raise UsageError(
            f'received extensions={extensions!r}: expected several, as ["jpg", "cls"].'
        )
    names = [name.lower().lstrip(".") for name in extensions]
    records = Records(_paths(files), "/".join(["tar", *names]), index_dir)
    return from_index(_Samples(records, names), in_threads=True)


def _paths(files: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> list[str]:
    several = [files] if isinstance(files, str | os.PathLike) else files
    return [os.fspath(path) for path in several]


class _Samples:
    """Each `len(extensions)` records, by index."""

    def __init__(self, records: Records, extensions: Sequence[str]):
        self._records, self._extensions = records, extensions

    def __len__(self) -> int:
        return len(self._records) // len(self._extensions)

    def __getitem__(self, number: int) -> dict[str, bytes]:
        first = number * len(self._extensions)
        return {name: self._records[first + k] for k, name in enumerate(self._extensions)}


class Records:
    """The records of files, by index.

    Attributes:
        counts: the number of records of each file.
    """

    def __init__(self, paths: Sequence[str], kind: str, index_dir: str | os.PathLike[str] | None):
        self._paths = paths
        # int64 [records, 2] of each file: begin and end of the bytes
        self._index = [index_of(path, kind, index_dir) for path in paths]
        self.counts = [len(index) for index in self._index]
        self._ends: np.ndarray = np.cumsum(self.counts)
        self._opened: dict[int, int] = {}
        self._lock = threading.Lock()
        weakref.finalize(self, _close, self._opened)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, number: int) -> bytes:
        file = int(np.searchsorted(self._ends, number, side="right"))
        index = self._index[file]
        begin, end = map(int, index[number - int(self._ends[file]) + len(index)])
        return os.pread(self._descriptor(file), end - begin, begin)

    def many(self, numbers: np.ndarray) -> np.ndarray:
        """int64 [n] -> object [n], the bytes of these records."""
        found: np.ndarray = np.empty(len(numbers), object)
        found[:] = [self[number] for number in numbers.tolist()]
        return found

    def _descriptor(self, file: int) -> int:
        with self._lock:
            if file not in self._opened:
                self._opened[file] = os.open(self._paths[file], os.O_RDONLY | os.O_CLOEXEC)
            return self._opened[file]


def _close(opened: dict[int, int]) -> None:
    for descriptor in opened.values():
        os.close(descriptor)


def from_parquet(
    files: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    columns: Sequence[str] | None = None,
) -> tf.data.Dataset:
    """The rows of parquet files, one by one, as dicts; needs pyarrow.

    A row group is decoded whole, and the last 8 are kept. So a shuffle over many row groups decodes
    each of them often: write row groups of some thousand rows, and shuffle less than eight of them,
    or shuffle when you write.

    Args:
        files: a path, a pattern, or several paths, in the order of the rows.
        columns: names of those to read; by default all. A column of lists needs lists of one
            length.

    Raises:
        UsageError: no file, no rows, or a column that is no array.
    """
    found: list[str] = []
    for path in _paths(files):
        found += [path] if os.path.exists(path) else sorted(glob.glob(path))
    if not found:
        raise UsageError(f"no parquet file {files!r}: expected a path, a pattern or several paths.")
    return from_index(_ParquetRows(found, columns))


class _ParquetRows:
    """The rows of files, by index; the footers are read at once."""

    def __init__(self, paths: Sequence[str], columns: Sequence[str] | None):
        import pyarrow.parquet

        files = [pyarrow.parquet.ParquetFile(path) for path in paths]
        self._columns = columns
        self._groups = [(f, g) for f in files for g in range(f.metadata.num_row_groups)]
        sizes = [f.metadata.row_group(g).num_rows for f, g in self._groups]
        self._ends: np.ndarray = np.cumsum(sizes)
        self._group = functools.lru_cache(_GROUPS)(self._decoded)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {name: rows[0] for name, rows in self.columns_at([index]).items()}

    def columns_at(self, indices: Sequence[int]) -> dict[str, np.ndarray]:
        """The columns [number of indices, ...] of these rows."""
        out: dict[str, list[np.ndarray]] = {}
        for index in indices:
            group = int(np.searchsorted(self._ends, index, side="right"))
            for name, rows in self._group(group).items():
                out.setdefault(name, []).append(rows[index - int(self._ends[group])])
        return {name: stacked(rows) for name, rows in out.items()}

    def _decoded(self, number: int) -> dict[str, np.ndarray]:
        file, group = self._groups[number]
        table = file.read_row_group(group, columns=self._columns)
        return {name: _rows(name, table[name]) for name in table.column_names}


def _rows(name: str, column: Any) -> np.ndarray:
    """A column of a table -> [number of rows, ...]."""
    rows: np.ndarray = column.to_numpy()
    if rows.dtype != object or not len(rows) or isinstance(rows[0], str | bytes):
        return rows
    try:
        return np.stack([np.stack(r) if r.dtype == object else r for r in rows])
    except (AttributeError, TypeError, ValueError) as error:
        raise UsageError(
            f"column {name!r} has rows of different sizes, or missing values: expected numbers, "
            "strings, or lists of one length; leave it out by columns=[...]."
        ) from error
