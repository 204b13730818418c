"""Rows of files, by their index: records of TFRecord, text and tar files, rows of parquet files.

records = tfmw.data.from_records(files, index_dir="index")     # bytes, one by one
train = records.map(parse).shuffle(100_000).batch(64)

samples = tfmw.data.from_tars(files, index_dir="index")        # {"jpg": bytes, "cls": bytes}

rows = tfmw.data.from_parquet("part-*.parquet", columns=["x", "y"])
train = rows.map(lambda row: (row["x"], row["y"])).shuffle(10_000).batch(64)

records = FileRecords.of(files.interleave(tf.data.TFRecordDataset), Order(index_dir="index"))

A pipeline that joins the records of files has an order that its files determine: that of `flat_map`
or `interleave` over the names, which a shuffle may have moved. With an index of each file, a
position in the pipeline is a record in a file, and a resumed run reads the records that are left.
"""

from __future__ import annotations

import functools
import glob
import logging
import os
import subprocess
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfmw.data import record_index
from tfmw.data.batches import steps_in, without_autograph
from tfmw.data.by_index import from_index, stacked
from tfmw.data.values import INFINITE, Order
from tfmw.errors import UsageError
from tfmw.keras_compat import datasets, rebuilding
from tfmw.keras_compat.rebuilding import FileReader, file_reader
from tfmw.keras_compat.shuffles import ShuffleOrder

logger = logging.getLogger("tfmw")

_TOGETHER = 256  # records of one call of Python
_MANY_FILES = 1_000_000
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
        self._index = [record_index.index_of(path, kind, index_dir) for path in paths]
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


# ---------------------------------------------------------------- pipelines over files


class FileRecords:
    """The records of a pipeline over files.

    Attributes:
        length: number of records of a pass.
        shuffle: of the elements with the files' names; None if they have one order.
    """

    def __init__(
        self,
        reader: FileReader,
        shuffle: tf.data.Dataset | None,
        files: Sequence[Sequence[str]],
        order: Order,
    ):
        paths = [path for of_element in files for path in of_element]
        self._reader = reader
        self._records = Records(paths, reader.kind, order.index_dir)
        self._cycle_length = reader.cycle_length or order.cycle_length(reader.calls)
        # Of each element: its first record, and their number.
        ends = np.cumsum([len(of_element) for of_element in files])
        counts = np.concatenate([[0], np.cumsum(self._records.counts)])
        begins = counts[np.concatenate([[0], ends[:-1]])]
        self._begins = np.minimum(begins + reader.skip, counts[ends])
        self._counts = counts[ends] - self._begins
        self.shuffle = shuffle
        self.length = int(self._counts.sum())

    @classmethod
    def of(cls, node: tf.data.Dataset, order: Order) -> FileRecords | None:
        """None for other pipelines, and for files that have no index."""
        found = _files_of(node)
        try:
            return None if found is None else cls(*found, order)
        except (UsageError, OSError) as error:
            logger.info("the files of the dataset have no index of their records: %s", error)
            return None

    def numbers(self, seeds: Sequence[int] | None) -> Callable[[np.ndarray], np.ndarray]:
        """A function of positions in the pipeline -> numbers of records, of one pass.

        Args:
            seeds: of this pass of `shuffle`.
        """
        elements: np.ndarray = np.arange(len(self._counts))
        if self.shuffle is not None and seeds is not None:
            buffer_size = datasets.buffer_size_of(self.shuffle)
            blocks = ShuffleOrder(buffer_size, len(elements), seeds).blocks(0)
            elements = np.concatenate(list(blocks))
        block_length = self._reader.block_length
        order = InterleaveOrder(self._counts[elements], self._cycle_length, block_length)

        def numbers(positions: np.ndarray) -> np.ndarray:
            pieces, places = order.at(positions)
            return self._begins[elements[pieces]] + places

        return numbers

    def elements(self, blocks: Callable[[], Iterator[np.ndarray]], count: int) -> tf.data.Dataset:
        """The pipeline's elements for these numbers of records, of which there are `count`."""

        def numbers() -> Iterator[np.ndarray]:
            for block in blocks():
                yield from np.split(block, range(_TOGETHER, len(block), _TOGETHER))

        def read(chosen: tf.Tensor) -> tf.Tensor:
            records = tf.numpy_function(self._records.many, [chosen], tf.string, stateful=False)
            return tf.ensure_shape(records, [None])

        spec = tf.TensorSpec([None], tf.int64)
        records = tf.data.Dataset.from_generator(numbers, output_signature=spec).map(
            without_autograph(read), num_parallel_calls=2, deterministic=True
        )
        elements = records.unbatch().apply(tf.data.experimental.assert_cardinality(count))
        for function in self._reader.maps:
            elements = rebuilding.rebuilt(function, elements)
        return elements


def _files_of(
    node: tf.data.Dataset,
) -> tuple[FileReader, tf.data.Dataset | None, list[list[str]]] | None:
    """(the reader, a shuffle of its elements, the files of each element); None for others."""
    reader = file_reader(node)
    if reader is None:
        return None
    names, shuffle = reader.input, None
    while isinstance(names, (*datasets.Same, *datasets.Shuffle)):
        if isinstance(names, datasets.Shuffle):
            if shuffle is not None:
                return None
            shuffle = names
        names = datasets.dataset_inputs(names)[0]
    length = steps_in(names)
    if length in (None, INFINITE, 0) or length > _MANY_FILES:
        return None
    if not rebuilding.may_be_read_twice(names):
        return None
    of_elements = names.map(reader.names)
    files = [[os.fsdecode(name) for name in each.numpy()] for each in of_elements]
    return reader, shuffle, files


