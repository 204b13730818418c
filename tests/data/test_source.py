"""Arrays as arguments: the batches of Keras, of which a worker copies its own examples only."""

from __future__ import annotations

import dataclasses
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfmw import data
from tfmw.compat import datasets
from tfmw.data.batches import kept_trace, parts_of
from tfmw.data.shuffled_arrays import ShuffledArrays

X = np.arange(14.0).reshape(7, 2)  # float64
Y = np.arange(7)
WORDS = np.array(list("abcdefg"), object)
RAGGED = tf.ragged.range([1, 2, 3, 1, 2, 3, 1])

ARRAYS: dict[str, tuple[Any, ...]] = {
    "one array": (X,),
    "x and y": (X, Y),
    "weights": (X, Y, Y / 7),
    "a list": ([X, Y], Y),
    "a tuple": ((X, Y),),
    "dicts": ({"a": X, "b": {"c": [Y, X]}}, {"out": Y}),
    "weights of several outputs": (X, [Y, Y], Y / 7),
    "tensors": (tf.constant(X), tf.constant(Y)),
    "float16": (X.astype("float16"), Y),
    "strings": (WORDS, Y),
    "nobody's": ({"a": X, "b": None}, Y),
    "ragged": (RAGGED, Y),
    "sparse": (tf.sparse.from_dense(X), Y),
}


def _leaves(batch: Any) -> list[Any]:
    """The tensors of a batch, as lists."""
    found = []
    for leaf in tf.nest.flatten(batch):
        if isinstance(leaf, tf.SparseTensor):
            leaf = tf.sparse.to_dense(leaf)
        if isinstance(leaf, tf.RaggedTensor):
            found.append(leaf.to_list())
        else:
            found.append(None if leaf is None else leaf.numpy().tolist())
    return found


@pytest.mark.parametrize("name", ARRAYS)
def test_batches_and_their_spec_are_those_of_keras(name: str) -> None:
    given = ARRAYS[name]
    x, y, weight = (*given, None, None)[:3]
    source = data.Source(x, y, weight, batch_size=3)
    shard = source.shard(data.Sharding(), data.SharedOrder())
    expected = datasets.data_adapter(x, y, weight, batch_size=3).get_tf_dataset()
    assert shard.steps == 3
    assert shard.element_spec == expected.element_spec or name == "nobody's"
    batches = [parts[0] for parts, *_ in shard.dataset]
    for batch, theirs in zip(batches, expected, strict=True):
        tf.nest.assert_same_structure(batch, theirs)
        assert _leaves(batch) == _leaves(theirs)


