"""Losses: each replica's weight in the global batch, and the hooks that apply it.

Keras and `tf.nn` divide losses by the number of replicas, which is right only where all replicas
hold as many examples. tfmw follows one rule instead:

    Each loss that a replica computes estimates the loss of the global batch, such that the mean
    of the estimates, weighted by the replicas' numbers of examples, is that loss.

A mean over the replica's examples is such an estimate as it is, and so is whatever depends on
weights alone. A sum over examples is one after division by the replica's weight. So losses may be
added up, scaled, and reported wherever they are computed: by Keras, in a layer, by hand. The weight
itself is applied once, to the loss that Keras's own `train_step` differentiates, or to the
gradients of any other `train_step`.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.tensorflow import trainer as tf_trainer
from keras.src.losses import loss as loss_module
from keras.src.trainers import trainer as base_trainer

from tfmw.keras_compat.batch_reduction import batch_reduction, increment_kind, uses_shape
from tfmw.keras_compat.coupling import couples_examples
from tfmw.keras_compat.graph import is_symbolic


class CannotCompile(Exception):
    """A loss needs sums over all replicas in the middle of the step."""


class ReplicaWeight:
    """The weight of one replica in the global batch, while its step is traced.

    Attributes:
        examples: int32 [], examples of this replica.
        global_examples: int32 [], examples of the global batch, over all replicas.
        static_rows: the number of this replica's examples, if the shape of its batch has it.
        fraction: float64 [], `examples / global_examples`; 0 for a replica without examples. It
            is rounded only where it meets a value of lower precision.
        uneven: whether shards differ in size, so that this replica may have no examples.
        size_known: whether the size of each global batch is known before it is read. If not, a
            batch without examples on any replica is the end of the data and updates nothing.
        in_loss: whether the weight is applied to the loss that is differentiated, in
            `optimizer.scale_loss`. If not, it is applied to the gradients.
        has_keras_loss: whether some loss of the step was reduced by Keras or `tf.nn`.
        has_scalar_loss: whether a loss function returned a scalar, taken for a mean.
        coupled_losses: names of losses that compare the examples of a batch.
        unclear_metrics: names of metrics that are neither sums nor means over examples.
        loss_weighted: whether the weight was applied to the loss that is differentiated.
        layer_losses: id of a layer -> the losses that it passed to `add_loss` on this replica.
        gather: the slices of all replicas, of slices of which each replica has some: values and
            indices concatenated. A collective.
        deferred: (gradients, what reduces and applies them), while XLA compiles the step: a
            compiled step cannot contain collectives. None in other steps.
    """

    def __init__(
        self,
        examples: tf.Tensor,
        global_examples: tf.Tensor,
        *,
        uneven: bool,
        size_known: bool,
        in_loss: bool,
        static_rows: int | None = None,
        gather: Callable[[tf.IndexedSlices], tf.IndexedSlices] | None = None,
    ):
        self.examples = examples
        self.gather = gather
        self.static_rows = static_rows
        self.global_examples = global_examples
        self.fraction = tf.math.divide_no_nan(
            tf.cast(examples, tf.float64), tf.cast(global_examples, tf.float64)
        )
        self.uneven = uneven
        self.size_known = size_known
        self.in_loss = in_loss
        self.has_keras_loss = False
        self.has_scalar_loss = False
        self.coupled_losses: set[str] = set()
        self.unclear_metrics: set[str] = set()
        self.loss_weighted = False
        self.layer_losses: dict[int, list[tf.Tensor]] = {}
        self.deferred: list[tuple[list[Any], Callable[[list[Any]], None]]] | None = None

    @contextlib.contextmanager
    def deferring_gradients(self) -> Iterator[list[Any]]:
        """Collects the gradients of this context in the list that it yields; see `deferred`."""
        self.deferred = []
        try:
            yield self.deferred
        finally:
            self.deferred = None

    def all_sum(self, values: list[tf.Tensor]) -> list[tf.Tensor]:
        """Sums over replicas; no gradient flows through (normalizers are constants).

        A replica without examples adds nothing: what it computes is of a placeholder.
        """
        if self.deferred is not None:
            raise CannotCompile
        replica = tf.distribute.get_replica_context()
        present = self.examples > 0
        stopped = [tf.stop_gradient(tf.where(present, v, tf.zeros_like(v))) for v in values]
        reduced: list[tf.Tensor] = replica.all_reduce(tf.distribute.ReduceOp.SUM, stopped)
        return [tf.stop_gradient(v) for v in reduced]

    def estimate_of_sum(self, local_sum: tf.Tensor) -> tf.Tensor:
        """A sum over this replica's examples -> an estimate of the sum over the global batch."""
        return tf.math.divide_no_nan(local_sum, tf.cast(self.fraction, local_sum.dtype))

    def estimate_of_scalar(self, local: tf.Tensor) -> tf.Tensor:
        """A scalar -> an estimate; taken for a mean or a weight penalty if not seen to be a sum."""
        return self.estimate_of_sum(local) if self.reduction_of(local) == "sum" else local

    def reduction_of(self, local: Any) -> str | None:
        """See `batch_reduction`."""
        return batch_reduction(local, self.static_rows)

    def weighted_loss(self, loss: tf.Tensor) -> tf.Tensor:
        """The loss that Keras's own `train_step` differentiates."""
        self.loss_weighted = True
        return loss * tf.cast(self.fraction, loss.dtype)

    def per_example(self, values: tf.Tensor) -> bool:
        """Whether `values` have one row for each example of this replica.

        Batches of unknown size make rows of unknown number; weights don't.
        """
        if not values.shape.rank:
            return False
        return values.shape[0] == self.static_rows


