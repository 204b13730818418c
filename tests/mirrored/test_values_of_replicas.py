"""Values of every dtype that a weight may have are sent unchanged, and summed."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tfmw.train.mirrored.replicas import in_packs

VALUES = {
    "complex64": [[1 + 2j], [3 - 4j]],
    "complex128": 1e300 - 2e-300j,
    "bool": [True, False],
    "int8": [1, -128],
    "int64": 2**62 + 1,
    "uint8": 255,
    "uint64": 2**64 - 1,
    "bfloat16": [1.5, -0.25],
    "float16": 0.1,
    "float64": [1e300, 0.1],
}


@pytest.mark.parametrize("traced", [False, True])
def test_values_are_sent_unchanged(traced: bool) -> None:
    values = [tf.constant(value, dtype) for dtype, value in VALUES.items()]
    sent: list[tf.DType] = []

    def exchange(flat: tf.Tensor) -> tf.Tensor:
        sent.append(flat.dtype)
        return tf.identity(flat)

    send = tf.function(in_packs, autograph=False) if traced else in_packs
    for value, got in zip(values, send(values, exchange), strict=True):
        assert got.dtype == value.dtype
        np.testing.assert_array_equal(got.numpy(), value.numpy())
    assert sorted(dtype.name for dtype in sent) == ["float32", "float64", "int64"]


def test_complex_values_are_summed() -> None:
    value = tf.constant([1 + 2j, -3j], tf.complex64)
    (total,) = in_packs([value], lambda flat: flat * 2)
    np.testing.assert_array_equal(total.numpy(), [2 + 4j, -6j])
