"""Functions of Keras and TensorFlow that a step calls, replaced while the step is traced.

    with weighting_losses(weight): ...     # losses and metrics follow the rule of `losses`

Each replacement gets the replica's weight and the original function. In threads that trace no step
the original function is called.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src.layers.preprocessing.image_preprocessing.base_image_preprocessing_layer import (
    BaseImagePreprocessingLayer as _ImageLayer,
)
from keras.src.losses import loss as loss_module
from tensorflow.python.ops.ragged import segment_id_ops

from tfmw.compat import assigned_weights
from tfmw.compat.dataflow.flow import EXAMPLES, SEGMENTS, Flow, tag_of, worst_flow
from tfmw.compat.dataflow.walk import Dataflow, without_identity
from tfmw.compat.gradients import graph_gradients, tape_gradient
from tfmw.compat.graph import is_symbolic
from tfmw.compat.losses import ReplicaWeight, current_weight, tracing_with
from tfmw.compat.objects import (
    BaseTrainer,
    Trainer,
    backend_module,
    install_hooks,
    overridden,
)

keras_nn = backend_module("nn")

# Loss -> the flow of its values, if the step has no graph.
_traced_alone: weakref.WeakKeyDictionary[Any, Flow] = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def weighting_losses(weight: ReplicaWeight | None) -> Iterator[None]:
    """Makes losses that this thread computes in the context follow the rule of `losses`."""
    _install_hooks()
    with tracing_with(weight):
        yield


@functools.cache
def _install_hooks() -> None:
    """Replaces functions of Keras and TensorFlow with ones that apply `current_weight()`."""
    install_hooks(HOOKS, current_weight)


# ---------------------------------------------------------------- Keras's losses


def _unscale(weight: ReplicaWeight, keras_unscale: Any, value: Any) -> Any:
    weight.note("the loss", value)
    return weight.estimate_of_scalar(value)


def _call_loss(
    weight: ReplicaWeight,
    keras_call: Any,
    loss: Any,
    y_true: Any,
    y_pred: Any,
    sample_weight: Any = None,
) -> Any:
    """Records losses that compare the examples of a batch, and other functions of whole batches."""
    if not tf.inside_function():
        if loss not in _traced_alone:
            with weighting_losses(None):
                _traced_alone[loss] = _flow_alone(loss, y_true, y_pred)
        weight.differences.note(f"the loss {loss.name}", _traced_alone[loss])
    with overridden([(weight, "loss_name", loss.name)]):
        return keras_call(loss, y_true, y_pred, sample_weight)


def _flow_alone(loss: Any, y_true: Any, y_pred: Any) -> Flow:
    """The flow of a loss's values, from a graph of its own, for a step that runs eagerly."""
    found = [Flow("unknown")]

    @tf.function(autograph=False)
    def traced(*batch: Any) -> None:
        found.append(Dataflow(batch).of(loss.call(*batch)))

    def spec(tensor: Any) -> tf.TensorSpec:
        return tf.TensorSpec([None, *tensor.shape[1:]], loss.dtype)

    with contextlib.suppress(Exception):  # a user's function may need concrete values
        traced.get_concrete_function(*tf.nest.map_structure(spec, (y_true, y_pred)))
    return found[-1]


def _reduce_weighted_values(
    weight: ReplicaWeight, keras_reduce: Any, values: Any, *arguments: Any, **options: Any
) -> Any:
    if weight.loss_name is not None:
        weight.note(f"the loss {weight.loss_name}", values)
    return keras_reduce(values, *arguments, **options)


