"""A global dataset -> this worker's shard of it.

    shard = shard_dataset(dataset, Sharding(workers=2, rank=0), Order(seed=7))
    for batches, total in shard.dataset: ...     # this worker's part of each global batch

Every example goes to exactly one replica, each global batch is the union of the replicas' parts,
and all workers make the same number of steps. Example j of a global batch goes to replica j mod R
(R replicas, `Sharding.replicas`), so the k-th global batch is the same for any number of workers.

There are four ways to shard, the cheapest first:

* `_by_index`: for arrays, where nothing is mapped between `from_tensor_slices` and `batch`. The
  pipeline has indices in place of examples, and a worker copies its own examples only.
* `_below_maps`: for a pipeline that ends in `batch`, with only maps, shuffles, repeats, takes and
  skips between its source and the batch. A map does not change the positions of elements, so
  examples are selected below the maps: each worker maps only its own examples. A worker computes
  the size of every global batch from the source's cardinality. If that is unknown (files, filters,
  generators), the workers add up their examples at each step.
* `_by_slices`: for all other pipelines, and arrays. Every worker runs the whole pipeline and keeps
  its rows of each global batch.
* `shard_function`: for a callable that takes a `tf.distribute.InputContext` and returns the
  pipeline of that worker, batched per replica. Workers may have different amounts of data. `tfds`
  returns such a callable, with which each worker opens only its own files.

The first three need the same order of elements on all workers: see `order.py`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfmw.data.batches import (
    deterministic,
    element_of,
    empty_as_the_last,
    empty_batch,
    examples_of,
    gather_rows,
    global_batch_size,
    input_of,
    local_parts,
    map_tensors,
    rows_of,
    spec_of,
    split_locally,
    static_batch_size,
    steps_in,
    without_autograph,
    without_optionals,
)
from tfmw.data.by_index import Indexed
from tfmw.data.order import ordered, reshuffles_of
from tfmw.data.reshuffles import Repetition
from tfmw.data.values import INFINITE, Order, Shard, Sharding, ShardSizes
from tfmw.errors import UsageError
from tfmw.keras_compat import datasets


def shard_dataset(
    dataset: tf.data.Dataset,
    sharding: Sharding,
    order: Order,
    skip: int = 0,
    read_ahead: bool = True,
) -> Shard:
    """The shard of a dataset that is batched by the global batch size.

    Args:
        dataset: elements are batches: structures of tensors with one leading dimension.
        sharding: how global batches are divided.
        order: the source of the seeds of shuffles.
        skip: number of global batches to skip at the beginning.
        read_ahead: whether a batch may be read before it is asked for.

    Raises:
        UsageError: the dataset is not batched, or workers have different datasets.
    """
    dataset = without_optionals(dataset)
    shard = _divided(dataset, sharding, order, skip, read_ahead)
    if shard.reshuffles:
        shard.reshuffles.ahead = datasets.may_begin_again(dataset)
        shard.reshuffles.repetition = _repetition(dataset)
    return shard


def _divided(
    dataset: tf.data.Dataset, sharding: Sharding, order: Order, skip: int, read_ahead: bool
) -> Shard:
    if sharding.replicas == 1:
        whole, reshuffles = ordered(dataset, order)
        return dataclasses.replace(_whole(whole.skip(skip), read_ahead), reshuffles=reshuffles)
    below_maps = _below_maps(dataset, sharding, order, skip)
    if below_maps is not None:
        return below_maps
    whole, reshuffles = ordered(dataset, order)
    shard = _by_slices(whole.skip(skip), sharding, read_ahead)
    return dataclasses.replace(shard, reshuffles=reshuffles)


def _repetition(dataset: tf.data.Dataset) -> Repetition | None:
    """The upper `repeat` of a pipeline; None if there is none, or if its length is unknown."""
    per_step, node = 1, dataset
    above = (*datasets.Map, *datasets.Batch, *datasets.Prefetch, *datasets.OptionsNode)
    while isinstance(node, above):
        if isinstance(node, datasets.Batch):
            arguments = datasets.batch_arguments(node)
            if arguments is None:
                return None
            per_step *= arguments[0]
        node = input_of(node)
    if not isinstance(node, datasets.Repeat):
        return None
    length = steps_in(input_of(node))
    return None if length in (None, INFINITE, 0) else Repetition(length, per_step)


def shard(dataset: tf.data.Dataset, input_context: tf.distribute.InputContext) -> tf.data.Dataset:
    """This worker's shard of a dataset batched by the global batch size.

    For use inside a function of an `InputContext`, where part of a pipeline is global:

        def dataset_fn(context):
            return tfmw.data.shard(global_dataset(), context).map(augment)

    Args:
        dataset: elements are batches: structures of tensors with leading dimension [global batch].
        input_context: the argument of tf.distribute's dataset functions.

    Returns:
        A dataset of batches [about global batch / number of replicas]. The batches of all workers
        together contain each example of `dataset` once. Shuffles without a seed get a fixed one.
    """
    workers = input_context.num_input_pipelines
    local_replicas = max(1, input_context.num_replicas_in_sync // workers)
    sharding = Sharding(workers, input_context.input_pipeline_id, local_replicas)
    local = shard_dataset(dataset, sharding, Order())
    batches = local.dataset.flat_map(without_autograph(lambda parts, total: _one_by_one(parts)))
    has_examples = without_autograph(lambda *b: examples_of(b) > 0)
    return batches.filter(has_examples) if local.size_known else batches.take_while(has_examples)


def _one_by_one(parts: tuple[Any, ...]) -> tf.data.Dataset:
    """A dataset of the members of a tuple."""
    out = tf.data.Dataset.from_tensors(parts[0])
    for part in parts[1:]:
        out = out.concatenate(tf.data.Dataset.from_tensors(part))
    return out


def _whole(dataset: tf.data.Dataset, read_ahead: bool = True) -> Shard:
    """The shard of the only replica."""
    element = element_of(dataset)

    def with_total(*arguments: Any) -> Any:
        batch = element(arguments)
        return (batch,), tf.cast(examples_of(batch), tf.int64)

    batches = dataset.map(without_autograph(with_total))

    even = ShardSizes(uneven=False, empty=False)
    return Shard(
        batches.prefetch(tf.data.AUTOTUNE) if read_ahead else batches,
        steps_in(dataset),
        even,
        even,
        spec_of(dataset),
        global_batch_size(dataset),
    )


# ---------------------------------------------------------------- below the maps


@dataclasses.dataclass(frozen=True)
class _Batched:
    """The parts of a pipeline that ends in `batch`.

    Attributes:
        source: single examples before the maps.
        maps: map nodes to apply to them, the first one first.
        size: number of examples of a global batch.
        drop_remainder: whether a last batch that is not full is dropped.
        spec: of a batch.
    """

    source: tf.data.Dataset
    maps: list[tf.data.Dataset]
    size: int
    drop_remainder: bool
    spec: Any

    @classmethod
    def of(cls, dataset: tf.data.Dataset) -> _Batched | None:
        """The parts; None for other pipelines, and if sharding below the maps does not pay."""
        node = dataset
        while isinstance(node, (*datasets.Prefetch, *datasets.OptionsNode)):
            node = input_of(node)
        if not isinstance(node, datasets.Batch):
            return None
        arguments = datasets.batch_arguments(node)
        if arguments is None:
            return None
        elements = input_of(node)
        source, selections, maps = _peel(elements)
        leaves = tf.nest.flatten(source.element_spec)
        if any(isinstance(s, tf.RaggedTensorSpec) for s in leaves):
            # After a map, batch() would make rows of a ragged tensor dense.
            return None
        if not maps and steps_in(elements) is None:
            # Without maps nothing is saved, and unknown totals cost a reduction at each step.
            return None
        for selection in reversed(selections):
            source = datasets.rebuilt(selection, source)
        return cls(source, maps[::-1], *arguments, spec_of(node))


def _below_maps(
    dataset: tf.data.Dataset, sharding: Sharding, order: Order, skip: int
) -> Shard | None:
    """The shard of a pipeline that ends in `batch`; None for pipelines of `_by_slices`."""
    whole = _Batched.of(dataset)
    if whole is None:
        return None
    if not whole.maps:
        indexed = Indexed.of(whole.source)
        if indexed is not None:
            return _by_index(whole, indexed, sharding, order, skip)
    size = whole.size
    # Whole batches are skipped, so that the other examples keep their positions.
    source, reshuffles = ordered(whole.source, order)
    source = source.skip(skip * size)
    count = steps_in(source)
    if count is None and whole.drop_remainder:
        # Only the sum over all workers shows whether the last batch is full.
        return None
    elements = _local_elements(source, size, sharding)
    for function in whole.maps:
        elements = datasets.rebuilt(function, elements)
    rows = sharding.local_rows(size)
    empty = tf.data.Dataset.from_tensors(empty_batch(whole.spec))
    full = last = ShardSizes.of(size, sharding)
    if count == INFINITE:
        steps: int = INFINITE
        batches = elements.batch(rows, whole.drop_remainder) if rows else empty.repeat()
        totals = tf.data.Dataset.from_tensors(np.int64(size)).repeat()
    else:
        batches = elements.batch(rows) if rows else empty.take(0)
        if count is None:
            parts = split_locally(batches, sharding)
            shard = _with_unknown_totals(parts, whole.spec, sharding, size)
            return dataclasses.replace(shard, reshuffles=reshuffles)
        remainder = 0 if whole.drop_remainder else count % size
        last = ShardSizes.of(remainder or size, sharding)
        steps = count // size + (remainder > 0)
        nonempty = (count // size if rows else 0) + (sharding.local_rows(remainder) > 0)
        if nonempty < steps:
            batches = batches.take(nonempty).concatenate(empty.repeat(steps - nonempty))
        totals = tf.data.Dataset.range(steps).map(
            without_autograph(lambda k: tf.minimum(np.int64(size), count - k * size))
        )
    zipped = tf.data.Dataset.zip((split_locally(batches, sharding), totals))
    return Shard(deterministic(zipped), steps, full, last, whole.spec, size, reshuffles=reshuffles)


def _by_index(
    whole: _Batched, indexed: Indexed, sharding: Sharding, order: Order, skip: int
) -> Shard:
    """The shard of a pipeline over arrays: a worker copies its own examples only."""
    size = whole.size
    indices, reshuffles = ordered(indexed.indices, order)
    indices = indices.skip(skip * size)
    count = steps_in(indices)
    batches = indices.batch(size, whole.drop_remainder)

    def local_batch(indices: tf.Tensor) -> Any:
        positions = tf.range(tf.size(indices, out_type=tf.int64))
        local = tf.boolean_mask(indices, sharding.is_local(positions))
        if whole.drop_remainder or count == INFINITE:
            local.set_shape([sharding.local_rows(size)])
        parts = local_parts(indexed.examples(local), sharding)
        return parts, tf.size(indices, out_type=tf.int64)

    last = full = ShardSizes.of(size, sharding)
    steps = steps_in(batches)
    assert count is not None and steps is not None  # noqa: PT018  (of arrays both are known)
    if count != INFINITE and not whole.drop_remainder:
        last = ShardSizes.of(count % size or size, sharding)
    dataset = deterministic(batches.map(without_autograph(local_batch)))
    return Shard(dataset, steps, full, last, whole.spec, size, reshuffles=reshuffles)


def _local_elements(source: tf.data.Dataset, size: int, sharding: Sharding) -> tf.data.Dataset:
    """The elements at this worker's positions of each global batch of `size`."""
    if size % sharding.replicas == 0 and sharding.local_replicas == 1:
        return source.shard(sharding.replicas, sharding.rank)
    local = source.enumerate().filter(without_autograph(lambda j, _: sharding.is_local(j % size)))
    return local.map(without_autograph(lambda _, element: element))


