"""Workers that pass different data, because each shards it itself, are refused."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.helpers.cluster import run_cluster
from tfmw.data import Source
from tfmw.errors import UsageError

tfrecord = tf.data.TFRecordDataset


def note(described: list[Any], value: Any) -> list[Any]:
    described.append(json.loads(json.dumps(value)))
    return [value]


def refused(make: Callable[[int], Any]) -> str | None:
    """The error of every worker for what `make(rank)` returns on two of them; None: accepted."""
    described: list[Any] = []
    sources = []
    for rank in range(2):
        made = make(rank)
        source = Source(*made) if isinstance(made, tuple) else Source(made)
        sources.append(source)
        source.refuse_different(functools.partial(note, described))
    errors: set[str | None] = set()
    for source in sources:
        try:
            source.refuse_different(lambda value: described)
            errors.add(None)
        except UsageError as e:
            errors.add(str(e))
    (error,) = errors  # all workers raise, and the same
    return error


def records(folder: Path, name: str, *values: bytes) -> str:
    folder.mkdir(exist_ok=True)
    path = str(folder / name)
    with tf.io.TFRecordWriter(path) as writer:
        for value in values:
            writer.write(value)
    return path


def numbers() -> tf.data.Dataset:
    return tf.data.Dataset.range(20)


def looked_up(table: tf.Tensor) -> tf.data.Dataset:
    return numbers().map(lambda i: tf.gather(table, i)).batch(4)


RANKS = [tf.constant([0, 7], tf.int64), tf.constant([1, 7], tf.int64)]
TABLES = [tf.range(20), tf.range(20, 40)]

DIFFERENT: dict[str, tuple[Callable[[int], Any], str]] = {
    "shard": (lambda rank: numbers().shard(2, rank).batch(4), "index of Shard is 0 on worker 0"),
    "shard below": (
        lambda rank: numbers().shard(2, rank).map(lambda i: i + 1).shuffle(5).batch(4).prefetch(1),
        "index of Shard is 1 on worker 1",
    ),
    "shard of a zipped dataset": (
        lambda rank: tf.data.Dataset.zip((numbers(), numbers().shard(2, rank))).batch(4),
        "index of Shard",
    ),
    "shard in a function": (
        lambda rank: numbers().flat_map(lambda i: tf.data.Dataset.range(4).shard(2, rank)).batch(4),
        r"shard() in a function is [2, 0]",
    ),
    "filter": (
        lambda rank: numbers().filter(lambda i: i % 2 == rank).batch(4),
        "numbers of a filter is [2, 0] on worker 0",
    ),
    "filter by a tensor": (
        lambda rank: numbers().filter(lambda i: i % 2 == RANKS[rank][0]).batch(4),
        "what a function uses",
    ),
    "skip": (lambda rank: numbers().skip(10 * rank).take(10).batch(4), "count of Skip is 0"),
    "arrays": (lambda rank: (np.arange(10.0) + 10 * rank, np.zeros(10)), "an array is"),
    "the order of a few rows": (
        lambda rank: (np.where(np.arange(1000) == 7 + rank, 1.0, 0.0), np.zeros(1000)),
        "an array is",
    ),
    "one label of many": (
        lambda rank: (np.zeros([500, 9]), np.arange(500) % 7 + (np.arange(500) == 77) * rank),
        "an array is [[500], 'int64'",
    ),
    "lengths": (lambda rank: (np.zeros(10 + rank), np.zeros(10 + rank)), "an array is [[10]"),
    "slices": (
        lambda rank: tf.data.Dataset.from_tensor_slices(np.arange(30)[rank::2]).batch(4),
        "tensors of TensorSlice",
    ),
    "an array that a map looks up": (lambda rank: looked_up(TABLES[rank]), "what a function uses"),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_different_data_is_refused_on_every_worker(name: str) -> None:
    make, reason = DIFFERENT[name]
    error = refused(make)
    assert error is not None
    assert "workers have different datasets" in error
    assert reason in error
    assert "InputContext" in error


def test_files_of_each_worker(tmp_path: Path) -> None:
    one, two = records(tmp_path, "part-0", b"a", b"b"), records(tmp_path, "part-1", b"c", b"d")
    error = refused(lambda rank: tfrecord([(one, two)[rank]]).batch(2))
    assert error is not None
    assert "part-0" in error
    assert "part-1" in error
    nested = refused(lambda rank: numbers().flat_map(lambda i: tfrecord((one, two)[rank])).batch(2))
    assert nested is not None
    assert "strings of a function" in nested


def test_files_of_one_name_with_other_content_on_each_host(tmp_path: Path) -> None:
    paths = [records(tmp_path / f"host{i}", "train", b"%d" % i) for i in range(2)]
    assert refused(lambda rank: tfrecord(paths[rank]).batch(2)) is not None


def test_a_copy_of_the_files_on_each_host_is_the_same_data(tmp_path: Path) -> None:
    paths = [records(tmp_path / f"host{i}", "train", b"a", b"b") for i in range(2)]
    assert refused(lambda rank: tfrecord(paths[rank]).batch(2)) is None


def example(*features: tuple[str, bytes]) -> bytes:
    """A serialized Example, its features in the order given."""
    of_bytes = [
        (k, tf.train.Feature(bytes_list=tf.train.BytesList(value=[v]))) for k, v in features
    ]
    body = b"".join(tf.train.Features(feature={k: v}).SerializeToString() for k, v in of_bytes)
    size = len(body)
    return bytes([0x0A, size & 0x7F | 0x80, size >> 7]) + body  # of 128 to 16,383 bytes


@pytest.mark.parametrize("size", [100, 9000])  # below and above the first bytes that are read
def test_hosts_prepare_the_same_examples_with_features_in_another_order(
    tmp_path: Path, size: int
) -> None:
    def refusal(other_label: bytes) -> str | None:
        one = example(("image", bytes(size)), ("label", b"1"))
        two = example(("label", other_label), ("image", bytes(size)))
        assert tf.train.Example.FromString(two).features.feature["image"].bytes_list.value
        paths = [
            records(tmp_path / f"host{i}{other_label!r}", "train", made)
            for i, made in enumerate((one, two))
        ]
        return refused(lambda rank: tfrecord(paths[rank]).batch(2))

    assert refusal(b"1") is None
    assert refusal(b"2") is not None


SAME: dict[str, Callable[[int], Any]] = {
    "a part that all take alike": lambda rank: numbers().shard(10, 3).batch(4),
    "other seeds": lambda rank: numbers().shuffle(5 + rank, seed=rank).batch(4),
    "floats that hosts round differently": lambda rank: np.full(10, 1 / 3 + rank * 1e-6),
    "caches": lambda rank: numbers().cache(f"/nowhere/cache-{rank}").batch(4),
    "how much in parallel": lambda rank: (
        numbers().interleave(lambda i: tf.data.Dataset.range(2), cycle_length=1 + rank).batch(4)
    ),
    "a function of an InputContext": lambda rank: lambda context: numbers().shard(2, rank),
    "other random numbers of a map": lambda rank: (
        numbers().map(lambda i: tf.random.stateless_uniform([], seed=[rank, 0])).batch(4)
    ),
    "types that JSON lacks": lambda rank: (
        np.zeros(3, np.complex64),
        tf.zeros(3, tf.bfloat16),
        np.array(["a", "b", "c"]),
    ),
    "ragged": lambda rank: tf.data.Dataset.from_tensor_slices(tf.ragged.constant([[1], [2, 3]])),
}


@pytest.mark.parametrize("name", SAME)
def test_allowed_differences_are_accepted(name: str) -> None:
    assert refused(SAME[name]) is None


@pytest.mark.process
def test_all_workers_refuse_before_the_first_step() -> None:
    run = run_cluster("sharded_by_user.py", workers=2, status=2)
    for rank in range(2):
        log = run.log(f"worker {rank}")
        assert "index of Shard is 0 on worker 0, index of Shard is 1 on worker 1" in log
        assert "0 steps" in log
        assert run[rank]["examples"] == 10  # the way out: each example is seen once
