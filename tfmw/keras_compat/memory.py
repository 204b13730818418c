"""Arrays and tensors over the same memory."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

_VIEWED = (
    tf.float16,
    tf.float32,
    tf.float64,
    tf.int32,
    tf.int64,
    tf.uint8,
    tf.bool,
)  # by the buffer protocol


def view_of(tensor: tf.Tensor) -> np.ndarray:
    """The values of an eager tensor: read-only, in its own memory where that can be.

    `tensor.numpy()` copies.
    """
    if tensor.dtype in _VIEWED and "CPU" in tensor.device:
        return np.asarray(memoryview(tensor))
    return np.asarray(tensor.numpy())


def new_tensor(shape: Sequence[int], dtype: tf.DType) -> tuple[np.ndarray, tf.Tensor]:
    """An uninitialized tensor in memory that TensorFlow allocates, and an array to fill it by.

    The array is valid as long as the tensor.
    """
    nbytes = math.prod(shape) * dtype.size
    with tf.init_scope(), tf.device("cpu:0"):
        tensor = tf.raw_ops.Empty(shape=shape, dtype=dtype)
        viewed = tensor if dtype in _VIEWED else tf.bitcast(tensor, tf.uint8)
    address = np.asarray(memoryview(viewed)).ctypes.data
    buffer = (ctypes.c_uint8 * nbytes).from_address(address)
    array = np.ctypeslib.as_array(buffer).view(dtype.as_numpy_dtype)
    return array.reshape(shape), tensor