_SELECTIONS = (
    *datasets.Shuffle,
    *datasets.Repeat,
    *datasets.Take,
    *datasets.Skip,
)


def _peel(
    elements: tf.data.Dataset,
) -> tuple[tf.data.Dataset, list[tf.data.Dataset], list[tf.data.Dataset]]:
    """Removes maps and selections from the end of a pipeline of single examples.

    Returns:
        (the remaining pipeline, the removed selections, the removed maps), the last ones first.
        Selections do not depend on the elements and maps do not move them, so all selections may
        run before all maps.
    """
    selections: list[tf.data.Dataset] = []
    maps: list[tf.data.Dataset] = []
    lowest_map = (elements, 0, 0)
    node = elements
    while True:
        if isinstance(node, datasets.Map) and _same_for_each_element(node):
            maps.append(node)
            lowest_map = (input_of(node), len(selections), len(maps))
        elif isinstance(node, _SELECTIONS):
            selections.append(node)
        elif not isinstance(node, (*datasets.Prefetch, *datasets.OptionsNode)):
            break
        node = input_of(node)
    # Selections below the lowest map need not be removed.
    source, number_of_selections, number_of_maps = lowest_map
    return source, selections[:number_of_selections], maps[:number_of_maps]


def _same_for_each_element(node: tf.data.Dataset) -> bool:
    """Whether a map's result for an element does not depend on the elements before it.

    With a seeded random op it does: in one process its sequence continues from element to element.
    Random ops without a seed differ in every run anyway. Python functions cannot be inspected, and
    are treated as pure.
    """
    for operation in datasets.map_graph_nodes(node):
        if operation.op.startswith("Assign"):
            return False
        if "seed" in operation.attr and "Random" in operation.op:
            if operation.attr["seed"].i or operation.attr["seed2"].i:
                return False
    return True


