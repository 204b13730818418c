"""Pipelines built again over another source, and what must be known of them before.

dataset = rebuilt(batch_node, rebuilt(shuffle_node, source, seeds=[7, 1]))
"""

from __future__ import annotations

import itertools
from typing import Any

import tensorflow as tf
from tensorflow.python.data.ops import dataset_ops

from tfmw.keras_compat import datasets
from tfmw.keras_compat.file_datasets import file_reader


def is_unordered(node: tf.data.Dataset) -> bool:
    """Whether a parallel map or batch may change the order."""
    return getattr(node, "_deterministic", None) == "false"


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
        return source.map(datasets.map_function(node), **parallel)
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
    """Whether a part of a pipeline might shuffle or reorder, so that its graph must be read."""
    for node in datasets.every_node(dataset):
        if isinstance(node, datasets.Shuffle) or is_unordered(node) or not is_plain(node):
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
