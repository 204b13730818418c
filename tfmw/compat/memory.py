"""The memory of tensors and variables: arrays over it, and variables whose memory was freed.

A freed variable keeps the shape that Keras and traces know.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfmw.compat.parameter_servers import RemoteRows

# types with the buffer protocol
_VIEWED = (tf.float16, tf.float32, tf.float64, tf.int32, tf.int64, tf.uint8, tf.bool)


def view_of(tensor: tf.Tensor) -> np.ndarray:
    """The values of an eager tensor: read-only, in its own memory if possible.

    In contrast, `tensor.numpy()` copies.
    """
    if tensor.dtype in _VIEWED and "CPU" in tensor.device:
        return np.asarray(memoryview(tensor))
    return np.asarray(tensor.numpy())


def new_tensor(shape: Sequence[int], dtype: tf.DType) -> tuple[np.ndarray, tf.Tensor]:
    """An uninitialized tensor in memory that TensorFlow allocates, and an array to fill it.

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


def copies_of(variable: Any) -> list[tf.Variable]:
    """The `tf.Variable`s of this process in one of a strategy; the variable itself otherwise."""
    if isinstance(variable, tf.distribute.DistributedValues):
        return list(variable.values)
    return [variable]


def fill(variable: Any, value: tf.Tensor) -> None:
    """Assigns a value of any shape to every copy; the variable keeps its static shape."""
    for copy in copies_of(variable):
        with tf.device(copy.device):
            tf.raw_ops.AssignVariableOp(resource=copy.handle, value=value, validate_shape=False)


def assign(variable: Any, value: tf.Tensor) -> None:
    """Assigns a value to a variable, which may have been freed."""
    if is_freed(variable):
        fill(variable, value)
    else:
        variable.assign(value)


def free(variable: Any) -> None:
    """Frees the memory of every copy."""
    fill(variable, tf.zeros([0], variable.dtype))


def is_freed(variable: Any) -> bool:
    """Whether the first copy has no value of its shape."""
    first = copies_of(variable)[0]
    if isinstance(first, RemoteRows) or not hasattr(first, "handle"):
        return False  # tables on servers are never read to find out whether they have values
    return bool(first.shape.num_elements()) and not int(tf.size(first))
