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
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src.layers.preprocessing.image_preprocessing.base_image_preprocessing_layer import (
    BaseImagePreprocessingLayer as _ImageLayer,
)
from keras.src.losses import loss as loss_module

from tfmw.keras_compat.dataflow.flow import FIXED, Flow
from tfmw.keras_compat.dataflow.walk import Dataflow
from tfmw.keras_compat.differences import Differences
from tfmw.keras_compat.graph import is_symbolic
from tfmw.keras_compat.objects import BaseTrainer, Trainer, backend_module

keras_nn = backend_module("nn")


class CannotCompile(Exception):
    """A loss needs sums over all replicas in the middle of the step."""


class ReplicaWeight:
    """The weight of one replica in the global batch, while its step is traced.

    Attributes:
        examples: int32 [], examples of this replica.
        global_examples: int32 [], examples of the global batch, over all replicas.
        fraction: float64 [], `examples / global_examples`; 0 for a replica without examples. It
            is rounded only where it meets a value of lower precision.
        uneven: whether shards differ in size, so that this replica may have no examples.
        size_known: whether the size of each global batch is known before it is read. If not, a
            batch without examples on any replica is the end of the data and updates nothing.
        in_loss: whether the weight is applied to the loss that is differentiated, in
            `optimizer.scale_loss`. If not, it is applied to the gradients.
        flows: how the tensors of the step follow from the examples of this replica.
        differences: losses and metrics that replicas cannot combine.
        loss_weighted: whether the weight was applied to the loss that is differentiated.
        layer_losses: id of a layer -> the losses that it passed to `add_loss` on this replica.
        sums: values of this replica -> their sums over all replicas. A collective.
        gather: the slices of all replicas, of slices of which each replica has some: values and
            indices concatenated. A collective.
        alone: whether the replica trains on its own: what it would sum over replicas it estimates
            from its own examples.
        updated_by: int32 []: the examples on the replicas that make the same update.
        coupled: whether the losses of other replicas depend on this one's weights and examples, as
            by a synchronized BatchNormalization.
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
        sums: Callable[[list[tf.Tensor]], list[tf.Tensor]] | None = None,
        gather: Callable[[tf.IndexedSlices], tf.IndexedSlices] | None = None,
        alone: bool = False,
        updated_by: tf.Tensor | None = None,
        coupled: bool = False,
    ):
        self.alone = alone
        self.updated_by = global_examples if updated_by is None else updated_by
        self.coupled = coupled
        self.examples = examples
        self.sums = sums
        self.gather = gather
        self.global_examples = global_examples
        self.fraction = tf.math.divide_no_nan(
            tf.cast(examples, tf.float64), tf.cast(global_examples, tf.float64)
        )
        self.uneven = uneven
        self.size_known = size_known
        self.in_loss = in_loss
        self.flows = Dataflow(())
        self.differences = Differences()
        self._loss_name: str | None = None
        self.loss_weighted = False
        self.layer_losses: dict[int, list[tf.Tensor]] = {}
        self.deferred: list[tuple[list[Any], Callable[[list[Any]], None]]] | None = None

    def begins(self, batch: Any) -> None:
        """Notes the tensors that the step gets, in the graph in which it is traced."""
        self.flows = Dataflow(batch)

    def note(self, subject: str, value: Any) -> bool:
        """Notes a loss or metric that replicas cannot combine; returns whether they can."""
        return self.differences.note(subject, self.flows.of(value))

    @contextlib.contextmanager
    def in_loss_object(self, name: str) -> Iterator[None]:
        """Values that Keras reduces in this context are those of a loss of this name."""
        before, self._loss_name = self._loss_name, name
        try:
            yield
        finally:
            self._loss_name = before

    def note_loss_values(self, values: Any) -> None:
        """Notes the values of a loss, before they are reduced, if replicas cannot combine them."""
        if self._loss_name is not None:
            self.note(f"the loss {self._loss_name}", values)

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
        if self.alone:
            return [tf.stop_gradient(self.estimate_of_sum(v)) for v in values]
        if self.deferred is not None:
            raise CannotCompile
        assert self.sums is not None
        present = self.examples > 0
        stopped = [tf.stop_gradient(tf.where(present, v, tf.zeros_like(v))) for v in values]
        sums = [tf.stop_gradient(v) for v in self.sums(stopped)]
        for value in sums:
            self.flows.declare(value, FIXED)
        return sums

    def estimate_of_sum(self, local_sum: tf.Tensor) -> tf.Tensor:
        """A sum over this replica's examples -> an estimate of the sum over the global batch."""
        estimate = tf.math.divide_no_nan(local_sum, tf.cast(self.fraction, local_sum.dtype))
        return self.declared(estimate, local_sum)

    def estimate_of_scalar(self, local: Any) -> Any:
        """A scalar -> an estimate; taken for a mean or a weight penalty if not seen to be a sum."""
        return self.estimate_of_sum(local) if self.reduction_of(local) == "sum" else local

    def reduction_of(self, value: Any) -> str | None:
        """How a value of any shape was computed from the examples of a batch.

        Returns:
            "sum", also for a number of examples; "mean"; None if it is neither, such as a penalty
            of weights, or if there is no graph to inspect.
        """
        flow = self.flows.of(value)
        if flow.kind == "size" and not flow.axes:  # as of constants, one for each example
            return {None: None, 0: "mean", 1: "sum"}.get(flow.degree)
        if flow.kind != "reduced":
            return None
        return "sum" if flow.degree == 1 else "mean"

    def declared(self, estimate: Any, values: Any) -> Any:
        """The estimate, known to be one from `values`."""
        flow = self.flows.of(values)
        if flow.has_pairs:
            flow = Flow("compared", origin=flow.origin)
        elif flow.kind in ("rows", "size", "reduced"):
            flow = Flow("reduced")
        self.flows.declare(estimate, flow)
        return estimate

    def weighted_loss(self, loss: tf.Tensor) -> tf.Tensor:
        """The loss that Keras's own `train_step` differentiates."""
        self.loss_weighted = True
        loss = self.estimate_of_scalar(loss)
        return self.declared(loss * tf.cast(self.fraction, loss.dtype), loss)

    def estimates_of_gradients(self, target: Any, grads: Any) -> Any:
        """Gradients of this replica's loss -> estimates of those of the global loss.

        The loss is noted if replicas cannot combine it.

        Args:
            target: what was differentiated: a loss, or losses that are added up.
            grads: a structure of gradients with respect to weights.
        """
        for loss in tf.nest.flatten(target):
            if is_symbolic(loss):
                self.differences.note("the loss of train_step", self.flows.of(loss))
        added = self._are_added(target)

        def estimate(grad: Any) -> Any:
            if grad is None:
                return None
            if added or self._weighs_outputs:
                whole = tf.math.divide_no_nan(tf.ones([], tf.float64), self.fraction)
                (grad,) = scaled([grad], whole)
            values = grad.values if isinstance(grad, tf.IndexedSlices) else grad
            self.flows.declare(values, Flow("reduced"))
            return grad

        return tf.nest.map_structure(estimate, grads)

    @property
    def _weighs_outputs(self) -> bool:
        return self.coupled and self.uneven and not (self.in_loss or self.alone)

    def _are_added(self, target: Any) -> bool:
        """Whether losses are values per example, or sums of them: those of replicas add up."""
        flows = [self.flows.of(loss) for loss in tf.nest.flatten(target) if is_symbolic(loss)]
        return bool(flows) and all(
            flow.kind == "rows" or (flow.kind in ("reduced", "size") and flow.degree == 1)
            for flow in flows
        )

    def output_gradients(self, target: Any) -> Any:
        """The gradients of losses with respect to themselves, where the weight belongs there.

        What flows from the losses of other replicas to this one's examples has their weights. The
        weight of this one is applied to the gradients later, and is taken out of them before.
        """
        if not self._weighs_outputs or self._are_added(target):
            return None
        return tf.nest.map_structure(
            lambda loss: tf.ones_like(loss) * tf.cast(self.fraction, loss.dtype), target
        )

    def per_example(self, values: tf.Tensor) -> bool:
        """Whether `values` have one row for each example of this replica."""
        if is_symbolic(values):
            return self.flows.of(values).kind == "rows"
        return bool(values.shape.rank) and values.shape[0] == int(self.examples)


