"""Pipelines over files of records, by the index of a record: to begin in their middle.

    records = FileRecords.of(files.interleave(tf.data.TFRecordDataset), Order(index_dir="index"))

Such a pipeline has an order that its files determine: that of `flat_map` or `interleave` over the
names, which a shuffle may have moved. With an index of each file, a position in the pipeline is a
record in a file, and a resumed run reads the records that are left.
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
from tfmw.data.interleaving import InterleaveOrder
from tfmw.data.record_files import Records
from tfmw.data.values import INFINITE, Order
from tfmw.errors import UsageError
from tfmw.keras_compat import datasets, rebuilding
from tfmw.keras_compat.file_datasets import FileReader, file_reader
from tfmw.keras_compat.shuffles import ShuffleOrder

logger = logging.getLogger("tfmw")

_TOGETHER = 256  # records of one call of Python
_MANY_FILES = 1_000_000
_TRANSPARENT = (*datasets.Prefetch, *datasets.OptionsNode)


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
    while isinstance(names, (*_TRANSPARENT, *datasets.Shuffle)):
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
        for above in reversed(chain):
            length = _length_above(above, length)
        return length


def _length_above(node: tf.data.Dataset, below: int | None) -> int | None:
    if below is None or below == INFINITE:
        return None
    if isinstance(node, (*datasets.Batch, *datasets.PaddedBatch)):
        arguments = datasets.batch_arguments(node)
        if arguments is None:
            return None
        size, drop_remainder = arguments
        return below // size if drop_remainder else -(-below // size)
    if isinstance(node, (*datasets.Take, *datasets.Skip, *datasets.Repeat)):
        count = datasets.count_of(node)
        if isinstance(node, datasets.Take):
            return below if count < 0 else min(below, count)
        if isinstance(node, datasets.Skip):
            return 0 if count < 0 else max(0, below - count)
        return INFINITE if count < 0 else below * count
    return below
