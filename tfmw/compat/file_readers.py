"""Files of pipelines that concatenate records, in the order in which tf.data reads them.

    reader = file_reader(files.interleave(tf.data.TFRecordDataset, cycle_length=4))

`TFRecordDataset` and `TextLineDataset` of several files are such pipelines too: tf.data builds them
as a `flat_map` or an `interleave` over the names of the files.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.data.ops import (
    flat_map_op,
    from_tensor_slices_op,
    interleave_op,
    readers,
)

from tfmw.compat import datasets

# Readers of several files, and of one file within them.
_SEVERAL = {readers.TFRecordDatasetV2: "tfrecord", readers.TextLineDatasetV2: "text"}
_ONE = {readers._TFRecordDataset: "tfrecord", readers._TextLineDataset: "text"}
_OPS = {"TFRecordDataset", "TFRecordDatasetV2", "TextLineDataset"}


@dataclasses.dataclass(frozen=True)
class FileReader:
    """A pipeline that concatenates the records of files."""

    node: tf.data.Dataset  # the `flat_map` or `interleave`
    names: Callable[..., tf.Tensor]  # for a map over its input: string [k], files of an element
    kind: str  # "tfrecord" or "text"
    skip: int  # number of records skipped at the beginning of each element
    maps: list[tf.data.Dataset]  # maps of single records, the first map first
    # Elements that are read in turns; None for tf.data's default, which depends on the number of
    # cores; see `default_cycle_length`.
    cycle_length: int | None
    block_length: int  # records of a turn

    @property
    def calls(self) -> int | None:
        """Number of parallel calls; None for a sequential `interleave`."""
        calls = getattr(self.node, "_num_parallel_calls", None)
        return None if calls is None else int(tf.get_static_value(calls))

    @property
    def has_one_order(self) -> bool:
        """Whether the order of the records is that of the files on any machine."""
        sequential = flat_map_op._FlatMapDataset, interleave_op._InterleaveDataset
        return isinstance(self.node, sequential) and self.cycle_length is not None

    def on(self, source: tf.data.Dataset, cycle_length: int) -> tf.data.Dataset:
        """The same pipeline over another source of its elements, in a deterministic order."""
        function = self.node._map_func._func
        if isinstance(self.node, flat_map_op._FlatMapDataset):
            return source.flat_map(function)
        calls = self.calls
        if isinstance(self.node, readers.ParallelInterleaveDataset):
            calls = cycle_length  # TensorFlow 1's `interleave` reads that many files at a time
        ordered = None if calls is None else True
        return source.interleave(function, cycle_length, self.block_length, calls, ordered)


def default_cycle_length(calls: int | None) -> int:
    """The cycle length that tf.data chooses on this machine if `interleave` has none."""
    as_it_is = tf.autograph.experimental.do_not_convert
    twice = tf.data.Dataset.range(1 << 14).interleave(
        as_it_is(lambda i: tf.data.Dataset.from_tensors(i).repeat(2)),
        num_parallel_calls=calls,
        deterministic=None if calls is None else True,
    )
    again = twice.enumerate().skip(1).filter(as_it_is(lambda _, i: i == 0))
    (position, _) = next(iter(again))
    return int(position)


def file_reader(node: tf.data.Dataset) -> FileReader | None:
    """The files of a `flat_map`, `interleave`, `TFRecordDataset` or `TextLineDataset`.

    Returns None for other nodes, for compressed files, and for functions that do more than read
    records and map them one by one.
    """
    if not hasattr(node, "_tfmw_file_reader"):  # so that its function is traced only once
        node._tfmw_file_reader = _read_function(getattr(node, "_impl", node))
    reader: FileReader | None = node._tfmw_file_reader
    return reader


def _read_function(node: tf.data.Dataset) -> FileReader | None:
    kind = datasets.kind_of(node)
    if kind not in ("flat_map", "interleave"):
        return None
    if not any(operation.op in _OPS for operation in datasets.map_graph_nodes(node)):
        return None
    cycle_length: int | None = 1
    block_length = 1
    if kind == "interleave":
        cycle_length = int(tf.get_static_value(node._cycle_length))
        cycle_length = None if cycle_length < 0 else cycle_length
        block_length = int(tf.get_static_value(node._block_length))
    if isinstance(node, readers.ParallelInterleaveDataset) and block_length > 1:
        return None  # it has an order of its own
    function, found = node._map_func._func, []

    def names_of(*element: Any) -> tf.Tensor:
        found.append(_records_of(function(*element)))
        return tf.constant([""]) if found[-1] is None else found[-1][0]

    node._input_dataset.map(names_of)
    if found[-1] is None:
        return None
    _, records, skip, maps = found[-1]
    return FileReader(node, names_of, records, skip, maps, cycle_length, block_length)


def _records_of(dataset: Any) -> tuple[tf.Tensor, str, int, list[tf.data.Dataset]] | None:
    """(names, kind, skip, maps) of the dataset of one element, within the function of a node.

    Returns None for datasets that do more than read records and map them.
    """
    skip, maps = 0, []
    while type(dataset) not in (*_SEVERAL, *_ONE):
        kind = datasets.kind_of(dataset)
        if kind == "skip":
            count = tf.get_static_value(dataset._count)
            if count is None or count < 0:
                return None
            skip += int(count)
        elif kind == "map":
            captured = dataset._map_func.function.captured_inputs
            # A map that captures the element cannot be applied to a single record.
            if not datasets.is_pure(dataset) or not all(hasattr(t, "numpy") for t in captured):
                return None
            maps.append(dataset)
        elif kind not in ("prefetch", "options"):
            return None
        (dataset,) = dataset._inputs()
    if type(dataset) in _ONE:
        names = tf.reshape(dataset._filenames, [-1])
        plain = tf.get_static_value(dataset._compression_type) == b""
        return (names, _ONE[type(dataset)], skip, maps[::-1]) if plain else None
    joined, kind = dataset._impl, _SEVERAL[type(dataset)]
    if dataset._compression_type or not isinstance(joined, flat_map_op._FlatMapDataset):
        return None
    source = joined._input_dataset
    if type(source) is not from_tensor_slices_op._TensorSliceDataset:
        return None
    return source._tensors[0], kind, skip, maps[::-1]
