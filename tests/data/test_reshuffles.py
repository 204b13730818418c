"""The place of a shuffle in its sequence of orders, read and set without its buffer."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf
from tensorflow.python.data.util import random_seed as data_random_seed

from tests.helpers.cases import every
from tests.helpers.threads import in_threads
from tfmw.compat import datasets
from tfmw.compat.pipelines import Pipeline
from tfmw.compat.shuffles import ShuffleSeeds
from tfmw.data.reshuffles import small_of

LENGTH, BUFFER = 2000, 500


def of_user() -> tf.data.Dataset:
    return tf.data.Dataset.range(LENGTH).shuffle(8, seed=4).shuffle(BUFFER, seed=3)


def of_shard() -> tf.data.Dataset:
    return Pipeline.of(of_user()).on(tf.data.Dataset.range(LENGTH), [5, 6])


def orders(dataset: tf.data.Dataset, passes: int) -> list[list[int]]:
    batches = dataset.batch(LENGTH)  # quicker to read than single elements
    return [[int(x) for batch in batches for x in batch.numpy()] for _ in range(passes)]


@pytest.mark.parametrize("make", [of_user, of_shard])
def test_the_place_is_read_and_set_for_the_shuffle_itself(make: Callable[[], Any]) -> None:
    expected = orders(make(), 4)
    shuffle = make()
    seeds = ShuffleSeeds(small_of(shuffle))
    assert seeds.passes == 0
    assert orders(shuffle, 2) == expected[:2]
    assert seeds.passes == 2
    seeds.passes = 1
    inner = shuffle._inputs()[0]
    if Pipeline.of(inner).kind == "shuffle":
        ShuffleSeeds(small_of(inner)).passes = 1
    assert orders(shuffle, 3) == expected[1:]


@pytest.mark.parametrize("make", [of_user, of_shard])
@pytest.mark.parametrize("begun", every(3, [0, 1, 3, 7]))  # some passes are begun, many are set
def test_passes_that_nobody_reads_count(make: Callable[[], Any], begun: int) -> None:
    def number(shuffle: tf.data.Dataset) -> None:
        seeds = ShuffleSeeds(small_of(shuffle))
        seeds.passes = begun
        seeds.begin(2)
        assert seeds.passes == begun + 2

    expected = orders(make(), begun + 3)
    shuffle = make()
    number(shuffle)
    if Pipeline.of(shuffle._inputs()[0]).kind == "shuffle":
        number(shuffle._inputs()[0])
    assert orders(shuffle, 1) == expected[begun + 2 :]


@pytest.mark.parametrize("make", [of_user, of_shard])
def test_a_state_has_no_part_for_each_place_in_the_buffer(make: Callable[[], Any]) -> None:
    small = small_of(make())
    states = tf.raw_ops.SerializeIterator(
        resource_handle=iter(small)._iterator_resource, external_state_policy=0
    )
    assert len(states) < 10


def test_the_generators_of_many_shuffles_are_found_without_a_warning(caplog):
    """TensorFlow warns of a function that is made anew for each call."""
    handles = [datasets.generator_of(datasets.small_shuffle((1, 2))) for _ in range(6)]
    assert {handle.dtype for handle in handles} == {tf.resource}
    assert "retracing" not in caplog.text


def test_shuffles_built_by_several_threads_leave_tensorflow_s_seeds_alone() -> None:
    others: list[list[int]] = []
    source = tf.data.Dataset.range(LENGTH)
    of_tensorflow = data_random_seed.get_seed

    def build(rank: int) -> None:
        for _ in range(20):
            built = datasets.shuffled(source, BUFFER, [rank, 1], True)
            others.append([*(Pipeline.of(built).seeds or ()), rank])

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # threads alternate within each call
    try:
        assert in_threads(4, build) == [None] * 4
    finally:
        sys.setswitchinterval(interval)
    assert len(others) == 80
    assert all(pair == [rank, 1] for *pair, rank in others)
    assert data_random_seed.get_seed is of_tensorflow
    assert Pipeline.of(source.shuffle(BUFFER)).seeds == [0, 0]
