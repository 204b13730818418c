"""Synchronized batch normalization of masked inputs: Keras synchronizes that of unmasked ones only.

With a mask, Keras's layer computes the moments of what it finds in its own replica. Here they are
those of the valid entries of the global batch, as in one process.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfmw.keras_compat.losses import current_weight

_keras_moments = keras.layers.BatchNormalization._moments


def synchronize_masked_moments() -> None:
    """Makes Keras's layer synchronize moments of masked inputs within steps of replicas."""
    keras.layers.BatchNormalization._moments = _moments


def _moments(self: Any, inputs: Any, mask: Any) -> Any:
    if mask is None or not self.synchronized or current_weight() is None:
        return _keras_moments(self, inputs, mask)
    valid = tf.cast(tf.expand_dims(mask, -1), tf.bool)
    valid = tf.broadcast_to(valid, tf.shape(inputs))
    of_all = tf.distribute.get_replica_context().all_reduce
    total = tf.distribute.ReduceOp.SUM

    def summed(values: Any) -> Any:
        return tf.reduce_sum(values, self._reduction_axes)

    ones = tf.cast(valid, inputs.dtype)
    count, sums = of_all(total, [summed(ones), summed(tf.where(valid, inputs, 0))])
    count += keras.config.epsilon()
    mean = sums / count
    shape = [1] * inputs.shape.rank
    shape[self.axis] = -1
    apart = tf.where(valid, inputs - tf.reshape(mean, shape), 0)
    (squares,) = of_all(total, [summed(tf.square(apart))])
    return mean, squares / count


PRIVATE_NAMES: list[tuple[Any, str]] = [(keras.layers.BatchNormalization, "_moments")]
"""(owner, name) of each private name that this module uses; see `keras_compat.missing_names`."""