def scaled(grads: Iterable[Any], factor: Any) -> list[Any]:
    """Gradients, dense or `tf.IndexedSlices`, times a scalar; None stays None."""
    factors: dict[tf.DType, tf.Tensor] = {}  # one for each dtype, not one for each gradient

    def one(grad: Any) -> Any:
        if isinstance(grad, tf.IndexedSlices):
            return tf.IndexedSlices(one(grad.values), grad.indices, grad.dense_shape)
        if grad.dtype not in factors:
            factors[grad.dtype] = tf.cast(factor, grad.dtype)
        return grad * factors[grad.dtype]

    return [None if grad is None else one(grad) for grad in grads]


# Loss -> the flow of its values, where there is no graph of the step.
_traced_alone: weakref.WeakKeyDictionary[Any, Flow] = weakref.WeakKeyDictionary()

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
    _hook_gradients()


def _hook_loss_scaling() -> None:
    """Replicas are weighted by this module's rule, not by Keras's division by their number."""
    keras_scale = loss_module.scale_loss_for_distribution
    keras_unscale = loss_module.unscale_loss_for_distribution

    def scale(value: Any) -> Any:
        weight = current_weight()
        if weight is None:
            return keras_scale(value)
        return value

    def unscale(value: Any) -> Any:
        weight = current_weight()
        if weight is None:
            return keras_unscale(value)
        weight.note("the loss", value)
        return weight.estimate_of_scalar(value)

    loss_module.scale_loss_for_distribution = scale
    loss_module.unscale_loss_for_distribution = unscale