# ---------------------------------------------------------------- by slices


def _by_slices(dataset: tf.data.Dataset, sharding: Sharding, read_ahead: bool) -> Shard:
    """Every worker runs the whole pipeline and keeps its rows of each global batch."""
    spec = spec_of(dataset)
    for leaf in tf.nest.flatten(spec):
        if leaf is not None and leaf.shape.rank == 0:
            raise UsageError(
                f"the dataset is not batched: its elements are {spec}; end it in "
                ".batch(global_batch_size)."
            )

    _refuse_uneven_zip(dataset, sharding)

    element = element_of(dataset)

    def keep_local_rows(*arguments: Any) -> Any:
        batch = element(arguments)
        total = tf.cast(examples_of(batch), tf.int64)
        local = functools.partial(_local_rows, total=total, sharding=sharding)
        return map_tensors(local, batch), total

    parts = dataset.map(
        without_autograph(keep_local_rows),
        num_parallel_calls=tf.data.AUTOTUNE if read_ahead else None,
        deterministic=True if read_ahead else None,
    )
    pairs = parts.map(without_autograph(lambda batch, total: (local_parts(batch, sharding), total)))
    size = static_batch_size(spec)
    sizes = ShardSizes(True, True) if size is None else ShardSizes.of(size, sharding)
    batch_size = global_batch_size(dataset)
    pairs = deterministic(pairs, read_ahead)
    return Shard(pairs, steps_in(dataset), sizes, sizes, spec, batch_size)


