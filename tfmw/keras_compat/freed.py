"""Variables whose memory was freed, and which keep the shape that Keras and traces know."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfmw.keras_compat.parameter_servers import RemoteRows


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


def free(variable: Any) -> None:
    """Frees the memory of every copy."""
    fill(variable, tf.zeros([0], variable.dtype))


def is_freed(variable: Any) -> bool:
    """Whether the first copy has no value of its shape."""
    first = copies_of(variable)[0]
    if isinstance(first, RemoteRows) or not hasattr(first, "handle"):
        return False  # rows elsewhere are never read to see whether they are there
    return bool(first.shape.num_elements()) and not int(tf.size(first))
