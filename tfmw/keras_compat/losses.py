"""Losses: each replica's weight in the global batch, and the hooks that apply it.

Keras scales losses by 1 / number of replicas in two module functions. tfmw needs another factor,
the replica's share of the global batch (`LossShare`), to be exact where shares differ.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.tensorflow import trainer as tf_trainer
from keras.src.losses import loss as loss_module
from keras.src.trainers import trainer as base_trainer


class CannotCompile(Exception):
    """A loss needs sums over all replicas in the middle of the step."""


class LossShare:
    """The part of the global batch that one replica holds, while its step is traced.

    Attributes:
        rows: int32 [], examples of this replica.
        total: int32 [], examples of the global batch, over all replicas.
        weight: float32 [], `rows / total`; 0 for a replica without examples.
        used: whether some loss of the step was computed by Keras.
        scalar_losses: whether a loss function returned a scalar, taken for a mean.
        uneven: whether shards differ, so that this replica may be without examples.
        size_known: whether the dataset knows the size of each global batch; else a step whose
            total is 0 updates nothing.
        later: whether losses stay means over this replica's examples, and gradients are weighted
            instead. So for steps that may add terms of their own to Keras's losses: a mean that
            is written by hand is then right too, alone or in a sum with others.
        waiting: while XLA compiles the step, which leaves no place for collectives: a list that
            takes (gradients, what reduces and applies them) instead. Else None.
    """

    def __init__(
        self,
        rows: tf.Tensor,
        total: tf.Tensor,
        uneven: bool,
        size_known: bool,
        later: bool = False,
    ):
        self.rows = rows
        self.total = total
        self.uneven = uneven
        self.size_known = size_known
        self.later = later
        self.weight = tf.math.divide_no_nan(tf.cast(rows, tf.float32), tf.cast(total, tf.float32))
        self.used = False
        self.scalar_losses = False
        self.waiting: list[tuple[list[Any], Callable[[list[Any]], None]]] | None = None

    @contextlib.contextmanager
    def gradients_waiting(self) -> Iterator[list[Any]]:
        """Gradients of this context are put into the list that it gives; see `waiting`."""
        self.waiting = []
        try:
            yield self.waiting
        finally:
            self.waiting = None

    def all_sum(self, values: list[tf.Tensor]) -> list[tf.Tensor]:
        """Sums over replicas; no gradient flows through (normalizers are constants)."""
        if self.waiting is not None:
            raise CannotCompile
        replica = tf.distribute.get_replica_context()
        stopped = [tf.stop_gradient(tf.identity(v)) for v in values]
        reduced: list[tf.Tensor] = replica.all_reduce(tf.distribute.ReduceOp.SUM, stopped)
        return [tf.stop_gradient(v) for v in reduced]


# Per thread: MirroredStrategy traces each replica in a thread of its own.
_traced = threading.local()


def current_share() -> LossShare | None:
    """The share of the step that this thread traces; None outside of one."""
    return getattr(_traced, "share", None)


@contextlib.contextmanager
def loss_share(share: LossShare | None) -> Iterator[None]:
    """Within this context losses of this thread's replica are weighted by its share."""
    _install_loss_hooks()
    before = current_share()
    _traced.share = share
    try:
        yield
    finally:
        _traced.share = before


_hooked = False


