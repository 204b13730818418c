"""A global dataset -> this worker's shard of it.

    sharding = Sharding(workers=2, rank=0)
    shard = shard_dataset(dataset, sharding, SharedOrder(seed=7))
    for element in shard.dataset:
        parts, counts, total = step_of(element, sharding)  # this worker's parts of a global batch

Every example goes to exactly one replica, and each global batch is the union of the replicas'
shards. All workers make the same number of steps. Example j of a global batch goes to replica j mod
R, if there are R replicas (`Sharding.replicas`). So the k-th global batch is the same for any
number of workers. A replica without an example gets a copy of a real one, which does not count.

There are four ways to shard, the cheapest first:

* `below_maps`: for a pipeline that ends in `batch`. Between its source and the batch it has only
  maps, shuffles, repeats, takes and skips. A map does not change the positions of elements, so
  examples are selected below the maps: each worker maps only its own examples. Indices replace a
  source that has an index (arrays, `from_index`). So a worker copies or reads only its own
  examples, those of a batch together. A worker computes the size of every global batch from the
  source's cardinality. If that is unknown (files, filters, generators), the workers add up their
  examples at each step.
* `by_slices`: for all other pipelines, and arrays. Every worker runs the whole pipeline and keeps
  its rows of each global batch; `step_of` selects those of small batches within the step.
* `by_batches`: if batches must not be split. Batch j goes to replica j mod R, and R batches make a
  step, whose examples the workers add up.
* `shard_function`: for a callable that takes a `tf.distribute.InputContext` and returns the
  pipeline of that worker, batched per replica. Workers may have different amounts of data. `tfds`
  returns such a callable, with which each worker opens only its own files.

All but the last need the same order of elements on all workers: see `order.py`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfmw.compat.pipelines import INFINITE, MOVES, SAME, SELECTIONS, Pipeline
from tfmw.data.batches import (
    configured,
    examples_of,
    first_rows,
    kept_trace,
    map_elements,
    own_parts,
    parts_of,
    without_autograph,
    without_optionals,
)
from tfmw.data.by_index import Indexed, Rows, peeled, rows_under
from tfmw.data.comparison import refuse_own_elements
from tfmw.data.seek import ordered_from
from tfmw.data.values import Shard, Sharding, ShardSizes, SharedOrder
from tfmw.data.whole_batches import (
    by_batches,
    by_slices,
    is_small,
    of_one_replica,
    step_of,
    with_unknown_totals,
)


def shard_dataset(
    dataset: tf.data.Dataset,
    sharding: Sharding,
    order: SharedOrder,
    skip: int = 0,
    read_ahead: bool = True,
    split: bool = True,
) -> Shard:
    """The shard of a dataset that is batched by the global batch size.

    Args:
        dataset: elements are batches: structures of tensors with one leading dimension.
        sharding: how global batches are divided.
        order: the source of the seeds of shuffles.
        skip: number of global batches to skip at the beginning.
        read_ahead: whether a batch may be read before it is requested.
        split: whether batches are divided between replicas.

    Raises:
        UsageError: the dataset is not batched, or workers have different datasets.
    """
    pipeline = Pipeline.of(without_optionals(dataset))
    refuse_own_elements(pipeline, sharding)
    read, size, shard_of = _cheapest_way(pipeline, sharding, read_ahead, split)
    rest, reshuffles = ordered_from(read, order, skip * size)
    shard = shard_of(rest)
    shard.reshuffles = reshuffles
    if reshuffles:
        reshuffles.ahead = pipeline.may_begin_again
        reshuffles.begun_after = _repetitions(pipeline)
    return shard


_Way = tuple[Pipeline, int, Callable[[Pipeline], Shard]]
"""A pipeline to read, the number of its elements in a global batch, the shard of its rest."""


def _cheapest_way(pipeline: Pipeline, sharding: Sharding, read_ahead: bool, split: bool) -> _Way:
    alone = sharding.replicas == 1
    whole = Batched.of(pipeline) if split or alone else None
    # A single replica gains only if it reads the rows of a batch in one call.
    if whole is not None and not (alone and whole.rows is None):
        if (way := below_maps(whole, sharding)) is not None:
            return way
    if alone:
        return pipeline, 1, lambda rest: of_one_replica(rest, read_ahead)
    if split:
        return pipeline, 1, lambda rest: by_slices(rest, sharding, read_ahead)
    return pipeline, 1, lambda rest: by_batches(rest, sharding, pipeline.batch_size, read_ahead)


def at_most_once(
    dataset: tf.data.Dataset,
) -> Callable[[tf.distribute.InputContext], tf.data.Dataset]:
    """A dataset of tf.data's service, with the promise of the service in place of tfmw's.

        served = files.apply(distribute("parallel_epochs", "grpc://...", job_name="train"))
        tfmw.fit(model, tfmw.data.at_most_once(served), epochs=5)

    Each worker trains on batches that the service gives to it. A lost worker of the service takes
    its elements with it, a resumed run begins a new pass, and the order differs in each run.

    Args:
        dataset: batched by the batch size of one replica; with a `job_name`, so that workers share
            its elements.

    Returns:
        A dataset function, for `fit` and `evaluate`.
    """

    def read(context: tf.distribute.InputContext) -> tf.data.Dataset:
        return dataset

    read._tfmw_at_most_once = True  # type: ignore[attr-defined]
    return read


def _repetitions(pipeline: Pipeline) -> Callable[[int], int] | None:
    """Steps -> number of begun repetitions of the upper `repeat` of a pipeline.

    Returns None if the pipeline has no `repeat`, or if its length is unknown.
    """
    per_step, node = 1, pipeline
    while node.kind in ("map", "batch", *SAME):
        per_step *= node.size if node.kind == "batch" else 1
        node = node.input
    length = node.input.length if node.kind == "repeat" else None
    if length in (None, INFINITE, 0):
        return None
    return lambda steps: steps * per_step // length + 1  # one element is read ahead


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
    local = shard_dataset(dataset, sharding, SharedOrder())
    batches = local.dataset.flat_map(
        without_autograph(lambda *element: _one_by_one(*step_of(element, sharding)[:2]))
    )
    has_examples = without_autograph(lambda *b: examples_of(b) > 0)
    return batches.filter(has_examples) if local.size_known else batches.take_while(has_examples)


def _one_by_one(parts: tuple[Any, ...], counts: tf.Tensor) -> tf.data.Dataset:
    """A dataset of the examples that count in each shard."""
    own = [first_rows(part, counts[d]) for d, part in enumerate(parts)]
    out = tf.data.Dataset.from_tensors(own[0])
    for part in own[1:]:
        out = out.concatenate(tf.data.Dataset.from_tensors(part))
    return out


# ---------------------------------------------------------------- below the maps


@dataclasses.dataclass(frozen=True)
class Batched:
    """The parts of a pipeline that ends in `batch`."""

    source: Pipeline  # single examples before the maps
    maps: list[Pipeline]  # to apply to them, the first one first
    size: int  # number of examples of a global batch
    drop_remainder: bool
    spec: Any  # spec of a batch

    @classmethod
    def of(cls, pipeline: Pipeline) -> Batched | None:
        """The parts of a pipeline; None if sharding below the maps does not pay."""
        batch = pipeline.beneath(SAME)
        if batch.kind != "batch":
            return None
        # Selections do not depend on the elements and maps do not move them, so all selections may
        # run before all maps. Selections below the lowest map need not be removed.
        _, above = peeled(batch.input, _selects_or_maps)
        while above and above[-1].kind != "map":
            above.pop()
        source = above[-1].input if above else batch.input
        maps = [each for each in reversed(above) if each.kind == "map"]
        leaves = tf.nest.flatten(source.dataset.element_spec)
        if any(isinstance(s, tf.RaggedTensorSpec) for s in leaves):
            # After a map, batch() would convert rows of a ragged tensor to dense ones.
            return None
        if not maps and batch.input.length is None:
            # Without maps nothing is saved, and unknown totals cost a reduction at each step.
            return None
        selections = [each for each in reversed(above) if each.kind in SELECTIONS]
        if selections:
            dataset = source.dataset
            for each in selections:
                dataset = each.on(dataset)
            source = Pipeline.of(dataset)
        return cls(source, maps, batch.size, batch.drop_remainder, batch.spec)

    @functools.cached_property
    def indexed(self) -> Indexed | None:
        """The source by indices of examples, if that pays; None if it has no index."""
        indexed = Indexed.of(self.source)
        # Arrays under maps would be copied for the batch, and again for each map.
        return None if indexed is None or (self.maps and indexed.rows is None) else indexed

    @property
    def rows(self) -> Rows | None:
        """The source's rows; None for other sources."""
        return None if self.indexed is None else self.indexed.rows

    def shard(self, dataset: tf.data.Dataset, count: int, sharding: Sharding) -> Shard:
        """A shard of this pipeline, which reads `count` examples of its source."""
        full = last = ShardSizes.of(self.size, sharding)
        steps = INFINITE
        if count != INFINITE:
            remainder = 0 if self.drop_remainder else count % self.size
            last = ShardSizes.of(remainder or self.size, sharding)
            steps = count // self.size + (remainder > 0)
        return Shard(dataset, steps, full, last, self.spec, self.size)


