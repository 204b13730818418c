"""Rows of an initial value, drawn alone, are those of the whole, bit for bit."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfmw.compat import table_variables

SHAPE = [301, 7]  # blocks begin at elements that are no multiple of 4
RANGES = [(0, 301), (0, 1), (1, 2), (100, 173), (173, 301), (300, 301)]
DRAWS = [
    keras.initializers.RandomUniform(-0.2, 0.7, seed=3),
    keras.initializers.RandomNormal(0.1, 0.5, seed=4),
    keras.initializers.TruncatedNormal(0.1, 0.5, seed=5),
    keras.initializers.GlorotUniform(seed=6),
    keras.initializers.HeNormal(seed=7),
    keras.initializers.VarianceScaling(2.0, "fan_out", "untruncated_normal", seed=8),
]
CONSTANTS = [
    keras.initializers.Zeros(),
    keras.initializers.Ones(),
    keras.initializers.Constant(0.1),
    keras.initializers.Constant(np.linspace(0, 1, 7)),
    keras.initializers.Constant(np.arange(301 * 7).reshape(301, 7) / 7),
]


def check(initializer, dtype):
    whole = initializer(SHAPE, dtype=dtype.name).numpy()
    rows = table_variables.initial_rows(initializer, SHAPE, dtype)
    assert rows is not None
    for start, stop in RANGES:
        found = rows(start, stop)
        assert (found.dtype, found.shape.as_list()) == (dtype, [stop - start, 7])
        np.testing.assert_array_equal(found.numpy(), whole[start:stop])


@pytest.mark.parametrize("dtype", [tf.float32, tf.float64, tf.float16, tf.bfloat16])
@pytest.mark.parametrize("initializer", DRAWS, ids=lambda i: type(i).__name__)
def test_random_rows_are_those_of_the_whole(initializer, dtype):
    check(initializer, dtype)


@pytest.mark.parametrize("initializer", CONSTANTS, ids=lambda i: type(i).__name__)
def test_constant_rows_are_those_of_the_whole(initializer):
    check(initializer, tf.float32)


def test_rows_far_behind_the_first_counters():
    """Rows after the first 2**32 elements, which an array in memory does not have."""
    initializer = keras.initializers.RandomUniform(seed=3)
    rows = table_variables.initial_rows(initializer, [1 << 34, 2], tf.float32)
    assert rows is not None
    far, begin = rows((1 << 33) + 1, (1 << 33) + 4), rows(1, 4)
    assert not np.array_equal(far.numpy(), begin.numpy())
    whole = keras.initializers.RandomUniform(seed=3)([4, 2])
    np.testing.assert_array_equal(begin.numpy(), whole[1:4])


@pytest.mark.parametrize(
    "initializer",
    [
        keras.initializers.Orthogonal(seed=1),
        keras.initializers.RandomUniform(seed=keras.random.SeedGenerator(1)),
        lambda shape, dtype: tf.zeros(shape, dtype),
    ],
)
def test_what_makes_the_whole_only_is_known(initializer):
    assert table_variables.initial_rows(initializer, SHAPE, tf.float32) is None


def test_other_draws_in_between_are_unchanged():
    expected = keras.random.uniform([3, 3], seed=1).numpy()
    rows = table_variables.initial_rows(DRAWS[0], SHAPE, tf.float32)
    assert rows is not None
    rows(5, 6)
    np.testing.assert_array_equal(keras.random.uniform([3, 3], seed=1).numpy(), expected)