def _install_loss_hooks() -> None:
    """Replaces six Keras functions by ones that obey `current_share()`, and else do as before."""
    global _hooked
    if _hooked:
        return
    _hooked = True
    keras_scale = loss_module.scale_loss_for_distribution
    keras_unscale = loss_module.unscale_loss_for_distribution
    keras_apply_mask = loss_module.apply_mask
    keras_reduce_values = loss_module.reduce_values
    keras_aggregate = tf_trainer.TensorFlowTrainer._aggregate_additional_loss
    keras_update_mean = keras.metrics.Mean.update_state

    def scale(value: Any) -> Any:
        share = current_share()
        if share is None:
            return keras_scale(value)
        share.used = True
        return value if share.later else value * tf.cast(share.weight, value.dtype)

    def unscale(value: Any) -> Any:
        share = current_share()
        if share is None:
            return keras_unscale(value)
        return value if share.later else value / tf.cast(share.weight, value.dtype)

    def whole(value: Any, share: LossShare) -> Any:
        # A sum over examples: the replicas' sums add up, whatever the weights.
        share.used = True
        if not share.later:
            return value
        return tf.math.divide_no_nan(value, tf.cast(share.weight, value.dtype))

    def apply_mask(sample_weight: Any, mask: Any, dtype: Any, reduction: Any) -> Any:
        # Keras divides by the valid entries of this replica; one process divides by those of
        # the global batch. Both counts are summed over replicas, and the ratio is corrected.
        weights = keras_apply_mask(sample_weight, mask, dtype, reduction)
        share = current_share()
        if share is None or mask is None or reduction not in ("mean", "sum_over_batch_size"):
            return weights
        total = tf.cast(tf.size(mask), tf.float32)
        valid = tf.reduce_sum(tf.cast(mask, tf.float32))
        all_total, all_valid = share.all_sum([total, valid])
        ratio = tf.math.divide_no_nan(all_total * valid, all_valid * total)
        return weights * tf.cast(ratio, weights.dtype)

    def reduce_values(
        values: Any, sample_weight: Any = None, reduction: str | None = "sum_over_batch_size"
    ) -> Any:
        loss = keras_reduce_values(values, sample_weight, reduction)
        share = current_share()
        if share is None or reduction in (None, "none"):
            return loss
        if reduction == "sum" and values.shape.rank != 0:
            return whole(loss, share)
        if values.shape.rank == 0:
            # A loss function that returned one number: taken for a mean over its examples.
            share.scalar_losses = True
            return scale(loss)
        if reduction == "mean_with_sample_weight" and sample_weight is not None:
            mine = tf.reduce_sum(tf.cast(sample_weight, tf.float32))
            (everyone,) = share.all_sum([mine])
            ratio = tf.math.divide_no_nan(mine, everyone * share.weight)
            return loss * tf.cast(ratio, loss.dtype)
        return loss

    def aggregate_additional_loss(self: Any, loss: Any) -> Any:
        # add_loss of one number is a mean (scaled); one value per example is a sum over examples
        # (one process would add them all up), so it is not scaled.
        share = current_share()
        if share is not None and loss.shape.rank:
            return whole(base_trainer.Trainer._aggregate_additional_loss(self, loss), share)
        return keras_aggregate(self, loss)

    def update_mean(self: Any, values: Any, sample_weight: Any = None) -> Any:
        # One number is the mean of a batch, and the batch counts once: each replica counts by
        # its part of the batch.
        share = current_share()
        if share is not None and sample_weight is None and tf.convert_to_tensor(values).shape == ():
            sample_weight = share.weight
        return keras_update_mean(self, values, sample_weight)

    loss_module.scale_loss_for_distribution = scale
    loss_module.unscale_loss_for_distribution = unscale
    loss_module.apply_mask = apply_mask
    loss_module.reduce_values = reduce_values
    tf_trainer.TensorFlowTrainer._aggregate_additional_loss = aggregate_additional_loss
    keras.metrics.Mean.update_state = update_mean


def only_keras_losses(model: keras.Model) -> bool:
    """Whether every loss of a compiled model is computed by Keras's own code."""
    if type(model).compute_loss is not base_trainer.Trainer.compute_loss:
        return False
    call = keras.losses.Loss.__call__
    losses = tf.nest.flatten(getattr(model, "loss", None))
    return all(not isinstance(x, keras.losses.Loss) or type(x).__call__ is call for x in losses)


PRIVATE_NAMES: list[tuple[Any, str]] = [
    (loss_module, "scale_loss_for_distribution"),
    (loss_module, "unscale_loss_for_distribution"),
    (loss_module, "apply_mask"),
    (loss_module, "reduce_values"),
    (tf_trainer.TensorFlowTrainer, "_aggregate_additional_loss"),
    (keras.metrics.Mean, "update_state"),
    (base_trainer.Trainer, "compute_loss"),
]
"""(owner, name) of what this module takes for granted; see `keras_compat.missing_names`."""