# Loss -> whether its values for one example depend on other examples.
_coupled: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()

# Per thread: MirroredStrategy traces each replica in a thread of its own.
_traced = threading.local()


def current_weight() -> ReplicaWeight | None:
    """The weight of the replica whose step this thread traces; None outside of one."""
    return getattr(_traced, "weight", None)


@contextlib.contextmanager
def weighting_losses(weight: ReplicaWeight | None) -> Iterator[None]:
    """Makes losses that this thread computes in the context follow the rule of this module."""
    _install_hooks()
    before = current_weight()
    _traced.weight = weight
    try:
        yield
    finally:
        _traced.weight = before


# The methods of layers that read or write their list of losses.
_USE_LAYER_LOSSES = ("add_loss", "_get_own_losses", "_clear_losses")

_hooked = False


def _install_hooks() -> None:
    """Replaces functions of Keras and `tf.nn` with ones that apply `current_weight()`.

    Without a current weight they call the original functions.
    """
    global _hooked
    if _hooked:
        return
    _hooked = True
    _hook_loss_scaling()
    _hook_loss_calls()
    _hook_reductions()
    _hook_additional_losses()
    _hook_layers()
    _hook_metrics()
    _hook_tf_nn()


def _hook_loss_scaling() -> None:
    """Replicas are weighted by this module's rule, not by Keras's division by their number."""
    keras_scale = loss_module.scale_loss_for_distribution
    keras_unscale = loss_module.unscale_loss_for_distribution

    def scale(value: Any) -> Any:
        weight = current_weight()
        if weight is None:
            return keras_scale(value)
        weight.has_keras_loss = True
        return value

    def unscale(value: Any) -> Any:
        return keras_unscale(value) if current_weight() is None else value

    loss_module.scale_loss_for_distribution = scale
    loss_module.unscale_loss_for_distribution = unscale