def _apply_mask(
    weight: ReplicaWeight,
    keras_apply_mask: Any,
    sample_weight: Any,
    mask: Any,
    dtype: Any,
    reduction: Any,
) -> Any:
    """Weights of masked values, based on the masks of all replicas.

    Keras divides by the valid entries of this replica; one process divides by those of the global
    batch. Both counts are summed over replicas, and the ratio is corrected.
    """
    weights = keras_apply_mask(sample_weight, mask, dtype, reduction)
    if mask is None or reduction not in ("mean", "sum_over_batch_size"):
        return weights
    entries = tf.cast(tf.size(mask), tf.float32)
    valid = tf.reduce_sum(tf.cast(mask, tf.float32))
    all_entries, all_valid = weight.all_sum([entries, valid])
    ratio = tf.math.divide_no_nan(all_entries * valid, all_valid * entries)
    out = weights * tf.cast(ratio, weights.dtype)
    # Keras has divided by the number of valid entries; the ratio corrects it to that of the batch.
    weight.flows.declare(out, weight.flows.of(mask))
    return out


def _reduce_values(
    weight: ReplicaWeight,
    keras_reduce: Any,
    values: Any,
    sample_weight: Any = None,
    reduction: str | None = "sum_over_batch_size",
) -> Any:
    """Reduces the values per example to an estimate of the reduction over the global batch."""
    loss = keras_reduce(values, sample_weight, reduction)
    if reduction in (None, "none"):
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


# ---------------------------------------------------------------- losses of add_loss


def _aggregate_additional_loss(
    weight: ReplicaWeight, keras_aggregate: Any, trainer: Any, loss: Any
) -> Any:
    """Adds up the losses of `add_loss` as Keras does, and all values of a loss per example."""
    summed = BaseTrainer._aggregate_additional_loss(trainer, loss)
    if weight.has_examples(loss):
        return weight.estimate_of_sum(summed)
    return weight.estimate_of_scalar(summed)


def _with_own_losses(
    weight: ReplicaWeight, keras_method: Any, layer: Any, *arguments: Any, **named: Any
) -> Any:
    """Separates the losses that layers pass to `add_loss` by replica.

    The replicas of one process call the same layers, and are traced in turns. Without this, one
    replica would find the losses of another in `model.losses`.
    """
    own = weight.layer_losses.setdefault(id(layer), [])
    with overridden([(layer, "_losses", own)]):
        return keras_method(layer, *arguments, **named)


# ---------------------------------------------------------------- layers and metrics


def _by_example(
    weight: ReplicaWeight, function: Callable[..., Any], *arguments: Any, **named: Any
) -> Any:
    """Calls a function whose result has the flow of the second argument, a tensor."""
    out = function(*arguments, **named)
    before = tf.nest.flatten(arguments[1:2], expand_composites=True)
    if len(before) == 1:
        weight.flows.declare(out, weight.flows.of(before[0]))
    return out


def _sparse_lookup(weight: ReplicaWeight, lookup: Any, *arguments: Any, **named: Any) -> Any:
    """Declares a row per example for `tf.nn.embedding_lookup_sparse`, which looks up unique ids."""
    out = lookup(*arguments, **named)
    parts = tf.nest.flatten([arguments, named], expand_composites=True)
    flows = [weight.flows.of(part) for part in parts if tf.is_tensor(part)]
    if any(flow.axes for flow in flows) and worst_flow(flows) is None:
        weight.flows.declare(out, Flow("rows", ((0, EXAMPLES),)))
    return out


def _segment_ids(weight: ReplicaWeight, function: Any, splits: Any, *a: Any, **k: Any) -> Any:
    """Row of each value of a ragged tensor."""
    out = function(splits, *a, **k)
    if tag_of(label := weight.flows.of(splits).label(0)) == "splits":
        of_values = ((0, ("selected", label[2])),)
        weight.flows.declare(out, Flow("rows", of_values, sized=SEGMENTS))
    return out


