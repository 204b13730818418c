"""Shards of whole batches: of a function of the user's, or not split; see `sharding`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfmw.data.batches import (
    deterministic,
    element_of,
    empty_batch,
    examples_of,
    filled,
    spec_of,
    steps_in,
    without_autograph,
    without_optionals,
)
from tfmw.data.comparison import refuse_own_elements
from tfmw.data.order import reshuffles_of
from tfmw.data.seek import seek
from tfmw.data.slices import of_one_replica
from tfmw.data.values import INFINITE, Order, Shard, Sharding, ShardSizes
from tfmw.errors import UsageError
from tfmw.keras_compat import datasets


def shard_function(
    dataset_fn: Callable[[tf.distribute.InputContext], tf.data.Dataset],
    sharding: Sharding,
    skip: int = 0,
    index_dir: str | None = None,
) -> Shard:
    """The shard that a user's function of an `InputContext` returns.

    Args:
        dataset_fn: returns this worker's pipeline, batched by the batch size of one replica.
        sharding: what the `InputContext` describes.
        skip: number of steps to skip at the beginning.
        index_dir: see `Order`.

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
    if getattr(dataset_fn, "_tfmw_at_most_once", False):
        skip = 0  # the service has no position
    else:
        refuse_own_elements(dataset, Sharding())
    reshuffles = reshuffles_of(dataset)
    own = Order(index_dir=index_dir)  # other workers may have other pipelines
    rest = seek(without_optionals(dataset), skip * sharding.local_replicas, reshuffles, own)
    return dataclasses.replace(_of_function(rest, sharding), reshuffles=reshuffles)


def _of_function(dataset: tf.data.Dataset, sharding: Sharding) -> Shard:
    local_replicas = sharding.local_replicas
    if sharding.replicas == 1:
        return of_one_replica(dataset)
    spec = spec_of(dataset)
    if local_replicas == 1:
        element = element_of(dataset)
        return with_unknown_totals(
            dataset.map(without_autograph(lambda *b: counted((element(b),)))), spec, sharding, None
        )
    empty = tf.data.Dataset.from_tensors(empty_batch(spec)).repeat()
    streams = tuple(
        dataset.shard(local_replicas, d).concatenate(empty) for d in range(local_replicas)
    )
    steps = tf.data.Dataset.zip(streams).map(without_autograph(lambda *parts: counted(parts)))
    some_examples = without_autograph(lambda _, counts: tf.reduce_any(counts > 0))
    return with_unknown_totals(steps.take_while(some_examples), spec, sharding, None)


def counted(parts: tuple[Any, ...]) -> tuple[tuple[Any, ...], tf.Tensor]:
    """(parts, int64 [L] how many examples each has)."""
    return parts, tf.stack([examples_of(part) for part in parts])


def by_batches(dataset: tf.data.Dataset, sharding: Sharding, size: int | None) -> Shard:
    """Each replica takes whole batches, R of which make a step."""
    local, count = sharding.local_replicas, steps_in(dataset)
    spec = spec_of(dataset)
    remainder = 0 if count in (None, INFINITE) else count % sharding.replicas
    # A worker without a batch in the last step gets the last one, which does not count.
    more = 0 < remainder <= sharding.local.start
    last_batch = -1 if count is None else count - 1

    def is_read(j: tf.Tensor, _: Any) -> tf.Tensor:
        own = sharding.is_local(j)
        return own | tf.equal(j, last_batch) if more else own

    def with_count(j: tf.Tensor, batch: Any) -> Any:
        return batch, tf.where(sharding.is_local(j), examples_of(_labels(batch)), 0)

    batches = dataset.enumerate().filter(without_autograph(is_read))
    batches = batches.map(without_autograph(with_count))
    if local == 1:
        steps = batches.map(without_autograph(lambda batch, count: ((batch,), count[None])))
    else:
        others = tf.data.Dataset.from_tensors((empty_batch(spec), np.int64(0))).repeat(local)

        def together(*window: Any) -> Any:
            # A window is a dataset of each tensor; the last one may be short.
            whole = tf.data.Dataset.zip(window).concatenate(others)
            parts, counts = zip(
                *(whole.skip(d).take(1).get_single_element() for d in range(local)), strict=True
            )
            return tuple(parts), tf.stack(counts)

        steps = batches.window(local).map(without_autograph(together))
    shard = with_unknown_totals(steps, spec, sharding, size, whole=True)
    if count is None:
        return shard
    full = ShardSizes(uneven=True, empty=False)
    if count == INFINITE:
        return dataclasses.replace(shard, steps=INFINITE, full=full, last=full)
    last = ShardSizes(uneven=True, empty=remainder > 0)
    steps_of_pass = -(-count // sharding.replicas)
    return dataclasses.replace(shard, steps=steps_of_pass, full=full, last=last)


def _labels(batch: Any) -> Any:
    """The part of a batch with one row for each example: its labels, if it has any."""
    _, y, _ = keras.utils.unpack_x_y_sample_weight(batch)
    return batch if not tf.nest.flatten(y) or y is None else y


def with_unknown_totals(
    steps: tf.data.Dataset, spec: Any, sharding: Sharding, size: int | None, whole: bool = False
) -> Shard:
    """A shard whose totals the replicas add up step by step.

    Args:
        steps: elements (parts, counts).
        whole: whether a replica without an example needs a whole batch.
    """
    local = sharding.local_replicas
    empty: Any = tuple(empty_batch(spec) for _ in range(local)), np.zeros([local], np.int64)
    endless = steps.concatenate(tf.data.Dataset.from_tensors(empty).repeat())
    dataset = filled(endless, spec, whole).map(without_autograph(lambda p, c: (p, c, np.int64(-1))))
    sizes = ShardSizes(uneven=True, empty=True)
    return Shard(deterministic(dataset), None, sizes, sizes, spec, size, size_known=False)