def _hook_loss_calls() -> None:
    """Notes losses that compare the examples of a batch, and other functions of whole batches."""
    keras_call = keras.losses.Loss.__call__
    keras_reduce_weighted = loss_module.reduce_weighted_values

    def call(self: Any, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        weight = current_weight()
        if weight is None:
            return keras_call(self, y_true, y_pred, sample_weight)
        if not tf.inside_function():
            if self not in _traced_alone:
                with weighting_losses(None):
                    _traced_alone[self] = _flow_alone(self, y_true, y_pred)
            weight.differences.note(f"the loss {self.name}", _traced_alone[self])
        with weight.in_loss_object(self.name):
            return keras_call(self, y_true, y_pred, sample_weight)

    def reduce_weighted_values(values: Any, *arguments: Any, **options: Any) -> Any:
        weight = current_weight()
        if weight is not None:
            weight.note_loss_values(values)
        return keras_reduce_weighted(values, *arguments, **options)

    keras.losses.Loss.__call__ = call
    loss_module.reduce_weighted_values = reduce_weighted_values


def _flow_alone(loss: Any, y_true: Any, y_pred: Any) -> Flow:
    """The flow of a loss's values, in a graph of its own: of a step that runs eagerly."""
    found = [Flow("unknown")]

    @tf.function(autograph=False)
    def traced(*batch: Any) -> None:
        found.append(Dataflow(batch).of(loss.call(*batch)))

    def spec(tensor: Any) -> tf.TensorSpec:
        return tf.TensorSpec([None, *tensor.shape[1:]], loss.dtype)

    with contextlib.suppress(Exception):  # a user's function may need values
        traced.get_concrete_function(*tf.nest.map_structure(spec, (y_true, y_pred)))
    return found[-1]


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
        out = weights * tf.cast(ratio, weights.dtype)
        # Keras has divided by the number of valid entries; the ratio makes it that of the batch.
        weight.flows.declare(out, weight.flows.of(mask))
        return out

    def reduce_values(
        values: Any, sample_weight: Any = None, reduction: str | None = "sum_over_batch_size"
    ) -> Any:
        loss = keras_reduce_values(values, sample_weight, reduction)
        weight = current_weight()
        if weight is None or reduction in (None, "none"):
            return loss
        if values.shape.rank == 0:
            return weight.estimate_of_scalar(loss)
        if reduction == "sum":
            return weight.estimate_of_sum(loss)
        if reduction == "mean_with_sample_weight" and sample_weight is not None:
            precise = tf.float64 if loss.dtype == tf.float64 else tf.float32
            local = tf.reduce_sum(tf.cast(sample_weight, precise))
            (everywhere,) = weight.all_sum([local])
            ratio = tf.math.divide_no_nan(local, everywhere * tf.cast(weight.fraction, precise))
            return weight.declared(loss * tf.cast(ratio, loss.dtype), values)
        return weight.declared(loss, values)

    loss_module.apply_mask = apply_mask
    loss_module.reduce_values = reduce_values


def _hook_additional_losses() -> None:
    """The losses of `add_loss`: of layers, and of the model."""
    keras_aggregate = Trainer._aggregate_additional_loss

    def aggregate_additional_loss(self: Any, loss: Any) -> Any:
        # Keras adds up the losses of add_loss, and of a loss per example all its values.
        weight = current_weight()
        if weight is None:
            return keras_aggregate(self, loss)
        summed = BaseTrainer._aggregate_additional_loss(self, loss)
        if weight.per_example(loss):
            return weight.estimate_of_sum(summed)
        return weight.estimate_of_scalar(summed)

    Trainer._aggregate_additional_loss = aggregate_additional_loss


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

    # What these do with the examples of a replica's part of the batch is documented.
    for layer in (keras.layers.BatchNormalization, keras.layers.TextVectorization, _ImageLayer):
        layer.call = _by_example(layer.call)
    keras_nn.ctc_loss = _by_example(keras_nn.ctc_loss)  # it loops over the examples


def _by_example(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of (anything, a tensor, ...), whose result follows from examples as the tensor."""

    @functools.wraps(function)
    def wrapper(*arguments: Any, **named: Any) -> Any:
        out = function(*arguments, **named)
        weight = current_weight()
        before = tf.nest.flatten(arguments[1:2], expand_composites=True)
        if weight is not None and len(before) == 1:
            weight.flows.declare(out, weight.flows.of(before[0]))
        return out

    return wrapper


def _hook_metrics() -> None:
    keras_update_mean = keras.metrics.Mean.update_state
    keras_update_sum = keras.metrics.Sum.update_state

    def update_mean(self: Any, values: Any, sample_weight: Any = None) -> Any:
        # A scalar is the mean of a batch, and the batch counts once: each replica counts with
        # its fraction of the batch.
        weight = current_weight()
        if weight is not None and is_symbolic(values):
            weight.note(f"the metric {self.name}", values)
        if weight is not None and sample_weight is None:
            values = tf.convert_to_tensor(values)
            if values.shape == ():
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
        if global_batch_size is None or (
            tf.is_tensor(global_batch_size)
            and (
                not is_symbolic(global_batch_size)
                or weight.flows.of(global_batch_size).kind == "size"
            )
        ):
            # Eager: users pass a size that they know as a Python number.
            rows = tf.shape(per_example_loss)[0]
            return tf_average(per_example_loss, sample_weight, rows)
        return weight.estimate_of_sum(
            tf_average(per_example_loss, sample_weight, global_batch_size)
        )

    def scale_regularization_loss(regularization_loss: Any) -> Any:
        weight = current_weight()
        if weight is None:
            return tf_regularization(regularization_loss)
        return tf.reduce_sum(regularization_loss)

    for module in (tf.nn, tf.compat.v2.nn, tf.compat.v1.nn):
        for function in (compute_average_loss, scale_regularization_loss):
            if hasattr(module, function.__name__):
                setattr(module, function.__name__, function)


def _hook_gradients() -> None:
    """Gradients with respect to weights are estimates of those of the global loss."""
    tape_gradient = tf.GradientTape.gradient

    def gradient(
        self: Any,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        *arguments: Any,
        **options: Any,
    ) -> Any:
        weight = current_weight()
        of_weights = all(hasattr(source, "handle") for source in tf.nest.flatten(sources))
        if weight is None or output_gradients is not None or not of_weights:
            return tape_gradient(self, target, sources, output_gradients, *arguments, **options)
        weighted = weight.output_gradients(target)
        grads = tape_gradient(self, target, sources, weighted, *arguments, **options)
        return weight.estimates_of_gradients(target, grads)

    tf.GradientTape.gradient = gradient


PRIVATE_NAMES: list[tuple[Any, str]] = [
    (loss_module, "scale_loss_for_distribution"),
    (loss_module, "unscale_loss_for_distribution"),
    (loss_module, "apply_mask"),
    (loss_module, "reduce_values"),
    (loss_module, "reduce_weighted_values"),
    (keras_nn, "ctc_loss"),
    (Trainer, "_aggregate_additional_loss"),
    (BaseTrainer, "_aggregate_additional_loss"),
    *[(keras.Layer, name) for name in _USE_LAYER_LOSSES],
    (keras.metrics.Mean, "update_state"),
    (keras.metrics.Sum, "update_state"),
    (keras.optimizers.Optimizer, "scale_loss"),
    (tf.nn, "compute_average_loss"),
    (tf.nn, "scale_regularization_loss"),
]
"""(owner, name) of each private name that this module uses; see `keras_compat.missing_names`."""
