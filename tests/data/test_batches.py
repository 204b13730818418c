"""Rows of dense, ragged and sparse tensors: those of a replica, those in another order, none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tfmw import data
from tfmw.data import batches, first_rows

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
    assert data.examples_of(gathered) == len(rows)
    count = len(rows) // 2
    assert _lists(first_rows(gathered, tf.constant(count))) == _lists(gathered)[:count]


@pytest.mark.parametrize("kind", _tensors())
def test_a_replica_has_every_nth_row_or_the_first(kind: str) -> None:
    whole = _tensors()[kind]
    found = [_lists(batches.rows_from(whole, start, 3)) for start in (0, 2, 4, 5, 9)]
    rows = _lists(whole)
    assert found == [rows[0::3], rows[2::3], rows[4:], rows[:1], rows[:1]]
    nobody = data.gather_rows(whole, tf.constant([], tf.int64))
    assert data.examples_of(batches.rows_from(nobody, 1, 3)) == 0


@pytest.mark.parametrize("kind", _tensors())
def test_parts_without_examples_get_one_from_before(kind: str) -> None:
    whole = _tensors()[kind]
    spec = _any_rows(tf.type_spec_from_value(whole))
    steps = tf.data.Dataset.from_tensor_slices(([0, 0, 2, 2, 5, 5], [0, 2, 0, 3, 0, 0])).map(
        lambda begin, n: (
            ((data.gather_rows(whole, tf.cast(tf.range(begin, begin + n), tf.int64)), None),),
            tf.cast(n, tf.int64)[None],
        )
    )
    (before, *others) = [part for ((part, _),), _ in batches.filled(steps, (spec, None))]
    rows = _lists(whole)
    assert list(map(_lists, others)) == [rows[:2], rows[:1], rows[2:], rows[2:3], rows[2:3]]
    assert data.examples_of(before) == 1
    assert not np.any(_lists(before) if kind in ("dense", "sparse") else _lists(before)[0])


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
    batch = batches.zeros({"x": spec, "none": None}, 0)
    assert batch["none"] is None
    assert batch["x"].shape.as_list() == shape
    assert batch["x"].dtype == spec.dtype
    assert spec.is_compatible_with(batch["x"])
    assert data.examples_of(batch["x"]) == 0


def test_parts_without_examples_have_dimensions_that_batches_choose() -> None:
    """Two local replicas have shapes of x that the batches determine; y has its own."""
    shapes: list[list[tuple[int, ...]]] = [
        [(0, 9, 9), (0, 9, 9)],
        [(2, 3, 4), (0, 1, 1)],
        [(0, 1, 1), (0, 2, 2)],
        [(1, 5, 6), (1, 5, 6)],
        [(0, 7, 7), (0, 7, 7)],
    ]
    spec = (tf.TensorSpec([None, None, None]), tf.TensorSpec([None, 2]))

    def steps() -> Any:
        for step in shapes:
            parts: Any = tuple(
                (np.ones(shape, np.float32), np.ones([shape[0], 2])) for shape in step
            )
            yield parts, [shape[0] for shape in step]

    signature = ((spec, spec), tf.TensorSpec([2], tf.int64))
    dataset = tf.data.Dataset.from_generator(steps, output_signature=signature)
    found = batches.filled(dataset, spec)
    assert found.element_spec == signature
    assert [[tuple(x.shape) for x, _ in parts] for parts, _ in found] == [
        [(1, 1, 1), (1, 1, 1)],
        [(2, 3, 4), (1, 3, 4)],
        [(1, 3, 4), (1, 3, 4)],
        [(1, 5, 6), (1, 5, 6)],
        [(1, 5, 6), (1, 5, 6)],
    ]


def test_an_element_is_restored_as_the_model_gets_it() -> None:
    x: np.ndarray = np.arange(4)
    for tensors, expected in (
        (x, 0),
        ((x,), (0,)),
        ((x, (x, x)), (0, (0, 0))),
        ({"a": x}, {"a": 0}),
    ):
        dataset = tf.data.Dataset.from_tensor_slices(tensors)
        found = next(batches.map_elements(dataset, lambda element: element).as_numpy_iterator())
        assert found == expected
        assert type(found) is type(next(iter(dataset.as_numpy_iterator())))
