"""Pipelines over files of records, by the index of a record: to begin in their middle.

    records = FileRecords.of(files.interleave(tf.data.TFRecordDataset), Order(index_dir="index"))

Such a pipeline has an order that its files determine: that of `flat_map` or `interleave` over the
names, which a shuffle may have moved. With an index of each file, a position in the pipeline is a
record in a file, and a resumed run reads the records that are left.

`interleave` reads `cycle_length` datasets in turns, `block_length` elements in each
(tensorflow/core/kernels/data/interleave_dataset_op.cc). A dataset that ends in its turn gives its
place to the next one of the input, which is read in the next turn of that place. Between two ends
the order is regular, so it is kept as one segment.
"""

from __future__ import annotations

import functools
import logging
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import tensorflow as tf

from tfmw.data import record_index
from tfmw.data.batches import steps_in, without_autograph
from tfmw.data.record_files import Records
from tfmw.data.values import INFINITE, Order
from tfmw.errors import UsageError
from tfmw.keras_compat import datasets, rebuilding
from tfmw.keras_compat.rebuilding import FileReader, file_reader
from tfmw.keras_compat.shuffles import ShuffleOrder

logger = logging.getLogger("tfmw")

_TOGETHER = 256  # records of one call of Python
_MANY_FILES = 1_000_000


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
