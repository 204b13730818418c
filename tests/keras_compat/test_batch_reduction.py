"""Sums and means over examples are told apart by the graph of the number."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf
from keras import ops

from tfmw.keras_compat.batch_reduction import batch_reduction, increment_kind

WEIGHTS = tf.Variable(tf.ones([5]))


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (lambda x: ops.sum(x), "sum"),
        (lambda x: ops.mean(x), "mean"),
        (lambda x: 0.1 * ops.sum(ops.square(x)), "sum"),
        (lambda x: ops.sum(ops.mean(x, axis=1)), "sum"),
        (lambda x: ops.mean(ops.sum(x, axis=1)), "mean"),
        (lambda x: -0.5 * ops.mean(x) + 2 * ops.mean(ops.exp(x)), "mean"),
        (lambda x: ops.sum(x) / 8.0, "sum"),
        (lambda x: ops.sum(x) / ops.cast(ops.shape(x)[0], "float32"), "mean"),
        (lambda x: tf.math.divide_no_nan(ops.sum(x), ops.cast(tf.size(x), "float32")), "mean"),
        (lambda x: ops.sum(x) * WEIGHTS[0], "sum"),
        (lambda x: ops.sum(x) / ops.sum(ops.abs(x)), None),
        (lambda x: ops.sum(x) + ops.mean(x), None),
        (lambda x: ops.sqrt(ops.mean(x)), None),
        (lambda x: ops.sum(ops.square(WEIGHTS)), None),
        (lambda x: ops.max(x), None),
        (lambda x: ops.sum(ops.sum(x, axis=0)), "sum"),
        (lambda x: ops.sum(ops.mean(x, axis=0)), "mean"),
        (lambda x: ops.sum(x, axis=-2)[0] + ops.sum(x), None),
        (lambda x: 1 - ops.mean(x), "mean"),
        (lambda x: 1 - ops.sum(x), None),
    ],
)
def test_batch_reduction_of_a_scalar(number: Any, expected: str | None) -> None:
    assert of_graph(lambda x: batch_reduction(number(x)), None) == expected
    # A batch of known size, as those of infinite datasets, and of as many examples as features.
    assert of_graph(lambda x: batch_reduction(number(x), 4), 4) == expected
    if expected is None or "axis=0" not in inspect.getsource(number):
        assert of_graph(lambda x: batch_reduction(number(x), 5), 5) == expected


def of_graph(kind: Callable[[Any], Any], rows: int | None) -> Any:
    """What `kind` finds of a batch [rows, 5] in a graph."""
    found = []

    @tf.function(autograph=False)
    def step(x: Any) -> Any:
        found.append(kind(x))
        return x

    step.get_concrete_function(tf.TensorSpec([rows, 5]))
    return found[0]


@pytest.mark.parametrize("rows", [None, 4])
@pytest.mark.parametrize(
    ("increment", "expected"),
    [
        (lambda x: ops.sum(x, axis=0), "sum"),
        (lambda x: ops.cast(ops.shape(x)[0], "float32"), "sum"),
        (lambda x: ops.cast(tf.size(x), "float32"), "sum"),
        (lambda x: ops.mean(x, axis=0), "once"),
        (lambda x: tf.constant(1.0), "once"),
        (lambda x: 2 * WEIGHTS, "once"),
        (lambda x: tf.transpose(x) @ x, "unknown"),
        (lambda x: ops.sqrt(ops.mean(x)), "unknown"),
        (lambda x: 1.0, "unknown"),
    ],
)
def test_kind_of_an_increment(increment: Any, expected: str, rows: int | None) -> None:
    assert of_graph(lambda x: increment_kind(increment(x), rows), rows) == expected


@pytest.mark.parametrize(
    ("number", "rows", "expected"),
    [
        *((4.0, 4, "sum"), (8.0, 4, "sum"), (4.0, None, "once")),
        *((1.0, 4, "once"), (0.0, 4, "once"), (1.0, 1, "unknown")),
    ],
)
def test_a_number_that_may_be_one_of_examples(
    number: float, rows: int | None, expected: str
) -> None:
    """Where the size of batches is known, the graph has the number of examples as a constant."""
    assert of_graph(lambda _: increment_kind(tf.constant(number), rows), rows) == expected


def test_batch_reduction_of_an_eager_scalar_is_none() -> None:
    assert batch_reduction(tf.reduce_sum(tf.ones([4]))) is None
