"""Values of all replicas of a step, for layers that look at the global batch."""

from __future__ import annotations

import tensorflow as tf

from tfmw.errors import UsageError
from tfmw.keras_compat.losses import CannotCompile, current_weight


def counts_of_all_replicas(ids: tf.Tensor, counts: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Counts of ids on all replicas of a training step; where there is one replica, its own.

    On several replicas a collective.

    Args:
        ids: int64 [n]; n may differ between replicas.
        counts: int64 [n].

    Returns:
        (int64 [m], int64 [m]), the ids and counts of one replica after those of another. Of a
        replica without examples the counts are 0.

    Raises:
        UsageError: several replicas train, and not by `tfmw.fit`.
    """
    weight = current_weight()
    if weight is None:
        if tf.distribute.get_strategy().num_replicas_in_sync > 1:
            raise UsageError(
                "a layer that looks at the global batch was called on one of several replicas, "
                "outside of tfmw: train the model with tfmw.fit."
            )
        return ids, counts
    if weight.deferred is not None or weight.gather is None:
        raise CannotCompile
    counts = tf.where(weight.examples > 0, counts, tf.zeros_like(counts))
    shape = tf.constant([tf.int64.max], tf.int64)  # TensorFlow wants one; any id is possible
    gathered = weight.gather(tf.IndexedSlices(counts, ids, shape))
    return gathered.indices, gathered.values