def _ragged(weight: ReplicaWeight, from_partition: Any, values: Any, *a: Any, **k: Any) -> Any:
    """Recognizes the splits that a step makes of the number of values of each example."""
    out = from_partition(values, *a, **k)
    label: Any = weight.flows.of(values).label(0) if tf.is_tensor(values) else None
    joined = without_identity(out.row_splits).op if is_symbolic(out.row_splits) else None
    if tag_of(label) != "selected" or joined is None or joined.type != "ConcatV2":
        return out
    ends = joined.inputs[1].op
    if ends.type == "Cumsum" and not ends.get_attr("exclusive") and not ends.get_attr("reverse"):
        if weight.flows.of(ends.inputs[0]).axes == ((0, EXAMPLES),):
            splits = Flow("rows", ((0, ("splits", EXAMPLES, label[1])),))
            weight.flows.declare(out.row_splits, splits)
    return out


def _batch_jacobian(
    weight: ReplicaWeight, jacobian: Any, tape: Any, target: Any, *arguments: Any, **named: Any
) -> Any:
    out = jacobian(tape, target, *arguments, **named)
    if _is_by_row(flow := weight.flows.of(target)):
        weight.flows.declare(out, flow)
    return out


def _jacobian(
    weight: ReplicaWeight, jacobian: Any, tape: Any, target: Any, sources: Any, *a: Any, **k: Any
) -> Any:
    """Derivatives of rows: by weights, rows; by examples, a block for each pair of examples."""
    flow = weight.flows.of(target)
    if not _is_by_row(flow):
        return jacobian(tape, target, sources, *a, **k)
    with tracing_with(None):  # the rows' gradients are not those of a loss
        out = jacobian(tape, target, sources, *a, **k)
    for source, each in zip(tf.nest.flatten(sources), tf.nest.flatten(out), strict=True):
        of_source = weight.flows.of(source)
        if of_source.kind == "fixed":
            weight.flows.declare(each, flow)
        elif _is_by_row(of_source) and is_symbolic(each):
            pairs = [flow.axes[0], (target.shape.rank, of_source.label(0))]
            weight.flows.declare(each, Flow("rows", origin=each.op, diagonal=True).along(pairs))
    return out


def _is_by_row(flow: Flow) -> bool:
    """Whether a value has a row for each example along its first axis only."""
    return flow.kind == "rows" and not flow.affine and {axis for axis, _ in flow.axes} == {0}


def _moments(weight: ReplicaWeight, keras_moments: Any, layer: Any, inputs: Any, mask: Any) -> Any:
    """The moments of a synchronized BatchNormalization.

    With a mask, Keras's layer computes the moments of its own replica. Here they are those of the
    valid entries of the global batch, as in one process. A replica without examples computes with a
    copy of one example, which affects neither the moments nor their gradients.
    """
    if not layer.synchronized or (mask is None and not weight.uneven):
        return keras_moments(layer, inputs, mask)
    valid = tf.fill(tf.shape(inputs), weight.examples > 0)
    if mask is not None:
        valid &= tf.cast(tf.expand_dims(mask, -1), tf.bool)
    of_all = tf.distribute.get_replica_context().all_reduce
    total = tf.distribute.ReduceOp.SUM

    def summed(values: Any) -> Any:
        return tf.reduce_sum(values, layer._reduction_axes)

    ones = tf.cast(valid, inputs.dtype)
    count, sums = of_all(total, [summed(ones), summed(tf.where(valid, inputs, 0))])
    count += 0 if mask is None else keras.config.epsilon()
    mean = tf.math.divide_no_nan(sums, count)
    shape = [1] * inputs.shape.rank
    shape[layer.axis] = -1
    apart = tf.where(valid, inputs - tf.reshape(mean, shape), 0)
    (squares,) = of_all(total, [summed(tf.square(apart))])
    moments = mean, tf.math.divide_no_nan(squares, count)
    return tuple(tf.where(weight.examples > 0, m, tf.stop_gradient(m)) for m in moments)


def _update_mean(
    weight: ReplicaWeight, keras_update: Any, metric: Any, values: Any, sample_weight: Any = None
) -> Any:
    """Updates a mean; a scalar counts as the mean of a batch, weighted by the fraction."""
    if is_symbolic(values):
        weight.note(f"the metric {metric.name}", values)
    if sample_weight is None:
        values = tf.convert_to_tensor(values)
        if values.shape == ():
            if values.dtype.is_floating:
                values = weight.estimate_of_scalar(values)
            sample_weight = weight.fraction
    return keras_update(metric, values, sample_weight)


