"""Rows of files, by their index: records of TFRecord, text and tar files, rows of parquet files.

records = tfmw.data.from_records(files, index_dir="index")     # bytes, one by one
train = records.map(parse).shuffle(100_000).batch(64)

samples = tfmw.data.from_tars(files, index_dir="index")        # {"jpg": bytes, "cls": bytes}

rows = tfmw.data.from_parquet("part-*.parquet", columns=["x", "y"])
train = rows.map(lambda row: (row["x"], row["y"])).shuffle(10_000).batch(64)

A pipeline that concatenates the records of files has the order of `flat_map` or `interleave` over
the names, which may be shuffled. With an index of each file, a position in the pipeline corresponds
to a record in a file. So a resumed run reads the remaining records only.
"""

from __future__ import annotations

import functools
import logging
import os
import subprocess
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfmw.cluster import membership
from tfmw.compat.file_readers import FileReader
from tfmw.compat.pipelines import INFINITE, SAME, Pipeline
from tfmw.compat.shuffles import ShuffleOrder
from tfmw.data import record_index
from tfmw.data.bucket_files import BucketFile, OpenedFile, RangeCache, cache_of, expanded
from tfmw.data.by_index import Rows, dataset_of, stacked
from tfmw.data.values import SharedOrder
from tfmw.errors import UsageError
from tfmw.storage import disk
from tfmw.storage.bucket import is_bucket

logger = logging.getLogger("tfmw")

CACHE_BYTES = 10 << 30
"""Default limit of a cache, in bytes."""

_MANY_FILES = 1_000_000
_OPENED = 64  # most files of a dataset that are open at a time
_GROUPS = 8  # most decoded row groups of parquet files that are kept


def from_records(
    files: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    *,
    kind: str = "tfrecord",
    index_dir: str | os.PathLike[str] | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    cache_bytes: int = CACHE_BYTES,
) -> tf.data.Dataset:
    """Creates a dataset of the records of files, as strings.

    They have the order of `TFRecordDataset(files)` or `TextLineDataset(files)`. Workers read their
    own records only, also after a shuffle, and a resumed run reads no record again. Checksums of
    the bytes are not compared.

    Args:
        files: a path, a pattern or several, on a disk that all workers see or in a bucket, without
            compression: `s3://bucket/train-*.tfrecord`, `gs://...`, `az://...`. From a
            bucket each worker fetches its own records.
        kind: "tfrecord", or "text" for lines.
        index_dir: keeps the index, 16 bytes a record; it may be in a bucket. A local file that has
            changed gets a new one, and an object that has changed is refused. Without `index_dir`
            each start goes through the headers of all records, or through all lines.
        cache_dir: local directory that keeps records of files in a bucket, for all workers of a
            machine and for later epochs and runs; None for no cache.
        cache_bytes: limit of its size. Records that do not fit are read from the bucket each time.

    Raises:
        UsageError: a missing, compressed or incomplete file, no records, another kind.
    """
    if kind not in ("tfrecord", "text"):
        raise UsageError(f'received kind={kind!r}: expected "tfrecord" or "text".')
    records = Records(_paths(files), kind, index_dir, cache_of(cache_dir, cache_bytes))
    return dataset_of(records.read, len(records), in_threads=True)


