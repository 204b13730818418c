"""Small helpers for batches and pipelines: sizes, empty batches, parts of a batch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfmw.data.values import INFINITE, Sharding
from tfmw.keras_compat import datasets

# tfmw's own functions on batches have no Python control flow to convert. Each conversion would take
# about 0.1 s, also after each restart.
without_autograph = tf.autograph.experimental.do_not_convert


def input_of(node: tf.data.Dataset) -> tf.data.Dataset:
    """The dataset that `node` transforms."""
    below = datasets.dataset_input(node)
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


def spec_of(dataset: tf.data.Dataset) -> Any:
    """Structure of tf.TypeSpec, of an element as the model gets it: None for inputs that are."""
    return tf.nest.map_structure(
        lambda spec: None if isinstance(spec, datasets.NoneTensorSpec) else spec,
        dataset.element_spec,
    )


def without_optionals(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """The same elements, with None for each `tf.experimental.Optional`.

    Keras's adapters put empty ones where a generator yields None, and Keras's steps take them for
    None, too.
    """
    if not any(isinstance(spec, tf.OptionalSpec) for spec in tf.nest.flatten(dataset.element_spec)):
        return dataset
    element = element_of(dataset)

    def convert(*arguments: Any) -> Any:
        return tf.nest.map_structure(
            lambda t: None if isinstance(t, tf.experimental.Optional) else t, element(arguments)
        )

    return dataset.map(without_autograph(convert))


def map_tensors(function: Callable[[Any], Any], structure: Any) -> Any:
    """`function` of every tensor (or spec) of a structure; None, an input left out, stays None."""
    return tf.nest.map_structure(lambda t: None if t is None else function(t), structure)


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
        map_tensors(functools.partial(_every_nth, start=d, step=sharding.local_replicas), batch)
        for d in range(sharding.local_replicas)
    )


def _every_nth(tensor: Any, start: int, step: int) -> Any:
    if isinstance(tensor, (tf.RaggedTensor, tf.SparseTensor)):
        return gather_rows(tensor, tf.range(start, rows_of(tensor), step))
    return tensor[start::step]


def gather_rows(tensor: Any, rows: tf.Tensor) -> Any:
    """Rows of a dense, ragged or sparse tensor.

    Args:
        rows: int64 [n], the numbers of the rows, in the order of the result; each once.
    """
    if not isinstance(tensor, tf.SparseTensor):
        return tf.gather(tensor, rows)
    count = tf.size(rows, out_type=tf.int64)
    # Of each row of the tensor its place in the result, -1 where it has none.
    places = tf.fill([tensor.dense_shape[0]], np.int64(-1))
    places = tf.tensor_scatter_nd_update(places, rows[:, None], tf.range(count))
    row_of_value = tf.gather(places, tensor.indices[:, 0])
    kept = row_of_value >= 0
    indices = tf.concat([row_of_value[:, None], tensor.indices[:, 1:]], axis=1)
    out = tf.SparseTensor(
        tf.boolean_mask(indices, kept),
        tf.boolean_mask(tensor.values, kept),
        tf.concat([[count], tensor.dense_shape[1:]], axis=0),
    )
    out.set_shape([None, *tensor.shape[1:]])
    return tf.sparse.reorder(out)


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

    return map_tensors(leaf, spec)


def empty_as_the_last(parts: tf.data.Dataset, spec: Any) -> tf.data.Dataset:
    """The same batches; those without examples get the dimensions of the last one that had some.

    A model may rely on dimensions that its batches choose, as Reshape((-1, 8)) does.

    Args:
        parts: tuples of batches, one for each local replica.
        spec: of a batch.
    """
    chosen = [
        number
        for number, leaf in enumerate(tf.nest.flatten(spec))
        if isinstance(leaf, tf.TensorSpec) and leaf.shape.rank and None in leaf.shape[1:]
    ]
    if not chosen:
        return parts

    def step(last: tuple[tf.Tensor, ...], batches: tuple[Any, ...]) -> Any:
        leaves = [tf.nest.flatten(batch) for batch in batches]
        now = []
        for number, dimensions in zip(chosen, last, strict=True):
            for flat in leaves:
                shape = tf.shape(flat[number], out_type=tf.int64)
                dimensions = tf.where(shape[0] > 0, shape[1:], dimensions)
            for flat in leaves:
                flat[number] = _or_empty(flat[number], dimensions)
            now.append(dimensions)
        packed = [
            tf.nest.pack_sequence_as(batch, flat)
            for batch, flat in zip(batches, leaves, strict=True)
        ]
        return tuple(now), tuple(packed)

    ranks = [tf.nest.flatten(spec)[number].shape.rank for number in chosen]
    before = tuple(tf.zeros([rank - 1], tf.int64) for rank in ranks)
    return parts.scan(before, without_autograph(step))


def _or_empty(tensor: tf.Tensor, dimensions: tf.Tensor) -> tf.Tensor:
    """The tensor, or where it has no rows, one [0, *dimensions]."""
    shape = tf.concat([[np.int64(0)], dimensions], axis=0)
    out = tf.cond(tf.shape(tensor)[0] > 0, lambda: tensor, lambda: tf.zeros(shape, tensor.dtype))
    out.set_shape(tensor.shape)
    return out


def global_batch_size(dataset: tf.data.Dataset) -> int | None:
    """The size of all batches but the last, if the pipeline has a constant one."""
    node: tf.data.Dataset | None = dataset
    while node is not None and isinstance(node, datasets.REBUILDABLE):
        if isinstance(node, datasets.Batch):
            arguments = datasets.batch_arguments(node)
            return None if arguments is None else arguments[0]
        if isinstance(node, datasets.Map):
            break
        node = datasets.dataset_input(node)
    return static_batch_size(spec_of(dataset))


def static_batch_size(spec: Any) -> int | None:
    """The leading dimension of a batch's first tensor, if its spec has one."""
    first = next(s for s in tf.nest.flatten(spec) if s is not None)
    size: int | None = first.shape[0]
    return size


def deterministic(dataset: tf.data.Dataset, read_ahead: bool = True) -> tf.data.Dataset:
    """The dataset with a deterministic order of parallel transformations, and prefetching."""
    options = tf.data.Options()
    options.deterministic = True
    dataset = dataset.with_options(options)
    return dataset.prefetch(tf.data.AUTOTUNE) if read_ahead else dataset
