"""Pipelines built again over another source, and what must be known of them before.

    dataset = rebuilt(batch_node, rebuilt(shuffle_node, source, seeds=[7, 1]))
    reader = file_reader(files.interleave(tf.data.TFRecordDataset, cycle_length=4))

A `FileReader` has the files of a pipeline that reads records, in the order in which tf.data joins
them. `TFRecordDataset` and `TextLineDataset` of several files are such pipelines too: tf.data
builds them as a `flat_map` or an `interleave` over the names of the files.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.data.ops import (
    dataset_ops,
    flat_map_op,
    from_tensor_slices_op,
    interleave_op,
    readers,
)

from tfmw.compat import datasets


def rebuilt(
    node: tf.data.Dataset, source: tf.data.Dataset, seeds: list[int] | None = None
) -> tf.data.Dataset:
    """Applies the transformation of `node` to another `source`, in a deterministic order.

    Args:
        node: a Batch, PaddedBatch, Map, Shuffle, Repeat, Take, Skip, Prefetch or options node.
        seeds: for a shuffle, its pair of seeds; by default those of `node`.
    """
    calls = getattr(node, "_num_parallel_calls", None)
    parallel: dict[str, Any] = {}
    if calls is not None:
        calls = int(tf.get_static_value(calls))
        parallel = {"num_parallel_calls": calls, "deterministic": True}
    if isinstance(node, datasets.Map):
        return source.map(node._map_func._func, **parallel)
    if isinstance(node, datasets.Batch):
        return source.batch(node._batch_size, node._drop_remainder, **parallel)
    if isinstance(node, datasets.PaddedBatch):
        padding = node._padded_shapes, node._padding_values
        return source.padded_batch(node._batch_size, *padding, node._drop_remainder)
    if isinstance(node, datasets.Shuffle):
        pair = (node._seed, node._seed2) if seeds is None else seeds
        small = datasets.small_shuffle(pair) if datasets.reshuffles(node) else None
        shuffle = datasets.shuffled(
            *(source, node._buffer_size, pair, node._reshuffle_each_iteration),
            generator=None if small is None else datasets.generator_of(small),
        )
        shuffle._tfmw_original = datasets.original(node)
        shuffle._tfmw_small = small
        return shuffle
    if isinstance(node, datasets.Repeat):
        return source.repeat(node._count)
    if isinstance(node, datasets.Take):
        return source.take(node._count)
    if isinstance(node, datasets.Skip):
        return source.skip(node._count)
    if isinstance(node, datasets.Prefetch):
        return source.prefetch(int(tf.get_static_value(node._buffer_size)))
    if isinstance(node, datasets.OptionsNode):
        return source.with_options(node.options())
    raise TypeError(f"cannot rebuild {type(node).__name__}")


SELECTIONS = (*datasets.Shuffle, *datasets.Repeat, *datasets.Take, *datasets.Skip)

MOVES = (*SELECTIONS, *datasets.Same)
"""Nodes that do not look at elements."""

REBUILDABLE = (*datasets.Batch, *datasets.Map, *MOVES)

# Sources and transformations without a dataset inside a function, and without random numbers.
_PLAIN = {
    "_TensorSliceDataset",
    "_TensorDataset",
    "_RangeDataset",
    "_FilterDataset",
    "_ZipDataset",
    "_ConcatenateDataset",
    "CacheDataset",
    "_CacheDataset",
    "_ShardDataset",
    "_PaddedBatchDataset",
    "_TakeWhileDataset",
    "_UnbatchDataset",
    "_WindowDataset",
    "_RaggedTensorDataset",
}


def is_plain(node: tf.data.Dataset) -> bool:
    """Whether a node has no random numbers but a shuffle's, and functions only that are known.

    Those are the functions of maps, and of what joins the records of files.
    """
    known = isinstance(node, REBUILDABLE) or type(node).__name__ in _PLAIN
    return known or file_reader(node) is not None


def is_tunable(dataset: tf.data.Dataset) -> bool:
    """Whether tf.data can make a pipeline faster while it runs, as by more threads for maps."""
    return any(
        isinstance(node, datasets.Map) or not is_plain(node) or file_reader(node) is not None
        for node in datasets.every_node(dataset)
    )


def may_shuffle_inside(dataset: tf.data.Dataset) -> bool:
    """Whether a pipeline's graph must be read: it may shuffle, reorder, or write a file."""
    for node in datasets.every_node(dataset):
        unordered = getattr(node, "_deterministic", None) == "false"  # a parallel map or batch
        in_file = isinstance(node, datasets.Cache) and not datasets.is_memory_cache(node)
        if isinstance(node, datasets.Shuffle) or unordered or in_file or not is_plain(node):
            return True
        reader = file_reader(node)
        if reader is not None and not reader.has_one_order:
            return True
    return False