def _local_rows(tensor: Any, total: tf.Tensor, sharding: Sharding) -> Any:
    """This worker's rows of one tensor of a global batch, whose first tensor has `total` rows.

    A batch may have tensors of different lengths, zipped from labelled and unlabelled examples for
    example. Replicas must have equal parts of each, or one weight for their loss would be wrong.
    """
    rows = rows_of(tensor)
    replicas = sharding.replicas
    divisible = (rows % replicas == 0) & (total % replicas == 0)
    check = tf.debugging.Assert((rows == total) | divisible, [_ZIPPED, rows, total, replicas])
    with tf.control_dependencies([check]):
        positions = tf.range(rows)
    return gather_rows(tensor, tf.boolean_mask(positions, sharding.is_local(positions)))


_ZIPPED = (
    "tensors of one batch have different numbers of examples, and the replicas cannot divide each "
    "evenly: batch each part by a multiple of the number of replicas, with drop_remainder=True. "
    "Received, expected at first, replicas:"
)


def _refuse_uneven_zip(dataset: tf.data.Dataset, sharding: Sharding) -> None:
    """Raises before the first step if `_local_rows` would raise in a later one."""
    node = dataset
    while isinstance(node, (*_SELECTIONS, *datasets.Prefetch, *datasets.OptionsNode)):
        node = input_of(node)
    if not isinstance(node, datasets.Zip):
        return
    inputs = datasets.dataset_inputs(node)
    sizes = [global_batch_size(part) for part in inputs]
    if None in sizes or len(set(sizes)) == 1:
        return
    lengths = [steps_in(part) for part in inputs]
    steps = min((length for length in lengths if length not in (None, INFINITE)), default=None)
    for part, size, length in zip(inputs, sizes, lengths, strict=True):
        # zip ends with the shortest part: the last batch of a longer part is not read.
        last = _last_batch(part) if length == steps else None
        for rows in (size, last):
            if rows is not None and rows % sharding.replicas:
                raise UsageError(
                    f"the dataset is zipped from batches of {sizes} examples, and "
                    f"{sharding.replicas} replicas cannot divide {rows} evenly: batch each part by "
                    "a multiple of the number of replicas, with drop_remainder=True."
                )


