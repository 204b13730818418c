"""Sums and means over examples are told apart by the graph of the number."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf
from keras import ops

from tfmw.keras_compat.batch_reduction import batch_reduction

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
        (lambda x: ops.sum(ops.sum(x, axis=0)), None),
    ],
)
def test_batch_reduction_of_a_scalar(number: Any, expected: str | None) -> None:
    found: list[str | None] = []

    @tf.function(autograph=False)
    def step(x: Any) -> Any:
        found.append(batch_reduction(number(x)))
        return x

    step.get_concrete_function(tf.TensorSpec([None, 5]))
    assert found == [expected]


def test_batch_reduction_of_an_eager_scalar_is_none() -> None:
    assert batch_reduction(tf.reduce_sum(tf.ones([4]))) is None