def test_a_worker_copies_its_own_examples_of_arrays_only(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[list[int]] = []
    gather = tf.gather

    def noted(tensor: Any, indices: Any, **options: Any) -> Any:
        tf.py_function(lambda i: taken.append(i.numpy().tolist()), [indices], [])
        return gather(tensor, indices, **options)

    monkeypatch.setattr(tf, "gather", noted)
    shard = data.Source(X, batch_size=4).shard(data.Sharding(2, 1), data.SharedOrder())
    assert [int(total) for _, _, total in shard.dataset] == [4, 3]
    assert taken == [[1, 3], [5]]


def _rows(batches: Any) -> list[str]:
    """The rows of batches, each with all of its leaves."""
    leaves = ([leaf for leaf in _leaves(b) if leaf is not None] for b in batches)
    return [str(row) for batch in leaves for row in zip(*batch, strict=True)]


def _passes(shard: data.Shard, start: int = 0, passes: int = 3) -> list[list[Any]]:
    """The parts of this worker that count, of each pass from a batch on."""
    assert shard.rest is not None
    assert shard.steps == 3
    elements = iter(shard.rest(start))
    found: list[list[Any]] = []
    for number in range(start, 3 * passes):
        if number == start or number % 3 == 0:
            found.append([])
        parts, counts, total = next(elements)
        assert int(total) <= 3
        found[-1] += [p for p, n in zip(parts, counts, strict=True) if n]
    return found


@pytest.mark.parametrize("name", ["weights", "dicts", "strings", "nobody's", "ragged", "sparse"])
def test_arrays_that_are_shuffled_without_a_seed(name: str) -> None:
    x, y, weight = (*ARRAYS[name], None, None)[:3]
    source = data.Source(x, y, weight, batch_size=3, shuffle=True)
    theirs = datasets.data_adapter(x, y, weight, batch_size=3).get_tf_dataset()
    order = data.SharedOrder(seed=5)
    alone = source.shard(data.Sharding(), order)
    keras_spec = datasets.data_adapter(x, y, weight, batch_size=3, shuffle=True)
    assert alone.element_spec == keras_spec.get_tf_dataset().element_spec or name == "nobody's"
    passes = [_rows(batches) for batches in _passes(alone)]
    assert [sorted(rows) for rows in passes] == [sorted(_rows(theirs))] * 3
    assert len({str(rows) for rows in passes}) == 3
    shards = [source.shard(data.Sharding(2, rank), order) for rank in range(2)]
    for i, batches in enumerate(zip(*map(_passes, shards), strict=True)):
        assert sorted(row for own in batches for row in _rows(own)) == sorted(passes[i])
    assert _rows(_passes(alone, 4)[0]) == passes[1][3:], "from an index on"
    whole = dataclasses.replace(source, split=False).shard(data.Sharding(), order)
    assert sorted(_rows(parts[0] for parts, *_ in whole.dataset)) == sorted(passes[0])


@pytest.mark.parametrize("shuffle", [True, False])
def test_the_division_of_other_arrays_of_a_size_is_not_traced_again(
    shuffle: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    traced = []

    def noted(*arguments: Any) -> Any:
        traced.append(1)
        return parts_of(*arguments)

    def rows(array: np.ndarray, seed: int) -> list[Any]:
        source = data.Source(array, batch_size=3, shuffle=shuffle)
        shard = source.shard(data.Sharding(2, 1), data.SharedOrder(seed=seed))
        return [parts[0].numpy().tolist() for parts, *_ in shard.dataset.take(2)]

    monkeypatch.setattr("tfmw.data.batches.parts_of", noted)
    kept_trace.cache_clear()
    first = rows(Y, 5)
    assert rows(Y + 10, 5) == [[row + 10 for row in rows] for rows in first]
    assert (rows(Y, 6) != first) == shuffle
    assert len(traced) == 1
    kept_trace.cache_clear()


def test_orders_of_shuffled_arrays_are_fair() -> None:
    counts: np.ndarray = np.zeros([10, 10], int)
    arrays = ShuffledArrays(
        lambda i: i, 10, 10, within_batches=False, order=tf.constant(1, tf.int64)
    )
    indices = tf.function(arrays.indices)
    for number in range(2000):
        counts[np.arange(10), indices(tf.constant(number, tf.int64)).numpy()] += 1
    assert counts.min() > 150  # 200 each; 3.7 standard deviations
    assert counts.max() < 250


@pytest.mark.parametrize("order", [tf.constant(5, tf.int64), tf.constant([3, 0, 6, 2, 5, 1, 4, 7])])
@pytest.mark.parametrize("within_batches", [False, True])
@pytest.mark.parametrize("count", [8, 7, 5])  # the last batch: whole, odd, less than replicas
def test_shards_of_shuffled_arrays_are_parts_of_their_batches(
    count: int, within_batches: bool, order: tf.Tensor
) -> None:
    order = tf.cast(order[:count] if order.shape.rank else order, tf.int64)
    arrays = ShuffledArrays(lambda i: i, count, 4, within_batches, order)
    for rank in range(3):
        sharding = data.Sharding(3, rank)
        for number, (parts, counts, total) in enumerate(arrays.shard(sharding).dataset.take(4)):
            rows = arrays.indices(tf.constant(number, tf.int64))
            own, own_counts = parts_of(rows, sharding)
            assert [t.numpy().tolist() for t in (*parts, counts, total)] == [
                t.numpy().tolist() for t in (*own, own_counts, tf.size(rows))
            ]


def test_rows_stay_in_their_batch_if_only_batches_are_shuffled() -> None:
    source = data.Source(np.arange(9.0), batch_size=3, shuffle="batch")
    rows = _rows(
        b for each in _passes(source.shard(data.Sharding(), data.SharedOrder(3))) for b in each
    )
    assert len({str(rows[i : i + 9]) for i in (0, 9, 18)}) == 3
    for first in range(0, 27, 3):
        start = first % 9
        assert sorted(rows[first : first + 3]) == [
            f"({float(i)},)" for i in range(start, start + 3)
        ]


@pytest.mark.parametrize("shuffle", [True, "batch"])
def test_arrays_that_are_shuffled_with_a_seed_have_the_order_of_keras(shuffle: Any) -> None:
    with datasets.substituted_global_seed(4):
        theirs = datasets.data_adapter(X, Y, batch_size=3, shuffle=shuffle).get_tf_dataset()
        source = data.Source(X, Y, batch_size=3, shuffle=shuffle)
        shard = source.shard(data.Sharding(), data.SharedOrder(9))
    expected = [_leaves(batch) for batch in theirs]
    assert sorted(expected[0][1]) != expected[0][1]
    for batches in _passes(shard):
        assert [_leaves(batch) for batch in batches] == expected


class _Counted(keras.utils.PyDataset):
    """Nine batches of two examples."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.read: list[int] = []

    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        self.read.append(index)
        return X[index % 6 :][:2] + index, Y[:2]


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_py_dataset_is_read_from_an_index_on(split: bool, threads: int) -> None:
    for rank in range(2):
        batches = _Counted(workers=threads)
        source = data.Source(batches, split=split)
        shard = source.shard(data.Sharding(2, rank), data.SharedOrder())
        rows = [[p.tolist() for p in parts[0]] for parts, _, _ in _some(shard.dataset)]
        assert shard.rest is not None
        batches.read.clear()
        rest = [[p.tolist() for p in parts[0]] for parts, _, _ in _some(shard.batches(4))]
        assert rest == rows[4 if split else 2 :]
        assert sorted(batches.read) == [4, 5, 6, 7, 8]


def _some(dataset: tf.data.Dataset) -> Any:
    """The elements before those of which nothing counts."""
    return dataset.take_while(lambda *element: tf.reduce_any(element[1] > 0)).as_numpy_iterator()


def test_a_batch_size_beside_a_dataset_has_no_effect() -> None:
    dataset = tf.data.Dataset.from_tensor_slices(X).batch(2)
    with pytest.warns(UserWarning, match="batch_size=3 has no effect beside a dataset"):
        source = data.Source(dataset, batch_size=3)
    assert source.batch_size is None