def _hook_loss_calls() -> None:
    """Notes losses that compare the examples of a batch, and losses that return a scalar."""
    keras_call = keras.losses.Loss.__call__
    keras_reduce_weighted = loss_module.reduce_weighted_values

    def call(self: Any, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        weight = current_weight()
        if weight is not None:
            with weighting_losses(None):
                if self not in _coupled:
                    _coupled[self] = couples_examples(self, y_true, y_pred)
            if _coupled[self]:
                weight.coupled_losses.add(self.name)
        return keras_call(self, y_true, y_pred, sample_weight)

    def reduce_weighted_values(values: Any, *arguments: Any, **options: Any) -> Any:
        weight = current_weight()
        if weight is not None and tf.convert_to_tensor(values).shape.rank == 0:
            # A scalar from a loss function is taken for a mean over its examples.
            weight.has_scalar_loss = True
        return keras_reduce_weighted(values, *arguments, **options)

    keras.losses.Loss.__call__ = call
    loss_module.reduce_weighted_values = reduce_weighted_values


def _hook_reductions() -> None:
    """Reductions of the values per example, masked or weighted: estimates of the global ones."""
    keras_apply_mask = loss_module.apply_mask
    keras_reduce_values = loss_module.reduce_values

    def apply_mask(sample_weight: Any, mask: Any, dtype: Any, reduction: Any) -> Any:
        # Keras divides by the valid entries of this replica; one process divides by those of
        # the global batch. Both counts are summed over replicas, and the ratio is corrected.
        weights = keras_apply_mask(sample_weight, mask, dtype, reduction)
        weight = current_weight()
        if weight is None or mask is None or reduction not in ("mean", "sum_over_batch_size"):
            return weights
        entries = tf.cast(tf.size(mask), tf.float32)
        valid = tf.reduce_sum(tf.cast(mask, tf.float32))
        all_entries, all_valid = weight.all_sum([entries, valid])
        ratio = tf.math.divide_no_nan(all_entries * valid, all_valid * entries)
        return weights * tf.cast(ratio, weights.dtype)

    def reduce_values(
        values: Any, sample_weight: Any = None, reduction: str | None = "sum_over_batch_size"
    ) -> Any:
        loss = keras_reduce_values(values, sample_weight, reduction)
        weight = current_weight()
        if weight is None or reduction in (None, "none"):
            return loss
        weight.has_keras_loss = True
        if values.shape.rank == 0:
            return weight.estimate_of_scalar(loss)
        if reduction == "sum":
            return weight.estimate_of_sum(loss)
        if reduction == "mean_with_sample_weight" and sample_weight is not None:
            precise = tf.float64 if loss.dtype == tf.float64 else tf.float32
            local = tf.reduce_sum(tf.cast(sample_weight, precise))
            (everywhere,) = weight.all_sum([local])
            ratio = tf.math.divide_no_nan(local, everywhere * tf.cast(weight.fraction, precise))
            return loss * tf.cast(ratio, loss.dtype)
        return loss

    loss_module.apply_mask = apply_mask
    loss_module.reduce_values = reduce_values


def _hook_additional_losses() -> None:
    """The losses of `add_loss`: of layers, and of the model."""
    keras_aggregate = tf_trainer.TensorFlowTrainer._aggregate_additional_loss

    def aggregate_additional_loss(self: Any, loss: Any) -> Any:
        # Keras adds up the losses of add_loss, and of a loss per example all its values.
        weight = current_weight()
        if weight is None:
            return keras_aggregate(self, loss)
        weight.has_keras_loss = True
        summed = base_trainer.Trainer._aggregate_additional_loss(self, loss)
        if weight.per_example(loss):
            return weight.estimate_of_sum(summed)
        return weight.estimate_of_scalar(summed)

    tf_trainer.TensorFlowTrainer._aggregate_additional_loss = aggregate_additional_loss


def _hook_layers() -> None:
    """Separates the losses that layers pass to `add_loss` by replica.

    The replicas of one process call the same layers, and are traced in turns. Without this, one
    replica would find the losses of another in `model.losses`.
    """

    def per_replica(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def wrapper(self: Any, *arguments: Any) -> Any:
            weight = current_weight()
            if weight is None:
                return method(self, *arguments)
            attributes = vars(self)
            shared = attributes["_losses"]
            attributes["_losses"] = weight.layer_losses.setdefault(id(self), [])
            try:
                return method(self, *arguments)
            finally:
                attributes["_losses"] = shared

        return wrapper

    for name in _USE_LAYER_LOSSES:
        setattr(keras.Layer, name, per_replica(getattr(keras.Layer, name)))


def _hook_metrics() -> None:
    keras_update_mean = keras.metrics.Mean.update_state
    keras_update_sum = keras.metrics.Sum.update_state

    def update_mean(self: Any, values: Any, sample_weight: Any = None) -> Any:
        # A scalar is the mean of a batch, and the batch counts once: each replica counts with
        # its fraction of the batch.
        weight = current_weight()
        if weight is not None and sample_weight is None:
            values = tf.convert_to_tensor(values)
            if values.shape == ():
                of_function = isinstance(self, keras.metrics.MeanMetricWrapper)
                if of_function and increment_kind(values, weight.static_rows) == "unknown":
                    if hasattr(values, "graph"):
                        weight.unclear_metrics.add(self.name)
                if values.dtype.is_floating:
                    values = weight.estimate_of_scalar(values)
                sample_weight = weight.fraction
        return keras_update_mean(self, values, sample_weight)

    def update_sum(self: Any, values: Any, sample_weight: Any = None) -> Any:
        # Sums of replicas add up; means of replicas do when weighted by their fractions.
        weight = current_weight()
        if weight is not None and weight.reduction_of(values) == "mean":
            values = values * tf.cast(weight.fraction, values.dtype)
        return keras_update_sum(self, values, sample_weight)

    keras.metrics.Mean.update_state = update_mean
    keras.metrics.Sum.update_state = update_sum


def _hook_tf_nn() -> None:
    """The two functions that TensorFlow's tutorial on custom training loops uses."""
    tf_average = tf.nn.compute_average_loss
    tf_regularization = tf.nn.scale_regularization_loss

    def compute_average_loss(
        per_example_loss: Any, sample_weight: Any = None, global_batch_size: Any = None
    ) -> Any:
        weight = current_weight()
        if weight is None:
            return tf_average(per_example_loss, sample_weight, global_batch_size)
        weight.has_keras_loss = True
        if global_batch_size is None or _computed_from_shape(global_batch_size):
            rows = tf.shape(per_example_loss)[0]
            return tf_average(per_example_loss, sample_weight, rows)
        return weight.estimate_of_sum(
            tf_average(per_example_loss, sample_weight, global_batch_size)
        )

    def scale_regularization_loss(regularization_loss: Any) -> Any:
        weight = current_weight()
        if weight is None:
            return tf_regularization(regularization_loss)
        weight.has_keras_loss = True
        return tf.reduce_sum(regularization_loss)

    for module in (tf.nn, tf.compat.v2.nn, tf.compat.v1.nn):
        for function in (compute_average_loss, scale_regularization_loss):
            if hasattr(module, function.__name__):
                setattr(module, function.__name__, function)


def _computed_from_shape(size: Any) -> bool:
    """Whether a batch size was computed from the shape of a tensor, such as the current batch."""
    # Eager: users pass a size that they know as a Python number.
    return tf.is_tensor(size) and (uses_shape(size) if is_symbolic(size) else True)


PRIVATE_NAMES: list[tuple[Any, str]] = [
    (loss_module, "scale_loss_for_distribution"),
    (loss_module, "unscale_loss_for_distribution"),
    (loss_module, "apply_mask"),
    (loss_module, "reduce_values"),
    (loss_module, "reduce_weighted_values"),
    (tf_trainer.TensorFlowTrainer, "_aggregate_additional_loss"),
    (base_trainer.Trainer, "_aggregate_additional_loss"),
    *[(keras.Layer, name) for name in _USE_LAYER_LOSSES],
    (keras.metrics.Mean, "update_state"),
    (keras.metrics.Sum, "update_state"),
    (keras.optimizers.Optimizer, "scale_loss"),
    (tf.nn, "compute_average_loss"),
    (tf.nn, "scale_regularization_loss"),
]
"""(owner, name) of each private name that this module uses; see `keras_compat.missing_names`."""
