"""Values that workers compare to see whether they have the same weights."""

from __future__ import annotations

from typing import Any
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfmw.train.mirrored.agreement import agree

SMALL, LARGE = 1_000, 1_000_000  # of which TensorFlow makes the checksums


def compared(values: np.ndarray, dtype: str | None = None) -> Any:
    """Checksum that a worker with a variable of these values sends to the others."""
    sent: list[Any] = []

    def from_all(value: Any) -> list[Any]:
        sent.append(value)
        return [value, value]

    group = mock.Mock(size=2, from_all=from_all)
    variable = keras.Variable(values, dtype=dtype or str(values.dtype))
    assert agree(group, tf.distribute.get_strategy(), [variable]) == []
    return sent[0]


@pytest.mark.parametrize("length", [SMALL, LARGE])
def test_workers_notice_any_difference(length: int) -> None:
    values = np.random.default_rng(0).normal(size=length).astype(np.float32)
    values[0] = 0.0
    same = compared(values)
    assert compared(values.copy()) == same
    one_bit = values.copy()
    one_bit[-1] = np.nextafter(one_bit[-1], np.float32(9))
    another_zero = values.copy()
    another_zero[0] = -0.0
    for other in (one_bit, another_zero, values[::-1].copy(), np.roll(values, 2)):
        assert compared(other) != same


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64", "int64", "int8", "bool"])
@pytest.mark.parametrize("length", [SMALL, LARGE])
def test_values_of_each_type_are_compared(length: int, dtype: str) -> None:
    values = np.random.default_rng(1).integers(0, 2, length)
    same = compared(values, dtype)
    assert compared(values, dtype) == same
    values[length // 2] ^= 1
    assert compared(values, dtype) != same
