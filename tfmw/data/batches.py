"""Small helpers for batches and pipelines: sizes, empty batches, parts of a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfmw import keras_compat
from tfmw.data.values import INFINITE, Sharding

# tfmw's own functions on batches have no Python control flow to convert. Each conversion would take
# about 0.1 s, also after each restart.
without_autograph = tf.autograph.experimental.do_not_convert


def input_of(node: tf.data.Dataset) -> tf.data.Dataset:
    """The dataset that `node` transforms."""
    below = keras_compat.dataset_input(node)
    assert below is not None, f"{type(node).__name__} transforms one dataset"
    return below


def steps_in(dataset: tf.data.Dataset) -> int | None:
    """The number of elements; INFINITE; None if unknown."""
    cardinality = int(dataset.cardinality())
    if cardinality == tf.data.INFINITE_CARDINALITY:
        return INFINITE
    return None if cardinality < 0 else cardinality


def element_of(dataset: tf.data.Dataset) -> Callable[[tuple[Any, ...]], Any]:
    """A function that restores an element from the arguments into which map() unpacks it.

    map() passes the members of a tuple one by one, so the arguments for `x` and `(x,)` are the
    same. If x is itself a tuple, Keras would treat its members as inputs and labels.
    """
    if type(dataset.element_spec) is tuple:
        return lambda arguments: arguments
    return lambda arguments: arguments[0]


def examples_of(batch: Any) -> tf.Tensor:
    """int64 [], the number of examples in a batch."""
    return rows_of(next(t for t in tf.nest.flatten(batch) if t is not None))


def rows_of(tensor: Any) -> tf.Tensor:
    """int64 [], the leading dimension of a dense, ragged or sparse tensor."""
    if isinstance(tensor, tf.RaggedTensor):
        return tensor.nrows(out_type=tf.int64)
    if isinstance(tensor, tf.SparseTensor):
        return tensor.dense_shape[0]
    return tf.shape(tensor, out_type=tf.int64)[0]


def split_locally(batches: tf.data.Dataset, sharding: Sharding) -> tf.data.Dataset:
    """Each of this worker's batches as a tuple with one batch per local replica."""
    element = element_of(batches)
    return batches.map(without_autograph(lambda *b: local_parts(element(b), sharding)))


def local_parts(batch: Any, sharding: Sharding) -> tuple[Any, ...]:
    """One batch per local replica: example i goes to local replica i mod L."""
    if sharding.local_replicas == 1:
        return (batch,)
    return tuple(
        tf.nest.map_structure(lambda t, d=d: _every_nth(t, d, sharding.local_replicas), batch)
        for d in range(sharding.local_replicas)
    )


def _every_nth(tensor: Any, start: int, step: int) -> Any:
    if isinstance(tensor, tf.RaggedTensor):
        return tf.gather(tensor, tf.range(start, tensor.nrows(), step))
    return tensor[start::step]


def empty_batch(spec: Any) -> Any:
    """An empty batch of this spec."""

    def leaf(s: Any) -> Any:
        if isinstance(s, tf.RaggedTensorSpec):
            flat = tf.zeros([0, *[d or 0 for d in s.shape[s.ragged_rank + 1 :]]], s.dtype)
            splits: list[Any] = [np.zeros([1], np.int64)] * s.ragged_rank
            return tf.RaggedTensor.from_nested_row_splits(flat, splits)
        if isinstance(s, tf.SparseTensorSpec):
            return tf.SparseTensor(
                np.zeros([0, s.shape.rank], np.int64),
                tf.zeros([0], s.dtype),
                [0, *[d or 0 for d in s.shape[1:]]],
            )
        return tf.zeros([0, *[d or 0 for d in s.shape[1:]]], s.dtype)

    return tf.nest.map_structure(leaf, spec)


def global_batch_size(dataset: tf.data.Dataset) -> int | None:
    """The size of all batches but the last, if the pipeline has a constant one."""
    node: tf.data.Dataset | None = dataset
    while node is not None and isinstance(node, keras_compat.REBUILDABLE):
        if isinstance(node, keras_compat.Batch):
            arguments = keras_compat.batch_arguments(node)
            return None if arguments is None else arguments[0]
        if isinstance(node, keras_compat.Map):
            break
        node = keras_compat.dataset_input(node)
    return static_batch_size(dataset.element_spec)


def static_batch_size(spec: Any) -> int | None:
    """The leading dimension of a batch's first tensor, if its spec has one."""
    size: int | None = tf.nest.flatten(spec)[0].shape[0]
    return size


def deterministic(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """The dataset with a deterministic order of parallel transformations, and prefetching."""
    options = tf.data.Options()
    options.deterministic = True
    return dataset.with_options(options).prefetch(tf.data.AUTOTUNE)
