"""Shards of pipelines that end in `batch`: by indices, or below the maps; see `sharding`."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
import tensorflow as tf

from tfmw.data.batches import (
    deterministic,
    element_of,
    examples_of,
    input_of,
    map_tensors,
    rows_from,
    spec_of,
    steps_in,
    without_autograph,
)
from tfmw.data.by_index import Indexed
from tfmw.data.rows import rows_under
from tfmw.data.seek import ordered_from
from tfmw.data.slices import is_small
from tfmw.data.values import INFINITE, Order, Shard, Sharding, ShardSizes
from tfmw.data.whole_batches import with_unknown_totals
from tfmw.data.zips import joined
from tfmw.keras_compat import datasets, rebuilding


@dataclasses.dataclass(frozen=True)
class Batched:
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
    def of(cls, dataset: tf.data.Dataset) -> Batched | None:
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
            source = rebuilding.rebuilt(selection, source)
        return cls(source, maps[::-1], *arguments, spec_of(node))


def below_maps(
    dataset: tf.data.Dataset, sharding: Sharding, order: Order, skip: int
) -> Shard | None:
    """The shard of a pipeline that ends in `batch`; None for pipelines of `by_slices`."""
    whole = Batched.of(dataset)
    if whole is None:
        return None
    indexed = Indexed.of(whole.source)
    if not whole.maps and indexed is not None:
        return _by_index(whole, indexed, sharding, order, skip)
    size = whole.size
    if size < sharding.replicas:
        return None  # some replicas have no example in any batch: they take others'
    rows = None if indexed is None else indexed.rows
    source = whole.source if indexed is None or rows is None else indexed.indices
    # Whole batches are skipped, so that the other examples keep their positions.
    source, reshuffles = ordered_from(source, order, skip * size)
    count = steps_in(source)
    if count is None and whole.drop_remainder:
        # Only the sum over all workers shows whether the last batch is full.
        return None
    known = count is not None and count != INFINITE and not whole.drop_remainder
    elements = _local_elements(source, size, sharding, count if known else None)
    own = sharding.local_rows(size)
    if rows is not None:
        elements = elements.batch(own).map(without_autograph(rows.examples), **rows.parallel)
        elements = elements.unbatch()
    for function in whole.maps:
        elements = rebuilding.rebuilt(function, elements)
    full = last = ShardSizes.of(size, sharding)
    batches = elements.batch(own, drop_remainder=count is not None and not known)
    if count is None:
        parts = batches.map(
            without_autograph(lambda *b: _alternating(element_of(batches)(b), sharding))
        )
        shard = with_unknown_totals(parts, whole.spec, sharding, size)
        return dataclasses.replace(shard, reshuffles=reshuffles)
    if count == INFINITE:
        steps: int = INFINITE
        totals = tf.data.Dataset.from_tensors(np.int64(size)).repeat()
    else:
        remainder = 0 if whole.drop_remainder else count % size
        last = ShardSizes.of(remainder or size, sharding)
        steps = count // size + (remainder > 0)
        totals = tf.data.Dataset.range(steps).map(
            without_autograph(lambda k: tf.minimum(np.int64(size), count - k * size))
        )

    def divided(batch: Any, total: tf.Tensor) -> Any:
        parts, _ = _alternating(batch, sharding)
        return parts, sharding.counts(total), total

    zipped = tf.data.Dataset.zip((batches, totals)).map(without_autograph(divided))
    return Shard(deterministic(zipped), steps, full, last, whole.spec, size, reshuffles=reshuffles)


def _alternating(batch: Any, sharding: Sharding) -> tuple[tuple[Any, ...], tf.Tensor]:
    """A worker's batch -> (one for each local replica, int64 [L] how many examples each has).

    Example i goes to local replica i mod L; a replica without an example gets the first one.
    """
    replicas = sharding.local_replicas
    total = examples_of(batch)
    counts = tf.stack([(total - d + replicas - 1) // replicas for d in range(replicas)])
    if replicas == 1:
        return (batch,), counts
    parts = tuple(
        map_tensors(functools.partial(rows_from, start=d, step=replicas), batch)
        for d in range(replicas)
    )
    return parts, counts


def _by_index(
    whole: Batched, indexed: Indexed, sharding: Sharding, order: Order, skip: int
) -> Shard:
    """The shard of a pipeline over arrays: a worker copies its own examples only."""
    size = whole.size
    indices, reshuffles = ordered_from(indexed.indices, order, skip * size)
    count = steps_in(indices)
    batches = indices.batch(size, whole.drop_remainder)

    always_full = whole.drop_remainder or count == INFINITE

    def local_batch(indices: tf.Tensor) -> Any:
        total = tf.size(indices, out_type=tf.int64)
        parts = []
        for replica in sharding.local:
            own = rows_from(indices, replica, sharding.replicas)
            if always_full:
                own.set_shape([max(1, len(range(replica, size, sharding.replicas)))])
            parts.append(indexed.examples(own))
        return tuple(parts), sharding.counts(total), total

    last = full = ShardSizes.of(size, sharding)
    steps = steps_in(batches)
    assert count is not None and steps is not None  # noqa: PT018  (of arrays both are known)
    if count != INFINITE and not whole.drop_remainder:
        last = ShardSizes.of(count % size or size, sharding)
    parallel = {} if indexed.rows is None else indexed.rows.parallel
    local = batches.map(without_autograph(local_batch), **parallel)
    tuned = indexed.rows is not None or not is_small(whole.spec, size)
    dataset = deterministic(local, tuned=tuned)
    return Shard(dataset, steps, full, last, whole.spec, size, reshuffles=reshuffles)


def _local_elements(
    source: tf.data.Dataset, size: int, sharding: Sharding, count: int | None
) -> tf.data.Dataset:
    """The elements at this worker's positions of each global batch of `size`.

    Args:
        count: number of elements, if known. A worker without an example in the last batch gets the
            last element.
    """
    last, remainder = divmod(count or 0, size)
    more = bool(remainder) and not sharding.local_rows(remainder)
    last = last * size + remainder - 1
    if size % sharding.replicas == 0 and sharding.local_replicas == 1 and not more:
        return source.shard(sharding.replicas, sharding.rank)

    def is_local(j: tf.Tensor, _: Any) -> tf.Tensor:
        own = sharding.is_local(j % size)
        return own | tf.equal(j, last) if more else own

    local = source.enumerate().filter(without_autograph(is_local))
    return local.map(without_autograph(lambda _, element: element))


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
        if rows_under(node) is not None:
            break
        node = joined(node) or node
        if isinstance(node, datasets.Map) and datasets.is_pure(node):
            maps.append(node)
            lowest_map = (input_of(node), len(selections), len(maps))
        elif isinstance(node, rebuilding.SELECTIONS):
            selections.append(node)
        elif not isinstance(node, (*datasets.Prefetch, *datasets.OptionsNode)):
            break
        node = input_of(node)
    # Selections below the lowest map need not be removed.
    source, number_of_selections, number_of_maps = lowest_map
    return source, selections[:number_of_selections], maps[:number_of_maps]
