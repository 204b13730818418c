"""Arrays as arguments: the batches of Keras, of which a worker copies its own examples only."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfmw import data
from tfmw.compat import datasets

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