def may_begin_again(dataset: tf.data.Dataset) -> bool:
    """Whether a pipeline may begin a shuffle of its own again, or later than at its first element.

    Then it depends on how far a pipeline has read ahead.
    """
    todo = [(dataset, False)]
    while todo:
        node, again = todo.pop()
        plain = is_plain(node)
        again |= isinstance(node, datasets.Repeat) or not plain or "Concat" in type(node).__name__
        if again and isinstance(node, datasets.Shuffle):
            return True
        again &= not isinstance(node, datasets.Cache)  # which reads its input once
        inputs = datasets.dataset_inputs(node)
        if not inputs and not plain:
            return True  # only its graph shows what is in it
        todo.extend((each, again) for each in inputs)
    return False


def selects_at_random(dataset: tf.data.Dataset) -> str | None:
    """The transformation whose choice of elements each process draws for itself; None without one.

    Random values of a `map` are no choice. Functions inside of a `flat_map` are not read.
    """
    for node in datasets.every_node(dataset):
        for wrapper in () if isinstance(node, datasets.Map) else node._functions():
            bodies = datasets.function_bodies(wrapper)
            if "FlatMap" in type(node).__name__ or "Interleave" in type(node).__name__:
                del bodies[1:]
            for op in itertools.chain(*bodies):
                if "seed2" in op.attr and not (op.attr["seed"].i or op.attr["seed2"].i):
                    return type(node).__name__.strip("_").removesuffix("Dataset")
    return None


def may_be_read_twice(dataset: tf.data.Dataset) -> bool:
    """Whether another pass has no effect: no Python functions, variables and random numbers."""
    for node in datasets.every_node(dataset):
        is_known = datasets.dataset_inputs(node) or isinstance(node, dataset_ops.DatasetSource)
        if isinstance(node, datasets.Shuffle) or not is_known:
            return False
    changing = ("PyFunc", "Shuffle", "Random", "Assign", "Generator", "Cache", "Multinomial")
    bodies = (body for bodies, _ in datasets.dataset_functions(dataset) for body in bodies)
    return not any(part in op.op for body in bodies for op in body for part in changing)


def bytes_of_arrays(dataset: tf.data.Dataset) -> int:
    """The bytes of the arrays of a pipeline, which its graph contains."""
    tensors = [tensor for _, _, tensor in datasets.dataset_constants(dataset)]
    for node in datasets.every_node(dataset):
        for wrapper in node._functions():
            tensors += wrapper.function.captured_inputs
    known = (t for t in tensors if hasattr(t, "numpy") and t.dtype not in (tf.variant, tf.resource))
    return sum(t.shape.num_elements() * t.dtype.size for t in known)


# ---------------------------------------------------------------- files of records

# Of several files, and of one file within them.
_SEVERAL = {readers.TFRecordDatasetV2: "tfrecord", readers.TextLineDatasetV2: "text"}
_ONE = {readers._TFRecordDataset: "tfrecord", readers._TextLineDataset: "text"}
_OPS = {"TFRecordDataset", "TFRecordDatasetV2", "TextLineDataset"}

_FLAT_MAP = (flat_map_op._FlatMapDataset,)

_INTERLEAVES = (
    interleave_op._InterleaveDataset,
    interleave_op._ParallelInterleaveDataset,
    readers.ParallelInterleaveDataset,
)


_as_it_is = tf.autograph.experimental.do_not_convert


