"""Facts on pipelines, which one walk finds."""

from __future__ import annotations

import collections
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tfmw import data
from tfmw.compat.pipelines import INFINITE, Pipeline
from tfmw.data.sharding import shard_dataset

N = 10


def _whole() -> tf.data.Dataset:
    numbers = tf.data.Dataset.range(1, 1 + 2 * N, 2).shard(2, 1).skip(1)
    rows = tf.data.Dataset.from_tensor_slices(np.arange(N)).cache()
    pairs = tf.data.Dataset.zip((numbers, rows)).map(lambda a, b: a + b, num_parallel_calls=2)
    shuffled = pairs.shuffle(7, seed=3).repeat(4).take(9)
    return shuffled.batch(2, drop_remainder=True).prefetch(1)


def test_a_pipeline_has_its_kinds_arguments_and_length() -> None:
    pipeline = Pipeline.of(_whole())
    kinds = ["prefetch", "batch", "take", "repeat", "shuffle", "map", "zip", "skip", "shard"]
    assert [node.kind for node in pipeline.nodes] == [
        *kinds,
        "range",
        "cache",
        "_TensorSliceDataset",
    ]
    assert pipeline.length == 4
    assert pipeline.batch_size == 2
    node = {each.kind: each for each in pipeline.nodes}
    assert (node["batch"].size, node["batch"].drop_remainder) == (2, True)
    assert (node["take"].count, node["repeat"].count, node["skip"].count) == (9, 4, 1)
    assert (node["shuffle"].buffer_size, node["shuffle"].reshuffles) == (7, True)
    assert node["shard"].shards == (2, 1)
    assert node["range"].range == (1, 21, 2, tf.int64)
    assert node["map"].is_parallel
    assert node["cache"].is_memory_cache
    assert pipeline.may_reorder
    assert not node["zip"].may_reorder
    assert pipeline.may_begin_again
    assert pipeline.bytes_of_arrays >= 8 * N
    endless = Pipeline.of(tf.data.Dataset.range(2).repeat().batch(3))
    assert (endless.length, endless.input.count) == (INFINITE, -1)
    assert Pipeline.of(tf.data.Dataset.range(9).filter(lambda i: i > 1)).length is None


def test_a_pipeline_is_parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Order, place, division and length are asked of one value."""
    asked: collections.Counter[tf.data.Dataset] = collections.Counter()
    dataset = _whole().shuffle(3).map(lambda x: x + 1)
    own = [each.dataset for each in Pipeline.of(dataset).nodes]
    for kind in {type(each) for each in own}:
        inputs = kind._inputs

        def counted(self: Any, inputs: Any = inputs) -> Any:
            asked[self] += 1
            return inputs(self)

        monkeypatch.setattr(kind, "_inputs", counted)
    above = [each for each in own if Pipeline.of(each).may_reorder]
    assert len(above) > 5
    asked.clear()
    shard_dataset(dataset, data.Sharding(2, 1), data.SharedOrder(seed=3), skip=1)
    assert [asked[each] for each in above] == [1] * len(above)


def test_deep_pipelines_are_parsed_without_recursion() -> None:
    dataset = tf.data.Dataset.range(N)
    for _ in range(700):
        dataset = dataset.skip(0)
    dataset = dataset.shuffle(N).concatenate(tf.data.Dataset.range(3))
    assert len(Pipeline.of(dataset).nodes) == 704
    shard = shard_dataset(dataset.batch(4), data.Sharding(2), data.SharedOrder(seed=1), skip=1)
    assert shard.steps == 3


@pytest.mark.filterwarnings("ignore:.*shuffle_and_repeat")
def test_joined_transformations_are_two() -> None:
    both = tf.data.experimental.shuffle_and_repeat(N, count=2, seed=3)
    dataset = tf.data.Dataset.range(N).apply(both).batch(4)
    first, again = Pipeline.of(dataset), Pipeline.of(dataset)
    assert [node.kind for node in first.nodes] == ["batch", "repeat", "shuffle", "range"]
    assert first.nodes[2].dataset is again.nodes[2].dataset, "which has one place in its orders"
