"""Shards of datasets, in one process: arithmetic, and what cannot be divided."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.helpers.cases import cases, every
from tfmw import data
from tfmw.compat.pipelines import Pipeline
from tfmw.data.by_index import Indexed
from tfmw.data.sharding import shard_dataset
from tfmw.data.whole_batches import shard_function
from tfmw.errors import UsageError

SHARDINGS = [(2, 1), (3, 1), (2, 2)]


def _shards(
    dataset: tf.data.Dataset, workers: int, local: int, kept: set[int] | None = None
) -> list[list[list[Any]]]:
    """Step -> replica -> its examples, put together from all workers."""
    steps: list[list[list[Any]]] = []
    for rank in range(workers):
        sharding = data.Sharding(workers, rank, local)
        shard = shard_dataset(dataset, sharding, data.SharedOrder(seed=3))
        for step, element in enumerate(shard.dataset.as_numpy_iterator()):
            parts, counts, total = data.step_of(element, sharding)
            if step == len(steps):
                steps.append([])
            if int(total) < 0 and not any(counts):
                break
            for part, count in zip(parts, counts, strict=True):
                assert len(part) == max(1, count), "one that does not count, and is real"
                assert kept is None or set(np.asarray(part).tolist()) <= kept
                steps[step].append(np.asarray(part)[:count].tolist())
    return [step for step in steps if any(step)]


@pytest.mark.parametrize(("workers", "local"), SHARDINGS)
@pytest.mark.parametrize("sizes", every(2, [(7, 4), (1, 4), (21, 8), (5, 1)]), ids=str)
@pytest.mark.parametrize("kind", ["mapped", "plain", "arrays", "filtered"])
def test_shards_of_a_step_form_its_global_batch(
    workers: int, local: int, sizes: tuple[int, int], kind: str
) -> None:
    examples, batch = sizes
    dataset = tf.data.Dataset.range(examples)
    if kind == "arrays":
        dataset = tf.data.Dataset.from_tensor_slices(np.arange(examples))
    elif kind != "plain":
        dataset = dataset.map(lambda i: i + 100)
    if kind == "filtered":
        dataset = dataset.filter(lambda i: i % 5 != 1)
    dataset = dataset.batch(batch)
    whole = [b.tolist() for b in dataset.as_numpy_iterator()]
    known = kind != "filtered" or examples >= workers * local
    steps = _shards(dataset, workers, local, {i for b in whole for i in b} if known else None)
    assert [sorted(e for part in step for e in part) for step in steps] == whole
    if kind != "filtered":
        # Example j of a global batch is replica j mod R's.
        for step, expected in zip(steps, whole, strict=True):
            assert step == [expected[r :: workers * local] for r in range(workers * local)]


MOVES = {
    "repeat": lambda d: d.repeat(3),
    "shuffle": lambda d: d.shuffle(5).repeat(2),
    "shuffle, seeded": lambda d: d.shuffle(30, seed=4),
    "shuffle, once": lambda d: d.shuffle(30, seed=6, reshuffle_each_iteration=False).repeat(2),
    "cache": lambda d: d.cache().shuffle(30, seed=4).repeat(2),
    "all": lambda d: d.skip(2).shuffle(4, seed=1).repeat(3).take(33).prefetch(2),
}


@pytest.mark.parametrize("skip", cases([2], [0]))
@pytest.mark.parametrize("drop", cases([False], [True]))
@pytest.mark.parametrize("name", every(2, MOVES))
def test_arrays_are_divided_by_indices_as_examples_are(name: str, drop: bool, skip: int) -> None:
    """A worker has the examples, in order, that it has where each of them is walked past."""
    numbers = np.arange(17)
    whole = tf.data.Dataset.from_tensor_slices(({"a": np.eye(17), "b": numbers}, numbers))
    # A map is not seen through.
    alike = whole.map(lambda x, y: (x, y))
    walked, indexed = (MOVES[name](d).batch(5, drop_remainder=drop) for d in (alike, whole))
    assert Indexed.of(Pipeline.of(MOVES[name](whole))) is not None
    for rank in range(3):
        found = []
        for dataset in (walked, indexed):
            shard = shard_dataset(dataset, data.Sharding(3, rank), data.SharedOrder(seed=3), skip)
            facts: list[Any] = [
                shard.steps,
                shard.full,
                shard.last,
                shard.batch_size,
                shard.element_spec,
            ]
            for _ in range(2):  # passes
                batches = [
                    (p[0]["b"][: n[0]].tolist(), p[1][: n[0]].tolist(), int(t))
                    for (p,), n, t in shard.dataset.as_numpy_iterator()
                ]
                facts.append(batches)
            found.append(facts)
        assert found[0] == found[1]
        assert any(rows for rows, _, _ in found[1][-1])


def test_an_order_that_a_cache_keeps_is_walked(tmp_path: Path) -> None:
    whole = tf.data.Dataset.from_tensor_slices(np.arange(8))
    assert Indexed.of(Pipeline.of(whole.take(7).cache().shuffle(8))) is not None
    assert Indexed.of(Pipeline.of(whole.shuffle(8).cache())) is None
    assert Indexed.of(Pipeline.of(whole.cache(str(tmp_path / "cache")))) is None


def test_a_worker_copies_its_own_examples_only(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[list[int]] = []
    gather = tf.gather

    def noted(tensor: Any, indices: Any) -> Any:
        tf.py_function(lambda i: taken.append(i.numpy().tolist()), [indices], [])
        return gather(tensor, indices)

    monkeypatch.setattr(tf, "gather", noted)
    dataset = tf.data.Dataset.from_tensor_slices(np.arange(8)).batch(4)
    shard = shard_dataset(dataset, data.Sharding(2, 1), data.SharedOrder())
    list(shard.dataset)
    assert taken == [[1, 3], [5, 7]]


@pytest.mark.parametrize(("workers", "local"), SHARDINGS)
def test_rows_add_up(workers: int, local: int) -> None:
    for total in range(20):
        rows = [data.Sharding(workers, rank, local).local_rows(total) for rank in range(workers)]
        assert sum(rows) == total


@pytest.mark.parametrize(("workers", "local"), SHARDINGS)
def test_every_example_belongs_to_one_worker_and_as_many_as_its_rows(workers, local) -> None:
    for total in range(20):
        of = [data.Sharding(workers, rank, local) for rank in range(workers)]
        owners = [[rank for rank in range(workers) if of[rank].is_local(i)] for i in range(total)]
        assert all(len(found) == 1 for found in owners)
        for rank in range(workers):
            assert of[rank].local_rows(total) == owners.count([rank])
            assert of[rank].local.start == rank * local
            assert of[rank].replicas == workers * local


def test_sizes_of_the_shards_of_a_batch() -> None:
    assert data.Sharding() == data.Sharding(workers=1, rank=0, local_replicas=1)
    for replicas in (1, 2, 3, 4):
        for total in range(10):
            rows = [len(range(replica, total, replicas)) for replica in range(replicas)]
            sizes = data.ShardSizes.of(total, data.Sharding(replicas))
            assert sizes == data.ShardSizes(uneven=len(set(rows)) > 1, empty=0 in rows)


def _sparse(examples: int) -> tf.SparseTensor:
    return tf.sparse.from_dense(np.eye(examples, dtype="float32"))


@pytest.mark.parametrize(("workers", "local"), SHARDINGS)
@pytest.mark.parametrize("mapped", [False, True], ids=["batch()", "map()"])
def test_sparse_batches_are_divided(workers: int, local: int, mapped: bool) -> None:
    dataset = tf.data.Dataset.from_tensor_slices(_sparse(7)).batch(4)
    dataset = dataset.map(lambda s: s * 1.0) if mapped else dataset
    steps: list[list[list[int]]] = [[], []]
    for rank in range(workers):
        sharding = data.Sharding(workers, rank, local)
        shard = shard_dataset(dataset, sharding, data.SharedOrder())
        for step, element in enumerate(shard.dataset):
            parts, counts, total = data.step_of(element, sharding)
            assert total == [4, 3][step]
            steps[step] += [
                tf.sparse.to_dense(p).numpy().argmax(1).tolist()[:count]
                for p, count in zip(parts, counts, strict=True)
            ]
    replicas = workers * local
    whole = [[0, 1, 2, 3], [4, 5, 6]]
    assert steps == [[batch[r::replicas] for r in range(replicas)] for batch in whole]


@pytest.mark.parametrize(("workers", "local"), [(1, 1), *SHARDINGS])
def test_what_is_none_in_a_batch_stays_none(workers: int, local: int) -> None:
    def batches() -> Any:
        yield np.arange(5.0), tf.experimental.Optional.empty(None)

    spec = (tf.TensorSpec([None]), tf.OptionalSpec(None))
    optional = tf.data.Dataset.from_generator(batches, output_signature=spec)
    left_out = tf.data.Dataset.range(5).map(lambda i: (tf.cast(i, tf.float32), None)).batch(5)
    for dataset in (optional, left_out):
        found: list[float] = []
        for rank in range(workers):
            shard = shard_dataset(dataset, data.Sharding(workers, rank, local), data.SharedOrder())
            assert shard.element_spec[1] is None
            for element in shard.dataset.take(1):
                parts, *_ = data.step_of(element, data.Sharding(workers, rank, local))
                assert all(part[1] is None for part in parts)
                found += [float(x) for part in parts for x in part[0]]
        assert sorted(found) == list(range(5))


def _read(shard: data.Shard) -> list[tuple[Any, Any]]:
    """(parts, counts) of each step, until one has no example."""
    steps = []
    for parts, counts, _ in shard.dataset:
        if not np.any(counts):
            break
        steps.append((parts, counts.numpy()))
    return steps


@pytest.mark.parametrize("examples", [12, 10, 1])
def test_replicas_of_a_process_share_one_reading_of_a_function_that_shuffles(examples: int) -> None:
    def read(_: tf.distribute.InputContext) -> tf.data.Dataset:
        return tf.data.Dataset.range(examples).shuffle(examples).batch(2)

    shard = shard_function(read, data.Sharding(local_replicas=2))
    for _ in range(3):
        found = [
            int(x)
            for parts, counts in _read(shard)
            for part, count in zip(parts, counts, strict=True)
            for x in part[:count]
        ]
        assert sorted(found) == list(range(examples))


@pytest.mark.parametrize("local", [2, 3])
def test_batches_that_are_taken_whole_may_have_none_and_ragged_tensors(local: int) -> None:
    ragged = tf.ragged.constant([[1, 2], [3], [], [4, 5, 6], [7]])
    rows = tf.data.Dataset.from_tensor_slices((ragged, tf.range(5)))
    batches = rows.batch(1).map(lambda x, y: ({"x": x, "no": None}, y, None))
    sharding = data.Sharding(local_replicas=local)
    for shard in (
        shard_dataset(batches, sharding, data.SharedOrder(), split=False),
        shard_function(lambda _: batches, sharding),
    ):
        found = []
        for parts, counts in _read(shard):
            for (inputs, y, weights), count in zip(parts, counts, strict=True):
                assert inputs["no"] is None
                assert weights is None
                if count:
                    found.append((inputs["x"].to_list(), y.numpy().tolist()))
        assert found == [
            ([[1, 2]], [0]),
            ([[3]], [1]),
            ([[]], [2]),
            ([[4, 5, 6]], [3]),
            ([[7]], [4]),
        ]


def _zipped(first: int, second: int, examples: int = 8) -> tf.data.Dataset:
    """Batches of two lengths: labelled and unlabelled examples, say."""
    a, b = tf.data.Dataset.range(examples), tf.data.Dataset.range(100, 120)
    return tf.data.Dataset.zip((a.batch(first), b.batch(second)))


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_batches_of_two_lengths_are_divided_separately(sharding: tuple[int, int]) -> None:
    workers, local = sharding
    replicas = workers * local
    dataset = _zipped(replicas, 2 * replicas, 2 * replicas)
    found: list[list[int]] = [[], []]
    for rank in range(workers):
        shard = shard_dataset(dataset, data.Sharding(workers, rank, local), data.SharedOrder())
        for element in shard.dataset.as_numpy_iterator():
            parts, _, total = data.step_of(element, data.Sharding(workers, rank, local))
            assert total == replicas
            for part in parts:
                assert [len(t) for t in part] == [1, 2]
                found[0].extend(part[0])
                found[1].extend(part[1])
    assert sorted(found[0]) == list(range(2 * replicas))
    assert sorted(found[1]) == list(range(100, min(120, 100 + 4 * replicas)))


@pytest.mark.parametrize("dataset", [_zipped(3, 4), _zipped(4, 2, 9)])
def test_batches_of_two_lengths_that_cannot_be_divided_are_refused(dataset) -> None:
    with pytest.raises(UsageError, match=r"2 replicas cannot divide [31] evenly: batch each part"):
        shard_dataset(dataset, data.Sharding(2, 0), data.SharedOrder())


def test_mapped_batches_of_two_lengths_that_cannot_be_divided_are_refused_when_read() -> None:
    dataset = _zipped(3, 4).map(lambda a, b: (a + 1, b))
    shard = shard_dataset(dataset, data.Sharding(2, 0), data.SharedOrder())
    with pytest.raises(tf.errors.InvalidArgumentError, match="different numbers of examples"):
        next(iter(shard.dataset))


def test_a_dataset_without_batches_is_refused_by_that_name() -> None:
    """Also if only the labels are scalars: the pixels of an image would count as its rows."""
    images = tf.data.Dataset.from_tensor_slices((tf.zeros([5, 8, 8]), tf.zeros([5])))
    with pytest.raises(UsageError, match=r"not batched: .* end it in \.batch\(.*a scalar in el"):
        shard_dataset(images, data.Sharding(2, 0), data.SharedOrder())


class _Batches(keras.utils.PyDataset):
    """Read by threads of Keras's; waits a little for them when an epoch begins."""

    def __init__(self) -> None:
        super().__init__(workers=2)
        self.read = threading.Event()
        self.epochs = 0

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Any:
        self.read.set()
        return np.full((2, 1), float(index))

    def on_epoch_begin(self) -> None:
        self.read.wait(0.3)

    def on_epoch_end(self) -> None:
        self.epochs += 1