def _last_batch(dataset: tf.data.Dataset) -> int | None:
    """The size of the last batch; None if unknown."""
    if not isinstance(dataset, datasets.Batch):
        return None
    arguments = datasets.batch_arguments(dataset)
    count = steps_in(input_of(dataset))
    if arguments is None or count is None or count == INFINITE:
        return None
    size, drop_remainder = arguments
    return size if drop_remainder else count % size or size


# ---------------------------------------------------------------- by a function of the user's


def shard_function(
    dataset_fn: Callable[[tf.distribute.InputContext], tf.data.Dataset],
    sharding: Sharding,
    skip: int = 0,
) -> Shard:
    """The shard that a user's function of an `InputContext` returns.

    Args:
        dataset_fn: returns this worker's pipeline, batched by the batch size of one replica.
        sharding: what the `InputContext` describes.
        skip: number of steps to skip at the beginning.

    Raises:
        UsageError: the function returns something else.
    """
    context = tf.distribute.InputContext(
        num_input_pipelines=sharding.workers,
        input_pipeline_id=sharding.rank,
        num_replicas_in_sync=sharding.replicas,
    )
    dataset = dataset_fn(context)
    if not datasets.is_dataset(dataset):
        raise UsageError(
            f"the dataset function returned {type(dataset).__name__}: expected a tf.data.Dataset, "
            "this worker's pipeline, batched by the batch size of one replica."
        )
    shard = _of_function(without_optionals(dataset), sharding, skip)
    return dataclasses.replace(shard, reshuffles=reshuffles_of(dataset))


def _of_function(dataset: tf.data.Dataset, sharding: Sharding, skip: int) -> Shard:
    local_replicas = sharding.local_replicas
    dataset = dataset.skip(skip * local_replicas)
    if sharding.replicas == 1:
        return _whole(dataset)
    spec = spec_of(dataset)
    if local_replicas == 1:
        element = element_of(dataset)
        parts = dataset.map(without_autograph(lambda *b: (element(b),)))
        return _with_unknown_totals(parts, spec, sharding, None)
    empty = tf.data.Dataset.from_tensors(empty_batch(spec)).repeat()
    streams = tuple(
        dataset.shard(local_replicas, d).concatenate(empty) for d in range(local_replicas)
    )
    some_examples = without_autograph(
        lambda *parts: tf.reduce_any([examples_of(p) > 0 for p in parts])
    )
    zipped = tf.data.Dataset.zip(streams).take_while(some_examples)
    parts = zipped.map(without_autograph(lambda *parts: tuple(parts)))
    return _with_unknown_totals(parts, spec, sharding, None)


def _with_unknown_totals(
    parts: tf.data.Dataset, spec: Any, sharding: Sharding, size: int | None
) -> Shard:
    """A shard whose totals the replicas add up step by step."""
    empty = tuple(empty_batch(spec) for _ in range(sharding.local_replicas))
    endless = parts.concatenate(tf.data.Dataset.from_tensors(empty).repeat())
    endless = empty_as_the_last(endless, spec)
    dataset = endless.map(without_autograph(lambda *p: (tuple(p), np.int64(-1))))
    sizes = ShardSizes(uneven=True, empty=True)
    return Shard(deterministic(dataset), None, sizes, sizes, spec, size, size_known=False)
