"""Small helpers for batches and pipelines: sizes, empty batches, parts of a batch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from tfmw.data.values import Sharding

# tfmw's own functions on batches have no Python control flow to convert. Each conversion would take
# about 0.1 s, also after each restart.
without_autograph = tf.autograph.experimental.do_not_convert

# Options of a `map` that calls its function in several threads, and keeps the order.
IN_PARALLEL: dict[str, Any] = {"num_parallel_calls": tf.data.AUTOTUNE, "deterministic": True}


@functools.lru_cache(maxsize=64)
def kept_trace(function: Callable[..., Any], *settings: Any) -> Callable[..., Any]:
    """The function (*batches) -> `function(*settings, *batches)`, traced once for equal specs.

    Later pipelines use the trace again. To trace the division of a batch takes 0.1 to 0.2 s. That
    was half of the time from a later call of `fit` to its first step.

    Args:
        settings: values with a hash; for equal ones, the function is the same.
    """
    traced = tf.function(functools.partial(function, *settings), autograph=False)

    @without_autograph
    def call(*batches: Any) -> Any:
        return traced.get_concrete_function(*batches)(*batches)

    return call


def map_elements(
    dataset: tf.data.Dataset, function: Callable[[Any], Any], **options: Any
) -> tf.data.Dataset:
    """`dataset.map` of a function that gets each element as one argument.

    map() passes the members of a tuple one by one, so the arguments for `x` and `(x,)` are the
    same. If x is itself a tuple, Keras would treat its members as inputs and labels.
    """
    if type(dataset.element_spec) is tuple:
        return dataset.map(without_autograph(lambda *element: function(element)), **options)
    return dataset.map(without_autograph(lambda element: function(element)), **options)


def without_optionals(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """The same elements, with None for each `tf.experimental.Optional`.

    Keras's adapters put empty optionals where a generator yields None, and Keras's steps treat them
    as None, too.
    """
    if not any(isinstance(spec, tf.OptionalSpec) for spec in tf.nest.flatten(dataset.element_spec)):
        return dataset

    def leaf(value: Any) -> Any:
        return None if isinstance(value, tf.experimental.Optional) else value

    return map_elements(dataset, lambda element: tf.nest.map_structure(leaf, element))


def map_tensors(function: Callable[[Any], Any], structure: Any) -> Any:
    """Applies `function` to each tensor (or spec) of a structure; None stays None."""
    return tf.nest.map_structure(lambda t: None if t is None else function(t), structure)


def tensors_of(batch: Any) -> list[Any]:
    """The tensors (or specs) of a structure, without None."""
    return [leaf for leaf in tf.nest.flatten(batch) if leaf is not None]


def with_nones(spec: Any, tensors: Iterable[Any]) -> Any:
    """The inverse of `tensors_of`, for a structure with the same None as `spec`."""
    left = iter(tensors)
    leaves = [None if leaf is None else next(left) for leaf in tf.nest.flatten(spec)]
    return tf.nest.pack_sequence_as(spec, leaves)


def examples_of(batch: Any) -> tf.Tensor:
    """int64 [], the number of examples in a batch."""
    return rows_of(tensors_of(batch)[0])


def rows_of(tensor: Any) -> tf.Tensor:
    """int64 [], the leading dimension of a dense, ragged or sparse tensor."""
    if isinstance(tensor, tf.RaggedTensor):
        return tensor.nrows(out_type=tf.int64)
    if isinstance(tensor, tf.SparseTensor):
        return tensor.dense_shape[0]
    return tf.shape(tensor, out_type=tf.int64)[0]


def rows_from(tensor: Any, start: int, step: int) -> Any:
    """Rows start, start + step, ... of a tensor; the first row if there are none of them.

    A tensor without rows stays without rows.
    """
    rows = rows_of(tensor)
    begin = tf.where(start < rows, np.int64(start), np.int64(0))
    end = tf.where(start < rows, rows, tf.minimum(rows, 1))
    if isinstance(tensor, tf.Tensor):
        return tensor[begin:end:step]
    return gather_rows(tensor, tf.range(begin, end, step))


def parts_of(batch: Any, sharding: Sharding) -> tuple[tuple[Any, ...], tf.Tensor]:
    """A global batch -> (a shard for each local replica, int64 [L], its number of examples).

    Example i goes to replica i mod R; a replica without an example gets a copy of the first one.
    """
    total = examples_of(batch)
    if sharding.replicas == 1:
        return (batch,), total[None]
    parts = tuple(
        map_tensors(functools.partial(rows_from, start=replica, step=sharding.replicas), batch)
        for replica in sharding.local
    )
    return parts, sharding.counts(total)


def parts_and_total(sharding: Sharding, batch: Any) -> tuple[Any, tf.Tensor, tf.Tensor]:
    """A global batch -> (a shard for each local replica, int64 [L], int64 [])."""
    return *parts_of(batch, sharding), examples_of(batch)


def own_parts(
    sharding: Sharding, size: int, count: int | None, number: tf.Tensor, batch: Any
) -> tuple[Any, tf.Tensor, tf.Tensor]:
    """This worker's examples of global batch `number` -> `parts_and_total` of that batch.

    Args:
        size: number of examples of a whole global batch.
        count: number of examples of all global batches; None if each is whole.
    """
    total = tf.constant(size, tf.int64)
    if count is not None:
        total = tf.minimum(total, count - number * size)
    parts, _ = parts_of(batch, Sharding(local_replicas=sharding.local_replicas))
    return parts, sharding.counts(total), total


def first_rows(tensors: Any, count: tf.Tensor) -> Any:
    """The first `count` (integer []) rows of each tensor of a structure."""
    return map_tensors(
        lambda t: (
            gather_rows(t, tf.range(tf.cast(count, tf.int64)))
            if isinstance(t, tf.SparseTensor)
            else t[:count]
        ),
        tensors,
    )


def gather_rows(tensor: Any, rows: tf.Tensor) -> Any:
    """Rows of a dense, ragged or sparse tensor.

    Args:
        rows: int64 [n], distinct row indices, in the order of the result.
    """
    if not isinstance(tensor, tf.SparseTensor):
        return tf.gather(tensor, rows)
    count = tf.size(rows, out_type=tf.int64)
    # The place of each row of the tensor in the result, -1 where it has none.
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


def zeros(spec: Any, rows: int) -> Any:
    """A batch of zeros of this spec; unknown dimensions have size `rows` (0 or 1), too."""

    def leaf(s: Any) -> Any:
        if isinstance(s, tf.RaggedTensorSpec) and s.ragged_rank:
            flat = tf.zeros([0, *[d or rows for d in s.shape[s.ragged_rank + 1 :]]], s.dtype)
            splits: list[np.ndarray] = [
                np.zeros([n + 1], np.int64) for n in (rows, *[0] * (s.ragged_rank - 1))
            ]
            return tf.RaggedTensor.from_nested_row_splits(flat, splits)
        shape = [rows, *[d or rows for d in s.shape[1:]]]
        if isinstance(s, tf.SparseTensorSpec):
            no_indices: np.ndarray = np.zeros([0, s.shape.rank], np.int64)
            return tf.SparseTensor(no_indices, tf.zeros([0], s.dtype), shape)
        return tf.zeros(shape, s.dtype)

    return map_tensors(leaf, spec)


def filled(steps: tf.data.Dataset, spec: Any, whole: bool = False) -> tf.data.Dataset:
    """Replaces empty shards by the first row of the last shard that had examples.

    A model may check its inputs, and rely on dimensions that its batches determine. Before the
    first example the shards have zeros.

    Args:
        steps: elements (parts, counts): a batch for each local replica, and int64 [L].
        spec: spec of a batch.
        whole: whether empty shards get all rows of that shard.
    """

    def step(state: tuple[Any, ...], element: tuple[tuple[Any, ...], tf.Tensor]) -> Any:
        parts, counts = element
        last: list[Any] = tf.nest.pack_sequence_as(
            tensors_of(parts[0]), state, expand_composites=True
        )
        out = []
        for part in parts:
            some, own = examples_of(part) > 0, tensors_of(part)
            now = [_either(some, *pair) for pair in zip(own, last, strict=True)]
            out.append(with_nones(spec, now))
            rows = own if whole else [rows_from(tensor, 0, _FIRST_ONLY) for tensor in own]
            last = [_either(some, *pair) for pair in zip(rows, last, strict=True)]
        return _components(last), (tuple(out), counts)

    first = [zeros(leaf, 1) for leaf in tensors_of(spec)]
    return steps.scan(_components(first), without_autograph(step))


def _components(tensors: list[Any]) -> tuple[tf.Tensor, ...]:
    """Dense tensors that make up these tensors."""
    return tuple(tf.nest.flatten(tensors, expand_composites=True))


_FIRST_ONLY = 1 << 62  # a step larger than any number of rows


def _either(condition: tf.Tensor, one: Any, other: Any) -> Any:
    """Selects one of two tensors, which may differ in their number of rows."""
    out = tf.cond(condition, lambda: one, lambda: other)
    if isinstance(out, tf.Tensor):
        out.set_shape([None, *one.shape[1:]])
    return out


def configured(
    dataset: tf.data.Dataset,
    *,
    in_order: bool = True,
    tuned: bool = True,
    read_ahead: bool | None = True,
) -> tf.data.Dataset:
    """The dataset with options, in one node.

    Args:
        in_order: whether parallel transformations keep the order of their input.
        tuned: whether tf.data measures the dataset to tune it. The end of an iterator waits for the
            tuning: 17 ms on one core. A pass over small arrays takes a few.
        read_ahead: whether a batch may be read before it is requested; None adds nothing.
    """
    options = tf.data.Options()
    if in_order:
        options.deterministic = True
    if not tuned:
        options.autotune.enabled = False
    if read_ahead is False:
        # the default optimizations would read ahead
        options.experimental_optimization.apply_default_optimizations = False
    dataset = dataset.with_options(options)
    return dataset.prefetch(tf.data.AUTOTUNE) if read_ahead else dataset
