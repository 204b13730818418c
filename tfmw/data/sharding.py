"""A global dataset -> this worker's shard of it.

    sharding = Sharding(workers=2, rank=0)
    shard = shard_dataset(dataset, sharding, Order(seed=7))
    for element in shard.dataset:
        parts, counts, total = step_of(element, sharding)  # this worker's parts of a global batch

Every example goes to exactly one replica, each global batch is the union of the replicas' parts,
and all workers make the same number of steps. Example j of a global batch goes to replica j mod R
(R replicas, `Sharding.replicas`), so the k-th global batch is the same for any number of workers. A
replica without an example gets a copy of a real one, which does not count.

There are five ways to shard, the cheapest first:

* `below_maps` of indices: for arrays and `from_index`, where nothing is mapped before `batch`. The
  pipeline has indices in place of examples, and a worker copies or reads its own examples only.
* `below_maps` of examples: for a pipeline that ends in `batch`, with only maps, shuffles, repeats,
  takes and skips between its source and the batch. A map does not change the positions of
  elements, so examples are selected below the maps: each worker maps only its own examples. A
  worker computes the size of every global batch from the source's cardinality. If that is unknown
  (files, filters, generators), the workers add up their examples at each step.
* `by_slices`: for all other pipelines, and arrays. Every worker runs the whole pipeline and keeps
  its rows of each global batch; `step_of` selects those of small batches within the step.
* `by_batches`: if batches are not to be split. Batch j goes to replica j mod R, and R batches make
  a step, whose examples the workers add up.
* `shard_function`: for a callable that takes a `tf.distribute.InputContext` and returns the
  pipeline of that worker, batched per replica. Workers may have different amounts of data. `tfds`
  returns such a callable, with which each worker opens only its own files.

All but the last need the same order of elements on all workers: see `order.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfmw.data.batches import (
    examples_of,
    first_rows,
    global_batch_size,
    input_of,
    steps_in,
    without_autograph,
    without_optionals,
)
from tfmw.data.below_maps import Batched, below_maps
from tfmw.data.comparison import refuse_own_elements
from tfmw.data.seek import ordered_from
from tfmw.data.values import INFINITE, Order, Shard, Sharding
from tfmw.data.whole_batches import by_batches, by_slices, of_one_replica, step_of
from tfmw.keras_compat import datasets, rebuilding


def shard_dataset(
    dataset: tf.data.Dataset,
    sharding: Sharding,
    order: Order,
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
        read_ahead: whether a batch may be read before it is asked for.
        split: whether batches are divided between replicas.

    Raises:
        UsageError: the dataset is not batched, or workers have different datasets.
    """
    refuse_own_elements(dataset, sharding)
    dataset = without_optionals(dataset)
    alone = sharding.replicas == 1
    whole = Batched.of(dataset) if split or alone else None
    shard: Shard | None = None
    # One replica gains by it only if it reads the rows of a batch in one call.
    if whole is not None and not (alone and whole.rows is None):
        shard = below_maps(whole, sharding, order, skip)
    if shard is None:
        pipeline, reshuffles = ordered_from(dataset, order, skip)
        if alone:
            shard = of_one_replica(pipeline, read_ahead)
        elif split:
            shard = by_slices(pipeline, sharding, read_ahead)
        else:
            shard = by_batches(pipeline, sharding, global_batch_size(dataset))
        shard = dataclasses.replace(shard, reshuffles=reshuffles)
    if shard.reshuffles:
        shard.reshuffles.ahead = rebuilding.may_begin_again(dataset)
        shard.reshuffles.begun_after = _repetitions(dataset)
    return shard


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


def _repetitions(dataset: tf.data.Dataset) -> Callable[[int], int] | None:
    """Steps -> repetitions begun of the upper `repeat` of a pipeline.

    None if there is none, or if its length is unknown.
    """
    per_step, node = 1, dataset
    above = (*datasets.Map, *datasets.Batch, *datasets.Same)
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
    local = shard_dataset(dataset, sharding, Order())
    batches = local.dataset.flat_map(
        without_autograph(lambda *element: _one_by_one(*step_of(element, sharding)[:2]))
    )
    has_examples = without_autograph(lambda *b: examples_of(b) > 0)
    return batches.filter(has_examples) if local.size_known else batches.take_while(has_examples)


def _one_by_one(parts: tuple[Any, ...], counts: tf.Tensor) -> tf.data.Dataset:
    """A dataset of the examples that count of each part."""
    own = [first_rows(part, counts[d]) for d, part in enumerate(parts)]
    out = tf.data.Dataset.from_tensors(own[0])
    for part in own[1:]:
        out = out.concatenate(tf.data.Dataset.from_tensors(part))
    return out
