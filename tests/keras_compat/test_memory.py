"""Arrays and tensors over the same memory."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tfmw.compat.memory import new_tensor, view_of


@pytest.mark.parametrize(
    "dtype",
    [tf.float32, tf.bfloat16, tf.int64, tf.uint8, tf.bool, tf.complex64],
    ids=lambda d: d.name,
)
@pytest.mark.parametrize("shape", [[3, 5], [0, 2], []])
def test_a_new_tensor_has_what_its_array_was_given(dtype, shape):
    array, tensor = new_tensor(shape, dtype)
    array[...] = 1
    assert (tensor.dtype, tensor.shape, array.shape) == (dtype, shape, tuple(shape))
    np.testing.assert_array_equal(tf.cast(tensor, tf.float32), np.ones(shape))


def test_a_variable_takes_the_memory_of_a_new_tensor():
    array, tensor = new_tensor([100], tf.float32)
    array[...] = 1
    variable = tf.Variable(tf.zeros([100]))
    variable.assign(tensor)
    assert view_of(variable.read_value()).ctypes.data == array.ctypes.data


@pytest.mark.parametrize(
    "dtype", [tf.float16, tf.bfloat16, tf.int32, tf.bool], ids=lambda d: d.name
)
def test_a_view_has_the_values(dtype):
    tensor = tf.cast([[0, 1], [1, 1]], dtype)
    view = view_of(tensor)
    assert view.dtype == dtype.as_numpy_dtype
    np.testing.assert_array_equal(view.astype("f"), [[0, 1], [1, 1]])
