"""Rows of dense, ragged and sparse tensors: those of a replica, those in another order, none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tfmw import data
from tfmw.data import batches
from tfmw.mirrored.tensors import batch_rows, first_rows, or_one_example

ROWS = [[1, 0, 2], [0, 0, 0], [3, 4, 0], [0, 5, 6], [7, 0, 8]]  # the second has no value


def _tensors() -> dict[str, Any]:
    dense = tf.constant(ROWS)
    return {
        "dense": dense,
        "ragged": tf.ragged.constant([[v for v in row if v] for row in ROWS], dtype=tf.int32),
        "twice ragged": tf.ragged.constant([[[v] * v for v in row if v] for row in ROWS]),
        "sparse": tf.sparse.from_dense(dense),
    }


def _lists(tensor: Any) -> Any:
    if isinstance(tensor, tf.SparseTensor):
        # It raises where the values are not in order.
        return tf.sparse.to_dense(tensor, validate_indices=True).numpy().tolist()
    return tensor.to_list() if isinstance(tensor, tf.RaggedTensor) else tensor.numpy().tolist()


@pytest.mark.parametrize("kind", _tensors())
@pytest.mark.parametrize("rows", [[0, 2, 4], [4, 1, 0, 3, 2], [3], [1], []])
def test_gathered_rows_are_in_the_order_asked_for(kind: str, rows: list[int]) -> None:
    whole = _tensors()[kind]
    gathered = data.gather_rows(whole, tf.constant(rows, tf.int64))
    assert _lists(gathered) == [_lists(whole)[row] for row in rows]
    assert batch_rows(gathered) == len(rows)
    count = len(rows) // 2
    assert _lists(first_rows(gathered, tf.constant(count))) == _lists(gathered)[:count]


@pytest.mark.parametrize("kind", _tensors())
def test_local_replicas_have_every_nth_row(kind: str) -> None:
    whole = _tensors()[kind]
    parts = batches.local_parts((whole, None), data.Sharding(1, 0, 2))
    assert [_lists(part) for part, _ in parts] == [_lists(whole)[0::2], _lists(whole)[1::2]]
    assert [left_out for _, left_out in parts] == [None, None]


@pytest.mark.parametrize("kind", _tensors())
def test_a_batch_without_examples_becomes_one_example_of_zeros(kind: str) -> None:
    """A model can compute it, in eager code and in a graph; a batch with examples is unchanged."""
    whole = _tensors()[kind]
    spec = tf.type_spec_from_value(data.gather_rows(whole, tf.range(tf.constant(5, tf.int64))))
    nobody = tf.constant([], tf.int64)
    empties = [batches.empty_batch(_any_rows(spec)), data.gather_rows(whole, nobody)]
    for step in (or_one_example, tf.function(or_one_example)):
        tensor, left_out = step((whole, None), tf.constant(True))
        assert _lists(tensor) == _lists(whole)
        assert left_out is None
        for empty in empties:
            tensor, left_out = step((empty, None), tf.constant(False))
            assert batch_rows(tensor) == 1
            assert tensor.dtype == whole.dtype
            assert not np.any(_lists(tensor) if kind in ("dense", "sparse") else _lists(tensor)[0])
            if kind in ("dense", "sparse"):
                assert np.shape(_lists(tensor)) == (1, 3)
            assert left_out is None


def _any_rows(spec: Any) -> Any:
    """The same spec, of any number of rows."""
    shape = [None, *spec.shape[1:]]
    if isinstance(spec, tf.RaggedTensorSpec):
        return tf.RaggedTensorSpec(shape, spec.dtype, spec.ragged_rank, spec.row_splits_dtype)
    return type(spec)(shape, spec.dtype)


EMPTY: dict[str, tuple[Any, Any]] = {
    "dense": (tf.TensorSpec([None, None, 3], tf.int32), [0, 0, 3]),
    "ragged": (tf.RaggedTensorSpec([None, None, 7, 5], tf.float32, ragged_rank=1), [0, None, 7, 5]),
    "of a size": (tf.RaggedTensorSpec([None, None, 4], tf.float32, ragged_rank=1), [0, None, 4]),
    "twice ragged": (tf.RaggedTensorSpec([None, None, None, 2], tf.int64, 2), [0, None, None, 2]),
    "sparse": (tf.SparseTensorSpec([None, None, 4], tf.string), [0, 0, 4]),
}


@pytest.mark.parametrize("kind", EMPTY)
def test_an_empty_batch_is_of_its_spec(kind: str) -> None:
    spec, shape = EMPTY[kind]
    batch = batches.empty_batch({"x": spec, "none": None})
    assert batch["none"] is None
    assert batch["x"].shape.as_list() == shape
    assert batch["x"].dtype == spec.dtype
    assert spec.is_compatible_with(batch["x"])
    assert batch_rows(batch["x"]) == 0


def test_batches_without_examples_have_the_dimensions_of_the_last_one_that_had_some() -> None:
    """Of two local replicas: shapes of x, which the batches choose; y has its own."""
    shapes: list[list[tuple[int, ...]]] = [
        [(0, 9, 9), (0, 9, 9)],
        [(2, 3, 4), (0, 1, 1)],
        [(0, 1, 1), (0, 2, 2)],
        [(1, 5, 6), (1, 5, 6)],
        [(0, 7, 7), (0, 7, 7)],
    ]
    spec = (tf.TensorSpec([None, None, None]), tf.TensorSpec([None, 2]))

    def parts() -> Any:
        for step in shapes:
            yield tuple((np.ones(shape, np.float32), np.ones([shape[0], 2])) for shape in step)

    dataset = tf.data.Dataset.from_generator(parts, output_signature=(spec, spec))
    found = batches.empty_as_the_last(dataset, spec)
    assert found.element_spec == (spec, spec)
    assert [[tuple(x.shape) for x, _ in step] for step in found] == [
        [(0, 0, 0), (0, 0, 0)],
        [(2, 3, 4), (0, 3, 4)],
        [(0, 3, 4), (0, 3, 4)],
        [(1, 5, 6), (1, 5, 6)],
        [(0, 5, 6), (0, 5, 6)],
    ]
    assert all(float(tf.reduce_sum(x)) == float(tf.size(x)) for step in found for x, _ in step)
    fixed = (tf.TensorSpec([None, 2]), tf.TensorSpec([None]))
    assert batches.empty_as_the_last(dataset, fixed) is dataset, "nothing to choose"


def test_an_element_is_restored_as_the_model_gets_it() -> None:
    x: np.ndarray = np.arange(4)
    for tensors, expected in (
        (x, 0),
        ((x,), (0,)),
        ((x, (x, x)), (0, (0, 0))),
        ({"a": x}, {"a": 0}),
    ):
        dataset = tf.data.Dataset.from_tensor_slices(tensors)
        element = batches.element_of(dataset)
        found = next(iter(dataset.map(lambda *b, element=element: element(b)).as_numpy_iterator()))
        assert found == expected
        assert type(found) is type(next(iter(dataset.as_numpy_iterator())))
