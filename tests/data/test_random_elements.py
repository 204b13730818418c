"""Pipelines whose elements each process would draw for itself, or that a service gives out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import datasets as hugging_face
import numpy as np
import pytest
import tensorflow as tf

from tfmw import data
from tfmw.errors import UsageError

service = tf.data.experimental.service


def _slices() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(np.arange(40)[:, None])


def _scanned(dataset: tf.data.Dataset, seed: int | None = None) -> tf.data.Dataset:
    def add(state: Any, x: Any) -> Any:
        return state, x + tf.random.uniform([], 0, 9, tf.int64, seed=seed)

    return dataset.scan(np.int64(0), add)


REFUSED: dict[str, Callable[[], tf.data.Dataset]] = {
    "Filter": lambda: _slices().filter(lambda x: tf.random.uniform([]) < 0.5).batch(8),
    "Scan": lambda: _scanned(_slices()).map(lambda x: x).batch(8),
    "to_tf_dataset": lambda: hugging_face.Dataset.from_dict({"x": [*range(40)]}).to_tf_dataset(
        batch_size=8, shuffle=True
    ),
}
ACCEPTED: dict[str, Callable[[], tf.data.Dataset]] = {
    "map": lambda: _slices().map(lambda x: x + tf.random.uniform([], 0, 9, tf.int64)).batch(8),
    "seed": lambda: _scanned(_slices(), seed=3).batch(8),
    "stateless": lambda: _slices().filter(
        lambda x: tf.random.stateless_uniform([], [1, x[0]]) < 0.5
    ).batch(8),
    "inside of interleave": lambda: tf.data.Dataset.range(3).interleave(
        lambda i: _slices().map(lambda x: x + tf.random.uniform([], 0, 9, tf.int64))
    ).batch(8),
    "sampled": lambda: tf.data.Dataset.sample_from_datasets(
        [_slices(), _slices()], [0.5, 0.5], seed=1
    ).batch(8),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_random_choice_is_refused_on_several_workers(name: str) -> None:
    source = data.Source(REFUSED[name]())
    with pytest.raises(UsageError, match="random numbers without a seed"):
        source.shard(data.Sharding(2, 1), data.SharedOrder())
    assert source.shard(data.Sharding(), data.SharedOrder())


@pytest.mark.parametrize("name", ACCEPTED)
def test_random_values_and_seeded_choices_are_accepted(name: str) -> None:
    assert data.Source(ACCEPTED[name]()).shard(data.Sharding(2, 1), data.SharedOrder())


def test_a_dataset_of_the_service_needs_a_name_for_its_promise() -> None:
    dispatcher = service.DispatchServer()
    address = dispatcher.target.split("://")[1]
    workers = [
        service.WorkerServer(service.WorkerConfig(dispatcher_address=address)) for _ in range(2)
    ]
    assert len(workers) == dispatcher._num_workers()

    def served() -> tf.data.Dataset:  # each worker has its own, as in a process
        return tf.data.Dataset.apply(
            _slices().batch(4),
            service.distribute(service.ShardingPolicy.DYNAMIC, dispatcher.target, job_name="train"),
        )

    for source in (served().prefetch(2), lambda context: served()):
        with pytest.raises(UsageError, match="at most once"):
            data.Source(source).shard(data.Sharding(), data.SharedOrder())
    shards = []
    for rank in range(2):
        named = data.Source(data.at_most_once(served()))
        shards.append(iter(named.shard(data.Sharding(2, rank), data.SharedOrder(), skip=7).dataset))
    seen: list[int] = []
    for _ in range(6):  # of both together at most 10 have examples
        for shard in shards:
            (part,), counts, _ = next(shard)
            seen += part.numpy()[: int(counts[0]), 0].tolist()
    assert len(seen) == len(set(seen))
    assert set(seen) <= set(range(40))
    assert len(seen) >= 24