def test_skipped_epoch_reads_nothing() -> None:
    batches = _Batches()
    source = data.Source(batches)
    shard = source.shard(data.Sharding(1, 0, 1), data.SharedOrder(seed=3))
    batches.read.clear()  # of the first, for the form of batches
    shard.hooks.skip()
    assert not batches.read.is_set()
    assert batches.epochs == 1


def _arrays(rows: int, width: int) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(np.zeros([rows, width], np.float32))


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize(
    ("dataset", "tuned"),
    [
        (_arrays(64, 8).batch(8), False),
        (_arrays(64, 8).batch(8).shuffle(8).repeat(2), False),
        (_arrays(64, 8).shuffle(64).map(lambda x: x + 1).batch(8), True),
        (_arrays(64, 8).map(lambda x: x, num_parallel_calls=tf.data.AUTOTUNE).batch(8), True),
    ],
)
def test_a_pipeline_without_maps_is_not_tuned(
    dataset: tf.data.Dataset, tuned: bool, replicas: int
) -> None:
    shard = shard_dataset(dataset, data.Sharding(replicas, 0), data.SharedOrder(seed=3))
    assert (shard.dataset.options().autotune.enabled is not False) is tuned


def test_large_parts_of_arrays_are_copied_by_tuned_threads() -> None:
    large = _arrays(8, 1 << 18).batch(8)
    shard = shard_dataset(large, data.Sharding(2, 0), data.SharedOrder(seed=3))
    assert shard.dataset.options().autotune.enabled is not False
