"""Shards of pipelines that end in `batch`: by indices, or below the maps; see `sharding`."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
import tensorflow as tf

from tfmw.data.batches import (
    beneath,
    deterministic,
    element_of,
    input_of,
    parts_of,
    spec_of,
    steps_in,
    without_autograph,
)
from tfmw.data.by_index import Indexed, Rows, peeled, rows_under
from tfmw.data.reshuffles import Reshuffles
from tfmw.data.seek import ordered_from
from tfmw.data.values import INFINITE, Order, Shard, Sharding, ShardSizes
from tfmw.data.whole_batches import is_small, with_unknown_totals
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
        node = beneath(dataset, datasets.Same)
        if not isinstance(node, datasets.Batch):
            return None
        arguments = datasets.batch_arguments(node)
        if arguments is None:
            return None
        elements = input_of(node)
        # Selections do not depend on the elements and maps do not move them, so all selections may
        # run before all maps. Those below the lowest map need not be removed.
        _, above = peeled(elements, _selects_or_maps)
        while above and not isinstance(above[-1], datasets.Map):
            above.pop()
        source = input_of(above[-1]) if above else elements
        maps = [each for each in above if isinstance(each, datasets.Map)]
        leaves = tf.nest.flatten(source.element_spec)
        if any(isinstance(s, tf.RaggedTensorSpec) for s in leaves):
            # After a map, batch() would make rows of a ragged tensor dense.
            return None
        if not maps and steps_in(elements) is None:
            # Without maps nothing is saved, and unknown totals cost a reduction at each step.
            return None
        for each in reversed(above):
            if isinstance(each, rebuilding.SELECTIONS):
                source = rebuilding.rebuilt(each, source)
        return cls(source, maps[::-1], *arguments, spec_of(node))

    @functools.cached_property
    def indexed(self) -> Indexed | None:
        """The source by indices of examples; None if it has none."""
        return Indexed.of(self.source)

    @property
    def rows(self) -> Rows | None:
        """The source's rows; None of other sources."""
        return None if self.indexed is None else self.indexed.rows

    def shard(
        self, dataset: tf.data.Dataset, count: int, sharding: Sharding, reshuffles: Reshuffles
    ) -> Shard:
        """A shard of this pipeline, of whose source `count` examples are read."""
        full = last = ShardSizes.of(self.size, sharding)
        steps = INFINITE
        if count != INFINITE:
            remainder = 0 if self.drop_remainder else count % self.size
            last = ShardSizes.of(remainder or self.size, sharding)
            steps = count // self.size + (remainder > 0)
        return Shard(dataset, steps, full, last, self.spec, self.size, reshuffles=reshuffles)


def below_maps(whole: Batched, sharding: Sharding, order: Order, skip: int) -> Shard | None:
    """The shard of a pipeline that ends in `batch`; None for pipelines of `by_slices`."""
    indexed, rows = whole.indexed, whole.rows
    if not whole.maps and indexed is not None:
        return _by_index(whole, indexed, sharding, order, skip)
    size = whole.size
    if size < sharding.replicas:
        return None  # some replicas have no example in any batch: they take others'
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
    local = Sharding(local_replicas=sharding.local_replicas)
    if rows is not None:
        elements = elements.batch(own).map(without_autograph(rows.examples), **rows.parallel)
        elements = elements.unbatch()
    for function in whole.maps:
        elements = rebuilding.rebuilt(function, elements)
    batches = elements.batch(own, drop_remainder=count is not None and not known)
    if count is None:
        element = element_of(batches)
        parts = batches.map(without_autograph(lambda *b: parts_of(element(b), local)))
        shard = with_unknown_totals(parts, whole.spec, sharding, size)
        return dataclasses.replace(shard, reshuffles=reshuffles)
    if count == INFINITE:
        totals = tf.data.Dataset.from_tensors(np.int64(size)).repeat()
    else:
        steps = count // size if whole.drop_remainder else -(-count // size)
        totals = tf.data.Dataset.range(steps).map(
            without_autograph(lambda k: tf.minimum(np.int64(size), count - k * size))
        )

    def divided(batch: Any, total: tf.Tensor) -> Any:
        parts, _ = parts_of(batch, local)
        return parts, sharding.counts(total), total

    zipped = tf.data.Dataset.zip((batches, totals)).map(without_autograph(divided))
    return whole.shard(deterministic(zipped), count, sharding, reshuffles)


def _by_index(
    whole: Batched, indexed: Indexed, sharding: Sharding, order: Order, skip: int
) -> Shard:
    """The shard of a pipeline over arrays: a worker copies its own examples only."""
    size = whole.size
    indices, reshuffles = ordered_from(indexed.indices, order, skip * size)
    count = steps_in(indices)
    assert count is not None  # of arrays it is known
    batches = indices.batch(size, whole.drop_remainder)
    always_full = whole.drop_remainder or count == INFINITE

    def local_batch(indices: tf.Tensor) -> Any:
        own, counts = parts_of(indices, sharding)
        for replica, part in zip(sharding.local, own, strict=True):
            if always_full:
                part.set_shape([max(1, len(range(replica, size, sharding.replicas)))])
        return tuple(map(indexed.examples, own)), counts, tf.size(indices, out_type=tf.int64)

    parallel = {} if indexed.rows is None else indexed.rows.parallel
    local = batches.map(without_autograph(local_batch), **parallel)
    tuned = indexed.rows is not None or not is_small(whole.spec, size)
    return whole.shard(deterministic(local, tuned=tuned), count, sharding, reshuffles)


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


def _selects_or_maps(node: tf.data.Dataset) -> bool:
    known = isinstance(node, (*datasets.Map, *rebuilding.MOVES)) and rows_under(node) is None
    return known and datasets.is_pure(node)