@dataclasses.dataclass(frozen=True)
class FileReader:
    """A pipeline that joins the records of files."""

    node: tf.data.Dataset  # the `flat_map` or `interleave`
    names: Callable[..., tf.Tensor]  # of a map over `input`: string [k], the files of an element
    kind: str  # "tfrecord" or "text"
    skip: int  # records that are left out at the beginning of each element's
    maps: list[tf.data.Dataset]  # for single records, the first one first
    # Elements that are read in turns; None for tf.data's default, which depends on the number of
    # cores; see `default_cycle_length`.
    cycle_length: int | None
    block_length: int  # records of a turn

    @property
    def input(self) -> tf.data.Dataset:
        """The pipeline of elements with the names of files."""
        return self.node._input_dataset

    @property
    def calls(self) -> int | None:
        """The number of parallel calls; None for a sequential `interleave`."""
        calls = getattr(self.node, "_num_parallel_calls", None)
        return None if calls is None else int(tf.get_static_value(calls))

    @property
    def has_one_order(self) -> bool:
        """Whether the order of the records is that of the files on any machine."""
        is_sequential = isinstance(self.node, (*_FLAT_MAP, interleave_op._InterleaveDataset))
        return is_sequential and self.cycle_length is not None

    def rebuilt(self, source: tf.data.Dataset, cycle_length: int) -> tf.data.Dataset:
        """The same pipeline over another source of its elements, in a deterministic order."""
        function = self.node._map_func._func
        if isinstance(self.node, _FLAT_MAP):
            return source.flat_map(function)
        calls = self.calls
        if isinstance(self.node, readers.ParallelInterleaveDataset):
            calls = cycle_length  # of TensorFlow 1: it reads that many files at a time
        ordered = None if calls is None else True
        return source.interleave(function, cycle_length, self.block_length, calls, ordered)


def file_reader(node: tf.data.Dataset) -> FileReader | None:
    """The files of a `flat_map`, `interleave`, `TFRecordDataset` or `TextLineDataset`.

    None for other nodes, for compressed files, and for functions that do more than read records
    and map them one by one.
    """
    if not hasattr(node, "_tfmw_file_reader"):
        node._tfmw_file_reader = _file_reader(node)
    reader: FileReader | None = node._tfmw_file_reader
    return reader


def default_cycle_length(calls: int | None) -> int:
    """The cycle length that tf.data chooses on this machine, where `interleave` has none."""
    twice = tf.data.Dataset.range(1 << 14).interleave(
        _as_it_is(lambda i: tf.data.Dataset.from_tensors(i).repeat(2)),
        num_parallel_calls=calls,
        deterministic=None if calls is None else True,
    )
    again = twice.enumerate().skip(1).filter(_as_it_is(lambda _, i: i == 0))
    (position, _) = next(iter(again))
    return int(position)


def _file_reader(node: tf.data.Dataset) -> FileReader | None:
    if type(node) in _SEVERAL:
        node = node._impl
    if not isinstance(node, (*_FLAT_MAP, *_INTERLEAVES)):
        return None
    if not any(operation.op in _OPS for operation in datasets.map_graph_nodes(node)):
        return None
    cycle_length: int | None = 1
    block_length = 1
    if not isinstance(node, _FLAT_MAP):
        cycle_length = int(tf.get_static_value(node._cycle_length))
        cycle_length = None if cycle_length < 0 else cycle_length
        block_length = int(tf.get_static_value(node._block_length))
    if isinstance(node, readers.ParallelInterleaveDataset) and block_length > 1:
        return None  # in an order of its own
    function, found = node._map_func._func, []

    def names_of(*element: Any) -> tf.Tensor:
        found.append(_records_of(function(*element)))
        return tf.constant([""]) if found[-1] is None else found[-1][0]

    node._input_dataset.map(names_of)
    if found[-1] is None:
        return None
    _, kind, skip, maps = found[-1]
    return FileReader(node, names_of, kind, skip, maps, cycle_length, block_length)


def _records_of(node: Any) -> tuple[tf.Tensor, str, int, list[tf.data.Dataset]] | None:
    """(names, kind, skip, maps) of the dataset of one element, within the function of a node.

    None for datasets that do more than read records and map them.
    """
    skip, maps = 0, []
    while type(node) not in (*_SEVERAL, *_ONE):
        if isinstance(node, datasets.Skip):
            count = tf.get_static_value(node._count)
            if count is None or count < 0:
                return None
            skip += int(count)
        elif isinstance(node, datasets.Map):
            captured = node._map_func.function.captured_inputs
            # What depends on the element is not known for a record alone.
            if not datasets.is_pure(node) or not all(hasattr(t, "numpy") for t in captured):
                return None
            maps.append(node)
        elif not isinstance(node, datasets.Same):
            return None
        node = datasets.dataset_input(node)
    if type(node) in _ONE:
        names = tf.reshape(node._filenames, [-1])
        plain = tf.get_static_value(node._compression_type) == b""
        return (names, _ONE[type(node)], skip, maps[::-1]) if plain else None
    joined, kind = node._impl, _SEVERAL[type(node)]
    if node._compression_type or not isinstance(joined, _FLAT_MAP):
        return None
    source = joined._input_dataset
    if type(source) is not from_tensor_slices_op._TensorSliceDataset:
        return None
    return source._tensors[0], kind, skip, maps[::-1]