def _update_sum(
    weight: ReplicaWeight, keras_update: Any, metric: Any, values: Any, sample_weight: Any = None
) -> Any:
    """Updates a sum: replicas' sums are added, and their means weighted by their fractions."""
    if weight.reduction_of(values) == "mean":
        values = values * tf.cast(weight.fraction, values.dtype)
    return keras_update(metric, values, sample_weight)


# ---------------------------------------------------------------- training loops by hand


def _compute_average_loss(
    weight: ReplicaWeight,
    tf_average: Any,
    per_example_loss: Any,
    sample_weight: Any = None,
    global_batch_size: Any = None,
) -> Any:
    if global_batch_size is None or (
        tf.is_tensor(global_batch_size)
        and (
            not is_symbolic(global_batch_size) or weight.flows.of(global_batch_size).kind == "size"
        )
    ):
        # Eager: users pass a size that they know as a Python number.
        rows = tf.shape(per_example_loss)[0]
        return tf_average(per_example_loss, sample_weight, rows)
    return weight.estimate_of_sum(tf_average(per_example_loss, sample_weight, global_batch_size))


def _scale_regularization(weight: ReplicaWeight, original: Any, regularization_loss: Any) -> Any:
    return tf.reduce_sum(regularization_loss)


_NN = (tf.nn, tf.compat.v1.nn, tf.compat.v2.nn)

_SPARSE_LOOKUPS = ("embedding_lookup_sparse", "safe_embedding_lookup_sparse")

HOOKS: list[tuple[Any, str, Callable[..., Any]]] = [
    # Replicas are weighted by this module's rule, not by Keras's division by their number.
    (loss_module, "scale_loss_for_distribution", lambda weight, keras_scale, value: value),
    (loss_module, "unscale_loss_for_distribution", _unscale),
    (loss_module, "apply_mask", _apply_mask),
    (loss_module, "reduce_values", _reduce_values),
    (loss_module, "reduce_weighted_values", _reduce_weighted_values),
    (keras.losses.Loss, "__call__", _call_loss),
    (Trainer, "_aggregate_additional_loss", _aggregate_additional_loss),
    # The methods of layers that read or write their list of losses.
    *[(keras.Layer, n, _with_own_losses) for n in ("add_loss", "_get_own_losses", "_clear_losses")],
    # The documentation describes how these layers use the examples of one replica.
    (keras.layers.BatchNormalization, "call", _by_example),
    (keras.layers.TextVectorization, "call", _by_example),
    (_ImageLayer, "call", _by_example),
    (keras_nn, "ctc_loss", _by_example),  # it loops over the examples
    (keras.layers.BatchNormalization, "_moments", _moments),
    (keras.metrics.Mean, "update_state", _update_mean),
    (keras.metrics.Sum, "update_state", _update_sum),
    # The two functions that TensorFlow's tutorial on custom training loops uses.
    *[(nn, "compute_average_loss", _compute_average_loss) for nn in _NN],
    *[(nn, "scale_regularization_loss", _scale_regularization) for nn in _NN],
    (tf.GradientTape, "gradient", tape_gradient),
    (tf, "gradients", graph_gradients),
    (tf.GradientTape, "batch_jacobian", _batch_jacobian),
    (tf.GradientTape, "jacobian", _jacobian),
    (tf.RaggedTensor, "_from_row_partition", _ragged),
    (segment_id_ops, "row_splits_to_segment_ids", _segment_ids),
    *[(tf.nn, name, _sparse_lookup) for name in _SPARSE_LOOKUPS],
    *assigned_weights.HOOKS,
]
"""(owner, name of a function, its replacement; see `install_hooks`)."""