def from_tars(
    files: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    extensions: Sequence[str],
    *,
    index_dir: str | os.PathLike[str] | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    cache_bytes: int = CACHE_BYTES,
) -> tf.data.Dataset:
    """Creates a dataset of the samples of tar files, as WebDataset writes them.

        samples = tfmw.data.from_tars(files, ["jpg", "cls"], index_dir="index")
        train = samples.map(lambda s: (tf.io.decode_jpeg(s["jpg"]), s["cls"]))

    A sample is a dict: extension -> the bytes of that member. Members of a sample have one name up
    to the first dot, and follow each other. The order is that of the files. Workers read their own
    samples only, and of them these members only; a resumed run reads no sample again.

    Args:
        files: a path, a pattern or several, on a disk that all workers see or in a bucket, without
            compression: `s3://bucket/train-*.tar`, `gs://...`, `az://...`. From a bucket
            each worker fetches its own samples.
        extensions: extensions of the members to read: the part of a name after its first dot.
        index_dir: keeps the index; see `from_records`.
        cache_dir: keeps members of files in a bucket; see `from_records`.
        cache_bytes: limit of its size.

    Raises:
        UsageError: a missing or compressed file, no samples, or a sample without such a member.
    """
    if isinstance(extensions, str) or not extensions:
        raise UsageError(
            f'received extensions={extensions!r}: expected several, as ["jpg", "cls"].'
        )
    names = [name.lower().lstrip(".") for name in extensions]
    cache = cache_of(cache_dir, cache_bytes)
    members = Records(_paths(files), "/".join(["tar", *names]), index_dir, cache)
    count = len(names)

    def samples(numbers: Sequence[int]) -> dict[str, np.ndarray]:
        """The members of these samples, by extension: object [n] each."""
        found = members.read(np.add.outer(np.multiply(numbers, count), range(count)).reshape(-1))
        return {name: found[k::count] for k, name in enumerate(names)}

    return dataset_of(samples, len(members) // count, in_threads=True)


def _paths(files: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> list[str]:
    several = [files] if isinstance(files, str | os.PathLike) else list(files)
    paths = [disk.absolute(os.fspath(path)) for path in several]
    if not (found := [each for path in paths for each in expanded(path)]):
        raise UsageError(f"no file {files!r}: expected a path, a pattern or several paths.")
    return found


class Records:
    """The records of files, by index.

    Attributes:
        counts: the number of records of each file.
    """

    def __init__(
        self,
        paths: Sequence[str],
        kind: str,
        index_dir: str | os.PathLike[str] | None,
        cache: RangeCache | None = None,
    ):
        index_of: Callable[[str], np.ndarray] = functools.partial(
            record_index.index_of, kind=kind, index_dir=index_dir
        )
        if index_dir is None:
            index_of = functools.cache(index_of)  # nothing else keeps them
        cluster = membership.current_cluster()
        first = len(paths) * cluster.index // max(1, cluster.num_workers)
        self.counts = [0] * len(paths)
        # Each worker begins elsewhere, and then finds the indices that others have made.
        for file in (*range(first, len(paths)), *range(first)):
            if index_dir is None:
                self.counts[file] = len(index_of(paths[file]))
            else:
                self.counts[file] = record_index.count_of(paths[file], kind, index_dir)
        self._ends: np.ndarray = np.cumsum(self.counts)

        def opened(file: int) -> tuple[_File | BucketFile, np.ndarray]:
            path = paths[file]
            return BucketFile(path, cache) if is_bucket(path) else _File(path), index_of(path)

        self._opened = functools.lru_cache(_OPENED)(opened)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def read(self, numbers: Sequence[int] | np.ndarray) -> np.ndarray:
        """The bytes of these records: object [n]."""
        found: np.ndarray = np.empty(len(numbers), object)
        files = np.searchsorted(self._ends, numbers, side="right")
        for file in map(int, np.unique(files)):
            (places,) = np.nonzero(files == file)
            opened, index = self._opened(file)
            first = int(self._ends[file]) - len(index)
            records = opened.read(index[np.asarray(numbers)[places] - first].tolist())
            for place, record in zip(places, records, strict=True):
                found[place] = record
        return found


class _File:
    """An open file, which is closed once no thread reads it."""

    def __init__(self, path: str):
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self.descriptor)

    def read(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        return [os.pread(self.descriptor, end - begin, begin) for begin, end in ranges]


def from_parquet(
    files: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    columns: Sequence[str] | None = None,
    *,
    cache_dir: str | os.PathLike[str] | None = None,
    cache_bytes: int = CACHE_BYTES,
) -> tf.data.Dataset:
    """Creates a dataset of the rows of parquet files, as dicts; needs pyarrow.

    A row group is decoded whole, and the last 8 are kept. So a shuffle over many row groups decodes
    each of them often. Write row groups of some thousand rows, and shuffle less than eight of them,
    or shuffle before you write.

    Args:
        files: a path, a pattern, or several paths, in the order of the rows; also in a bucket.
        columns: names of the columns to read; by default all. A column of lists needs lists of one
            length.
        cache_dir: keeps columns of files in a bucket; see `from_records`.
        cache_bytes: limit of its size.

    Raises:
        UsageError: no file, no rows, or a column that is no array.
    """
    rows = _ParquetRows(_paths(files), columns, cache_of(cache_dir, cache_bytes))
    return dataset_of(rows.read, len(rows))


class _ParquetRows:
    """The rows of parquet files, by index; the constructor reads the footers."""

    def __init__(
        self, paths: Sequence[str], columns: Sequence[str] | None, cache: RangeCache | None = None
    ):
        import pyarrow.parquet

        def opened(path: str) -> Any:
            source = OpenedFile(BucketFile(path, cache)) if is_bucket(path) else path
            return pyarrow.parquet.ParquetFile(source)

        self._open, self._columns = opened, columns
        self._groups: list[tuple[str, int]] = []
        sizes = []
        for path in paths:
            with self._open(path) as file:
                footer = file.metadata
            groups = range(footer.num_row_groups)
            self._groups += [(path, group) for group in groups]
            sizes += [footer.row_group(group).num_rows for group in groups]
        self._ends: np.ndarray = np.cumsum(sizes)
        self._group = functools.lru_cache(_GROUPS)(self._decoded)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def read(self, indices: Sequence[int]) -> dict[str, np.ndarray]:
        """The columns [number of indices, ...] of these rows."""
        out: dict[str, list[np.ndarray]] = {}
        for index in indices:
            group = int(np.searchsorted(self._ends, index, side="right"))
            for name, rows in self._group(group).items():
                out.setdefault(name, []).append(rows[index - int(self._ends[group])])
        return {name: stacked(rows) for name, rows in out.items()}

    def _decoded(self, number: int) -> dict[str, np.ndarray]:
        path, group = self._groups[number]
        with self._open(path) as file:
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


# ---------------------------------------------------------------- pipelines over files


class FileRecords:
    """The records of a pipeline over files."""

    def __init__(
        self,
        reader: FileReader,
        shuffle: Pipeline | None,
        files: Sequence[Sequence[str]],
        order: SharedOrder,
    ):
        paths = [path for of_element in files for path in of_element]
        records = Records(paths, reader.kind, order.index_dir)
        self.rows = Rows(records.read, tf.TensorSpec([], tf.string), in_threads=True)
        self.maps = [Pipeline(each, []) for each in reader.maps]
        self.shuffle = shuffle  # the shuffle of the elements that are names of files
        self._turns = reader.cycle_length or order.cycle_length(reader.calls), reader.block_length
        # The first record of each element, and the number of its records.
        ends = np.cumsum([len(of_element) for of_element in files])
        counts = np.concatenate([[0], np.cumsum(records.counts)])
        begins = counts[np.concatenate([[0], ends[:-1]])]
        self._begins = np.minimum(begins + reader.skip, counts[ends])
        self._counts = counts[ends] - self._begins
        self.length = int(self._counts.sum())

    @classmethod
    def of(cls, node: Pipeline, order: SharedOrder) -> FileRecords | None:
        """The records of a pipeline; None for other pipelines, and for files that have no index."""
        found = _files_of(node)
        try:
            return None if found is None else cls(*found, order)
        except (UsageError, OSError) as error:
            logger.info("the files of the dataset have no index of their records: %s", error)
            return None

    def numbers(self, seeds: Sequence[int] | None) -> Callable[[np.ndarray], np.ndarray]:
        """A function of positions in a pass -> record numbers; `seeds` are those of `shuffle`."""
        elements: np.ndarray = np.arange(len(self._counts))
        if self.shuffle is not None and seeds is not None:
            blocks = ShuffleOrder(self.shuffle.buffer_size, len(elements), seeds).blocks(0)
            elements = np.concatenate(list(blocks))
        order = interleave_order(self._counts[elements], *self._turns)

        def numbers(positions: np.ndarray) -> np.ndarray:
            pieces, places = order(positions)
            return self._begins[elements[pieces]] + places

        return numbers


def _files_of(
    node: Pipeline,
) -> tuple[FileReader, Pipeline | None, list[list[str]]] | None:
    """(the reader, a shuffle of its elements, the files of each element), or None."""
    reader = node.reader
    if reader is None:
        return None
    names, shuffle = node.input.beneath(SAME), None
    if names.kind == "shuffle":
        shuffle, names = names, names.input.beneath(SAME)
    length = names.length
    if length in (None, INFINITE, 0) or length > _MANY_FILES:
        return None
    if not names.may_be_read_twice:  # as a second shuffle
        return None
    of_elements = names.dataset.map(reader.names)
    files = [[os.fsdecode(name) for name in each.numpy()] for each in of_elements]
    if any(is_bucket(name) for each in files for name in each):
        return None  # "gs://", which TensorFlow reads
    return reader, shuffle, files


def refuse_buckets(pipeline: Pipeline) -> None:
    """Raises UsageError for TensorFlow's readers over objects that TensorFlow does not read."""
    for node in pipeline.nodes:
        if node.reader is None or not node.input.may_be_read_twice:
            continue
        for of_element in node.input.dataset.take(1).map(node.reader.names):
            name = os.fsdecode(of_element.numpy()[0]) if len(of_element) else ""
            if is_bucket(name) and not name.startswith("gs://"):
                raise UsageError(
                    f"TensorFlow does not read {name}: in place of its dataset of files, pass "
                    f"tfmw.data.from_records(files, kind={node.reader.kind!r})."
                )


def index_in_background(dataset: tf.data.Dataset, index_dir: str) -> list[subprocess.Popen[bytes]]:
    """Creates the indices that a run will need when it resumes; returns the processes."""
    started = []
    for node in Pipeline.of(dataset).nodes:
        if (found := _files_of(node)) is not None:
            reader, _, files = found
            paths = [path for of_element in files for path in of_element]
            started.append(record_index.make_in_background(paths, reader.kind, index_dir))
    return [process for process in started if process is not None]


def interleave_order(
    lengths: Sequence[int], cycle_length: int, block_length: int
) -> Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """The order of tf.data's interleave, computed for any positions of one pass.

    It reads `cycle_length` datasets in turns, `block_length` elements in each
    (tensorflow/core/kernels/data/interleave_dataset_op.cc). When a dataset ends, the next one of
    the input takes its place, and is read in the next turn of that place. Between two such ends the
    order is regular, so it is stored as one segment.

    Returns:
        A function: int64 [n] positions -> (int64 [n], their datasets; int64 [n], positions in
        those).
    """
    left = [int(length) for length in lengths]  # number of unread elements of each dataset
    begins: list[int] = []  # first position of each segment
    slots: list[int] = []  # first index of each segment in the two lists below
    datasets_read: list[int] = []  # the datasets that are read in turns
    read_before: list[int] = []  # number of their elements that were read before
    end = 0

    def read(pieces: list[int], count: int) -> None:
        """Reads `count` elements of each of these datasets, in turns."""
        nonlocal end
        begins.append(end)
        slots.append(len(datasets_read))
        datasets_read.extend(pieces)
        read_before.extend(int(lengths[piece]) - left[piece] for piece in pieces)
        end += count * len(pieces)
        for piece in pieces:
            left[piece] -= count

    places: list[int | None] = [None] * cycle_length
    place = opened = 0
    while opened < len(left) or any(piece is not None for piece in places):
        pieces = [piece for piece in [*places[place:], *places[:place]] if piece is not None]
        if len(pieces) == cycle_length or (pieces and opened == len(left)):
            around = min(left[piece] // block_length for piece in pieces)
            if around:
                read(pieces, around * block_length)
        piece = places[place]
        if piece is None and opened < len(left):
            piece = places[place] = opened
            opened += 1
        if piece is not None:
            count = min(block_length, left[piece])
            if count:
                read([piece], count)
            if count < block_length:
                places[place] = None
        place = (place + 1) % cycle_length

    slots.append(len(datasets_read))
    of_segment, first_slot, chosen, before = (
        np.array(values, np.int64) for values in (begins, slots, datasets_read, read_before)
    )

    def at(positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        segment = np.searchsorted(of_segment, positions, side="right") - 1
        turn, place = np.divmod(positions - of_segment[segment], block_length)
        around, slot = np.divmod(turn, first_slot[segment + 1] - first_slot[segment])
        number = first_slot[segment] + slot
        return chosen[number], before[number] + around * block_length + place

    return at