def below_maps(whole: Batched, sharding: Sharding) -> _Way | None:
    """The way to shard a pipeline that ends in `batch`; None for pipelines of `by_slices`."""
    indexed, size = whole.indexed, whole.size
    source = whole.source if indexed is None else indexed.indices
    if source.length is None and (whole.drop_remainder or size < sharding.replicas):
        # Only the sum over all workers shows whether the last batch is full. And replicas without
        # an example in any batch would copy those of others, which that sum would count.
        return None
    return source, size, lambda rest: _by_examples(whole, rest, sharding)


def _by_examples(whole: Batched, rest: Pipeline, sharding: Sharding) -> Shard:
    """The shard of single examples, or of their indices, which are mapped by their own worker."""
    size, count, indexed = whole.size, rest.length, whole.indexed
    always_full = count is not None and (whole.drop_remainder or count == INFINITE)
    own = max(1, sharding.local_rows(size))
    local = Sharding(local_replicas=sharding.local_replicas)
    elements = _local_elements(rest.dataset, size, sharding, None if always_full else count)
    if indexed is not None:
        parallel = {} if indexed.rows is None else indexed.rows.parallel
        indices = elements.batch(own, always_full)
        batches = indices.map(without_autograph(indexed.examples), **parallel)
        elements = batches.unbatch() if whole.maps else batches
    for function in whole.maps:
        elements = function.on(elements)
    if whole.maps or indexed is None:
        elements = elements.batch(own, always_full)
    if count is None:
        parts = map_elements(elements, lambda batch: parts_of(batch, local))
        return with_unknown_totals(parts, whole.spec, sharding, size)
    if always_full and count != INFINITE:
        elements = elements.take(count // size)

    divided = kept_trace(own_parts, sharding, size, None if always_full else count)
    tuned = indexed is None or indexed.rows is not None or not is_small(whole.spec, size)
    return whole.shard(configured(elements.enumerate().map(divided), tuned=tuned), count, sharding)


def _local_elements(
    source: tf.data.Dataset, size: int, sharding: Sharding, count: int | None
) -> tf.data.Dataset:
    """The elements at this worker's positions of each global batch of `size`.

    A worker without any position in a batch gets the first element, and one without a position in
    the last batch the last one. They do not count.

    Args:
        count: number of elements, if known.
    """
    own = sharding.local_rows(size)
    last, remainder = divmod(count or 0, size)
    more = bool(own and remainder) and not sharding.local_rows(remainder)
    last = last * size + remainder - 1
    if size % sharding.replicas == 0 and sharding.local_replicas == 1 and not more:
        return source.shard(sharding.replicas, sharding.rank)

    def is_local(j: tf.Tensor, _: Any) -> tf.Tensor:
        place = j % size
        is_own = sharding.is_local(place) if own else tf.equal(place, 0)
        return is_own | tf.equal(j, last) if more else is_own

    local = source.enumerate().filter(without_autograph(is_local))
    return local.map(without_autograph(lambda _, element: element))


def _selects_or_maps(node: Pipeline) -> bool:
    return node.kind in ("map", *MOVES) and rows_under(node) is None and node.is_pure