def index_in_background(dataset: tf.data.Dataset, index_dir: str) -> list[subprocess.Popen[bytes]]:
    """Makes the indices that a run will need when it resumes; returns the processes."""
    started = []
    for node in datasets.every_node(dataset):
        if (found := _files_of(node)) is not None:
            reader, _, files = found
            paths = [path for of_element in files for path in of_element]
            started.append(record_index.make_in_background(paths, reader.kind, index_dir))
    return [process for process in started if process is not None]


class Sources:
    """The `FileRecords` of a pipeline's nodes, each of them made once."""

    def __init__(self, order: Order):
        self._of = functools.cache(functools.partial(FileRecords.of, order=order))

    def __getitem__(self, node: tf.data.Dataset) -> FileRecords | None:
        return self._of(node)

    def length(self, node: tf.data.Dataset) -> int | None:
        """`steps_in`, with the lengths of pipelines over files."""
        chain = []
        while (length := steps_in(node)) is None:
            if (records := self[node]) is not None:
                length = records.length
                break
            known = (*rebuilding.REBUILDABLE, *datasets.PaddedBatch)
            if not (isinstance(node, known) or datasets.is_memory_cache(node)):
                return None
            chain.append(node)
            node = datasets.dataset_inputs(node)[0]
        if not chain or length == INFINITE:
            return length
        others = tf.data.Dataset.range(length)  # as many elements, whatever they are
        for above in reversed(chain):
            if isinstance(above, (*datasets.Batch, *datasets.PaddedBatch)):
                arguments = datasets.batch_arguments(above)
                if arguments is None:
                    return None
                others = others.batch(*arguments)
            elif isinstance(above, (*datasets.Take, *datasets.Skip, *datasets.Repeat)):
                others = rebuilding.rebuilt(above, others)
        return steps_in(others)


class InterleaveOrder:
    """The order of tf.data's interleave, computed for any positions of one pass.

    It reads `cycle_length` datasets in turns, `block_length` elements in each
    (tensorflow/core/kernels/data/interleave_dataset_op.cc). A dataset that ends in its turn gives
    its place to the next one of the input, which is read in the next turn of that place. Between
    two ends the order is regular, so it is kept as one segment.

        order = InterleaveOrder([10, 7, 12], cycle_length=2, block_length=1)
        pieces, places = order.at(np.arange(20, 29))

    Args:
        lengths: of each dataset.
        cycle_length: number of datasets that are read in turns.
        block_length: number of elements of a turn.
    """

    def __init__(self, lengths: Sequence[int], cycle_length: int, block_length: int):
        self._block = block_length
        self._begins: list[int] = []  # of each segment, its first position
        self._slots: list[int] = []  # and its first place in the two lists below
        self._piece: list[int] = []  # the datasets that are read in turns
        self._read: list[int] = []  # how many of their elements were read before
        self.length = 0
        self._run([int(length) for length in lengths], cycle_length)
        self._arrays = [
            np.array(values, np.int64)
            for values in (self._begins, [*self._slots, len(self._piece)], self._piece, self._read)
        ]

    def at(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """int64 [n] positions -> (int64 [n], their datasets; int64 [n], positions in those)."""
        begins, slots, piece, read = self._arrays
        segment = np.searchsorted(begins, positions, side="right") - 1
        offset = positions - begins[segment]
        first = slots[segment]
        turn, place = np.divmod(offset, self._block)
        around, slot = np.divmod(turn, slots[segment + 1] - first)
        chosen = first + slot
        return piece[chosen], read[chosen] + around * self._block + place

    def _run(self, lengths: list[int], cycle_length: int) -> None:
        places: list[int | None] = [None] * cycle_length
        read = [0] * len(lengths)
        place = opened = 0
        while opened < len(lengths) or any(piece is not None for piece in places):
            turns = [*places[place:], *places[:place]]
            pieces = [piece for piece in turns if piece is not None]
            if len(pieces) == cycle_length or (pieces and opened == len(lengths)):
                around = min((lengths[piece] - read[piece]) // self._block for piece in pieces)
                if around:
                    self._segment(pieces, read, around * self._block)
            piece = places[place]
            if piece is None and opened < len(lengths):
                piece = places[place] = opened
                opened += 1
            if piece is not None:
                count = min(self._block, lengths[piece] - read[piece])
                if count:
                    self._segment([piece], read, count)
                if count < self._block:
                    places[place] = None
            place = (place + 1) % cycle_length

    def _segment(self, pieces: list[int], read: list[int], count: int) -> None:
        """Reads `count` elements of each of these datasets, in turns."""
        self._begins.append(self.length)
        self._slots.append(len(self._piece))
        self._piece.extend(pieces)
        self._read.extend(read[piece] for piece in pieces)
        for piece in pieces:
            read[piece] += count
        self.length += count * len(pieces)
