"""Gradients of a replica's losses that a step computes with a tape.

Gradients by weights are estimates of those of the global loss. If the step computes with them
before an optimizer does, they are all-reduced at once (`Exchanges.gradients`). Gradients by the
examples are those of one process: they are rescaled, because a replica's mean divides by its own
number of examples, and that of one process by all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tfmw.compat.dataflow.flow import BAD, FIXED, Flow
from tfmw.compat.graph import is_symbolic
from tfmw.errors import UsageError

if TYPE_CHECKING:
    from tfmw.compat.losses import ReplicaWeight


def scaled(grads: Iterable[Any], factor: Any) -> list[Any]:
    """Multiplies gradients, dense or `tf.IndexedSlices`, by a scalar; None stays None."""
    factors: dict[tf.DType, tf.Tensor] = {}  # one for each dtype, not one for each gradient

    def one(grad: Any) -> Any:
        if isinstance(grad, tf.IndexedSlices):
            return tf.IndexedSlices(one(grad.values), grad.indices, grad.dense_shape)
        if grad.dtype not in factors:
            factors[grad.dtype] = tf.cast(factor, grad.dtype)
        return grad * factors[grad.dtype]

    return [None if grad is None else one(grad) for grad in grads]


def tape_gradient(
    weight: ReplicaWeight,
    gradient: Any,
    tape: Any,
    target: Any,
    sources: Any,
    output_gradients: Any = None,
    *arguments: Any,
    **options: Any,
) -> Any:
    """Replaces `tf.GradientTape.gradient` in a step."""

    def compute(output_gradients: Any) -> Any:
        return gradient(tape, target, sources, output_gradients, *arguments, **options)

    return _in_step(weight, compute, target, sources, output_gradients)


def graph_gradients(
    weight: ReplicaWeight,
    gradients: Any,
    ys: Any,
    xs: Any,
    grad_ys: Any = None,
    *arguments: Any,
    **options: Any,
) -> Any:
    """Replaces `tf.gradients` in a step."""

    def compute(grad_ys: Any) -> Any:
        return gradients(ys, xs, grad_ys, *arguments, **options)

    return _in_step(weight, compute, ys, tf.nest.flatten(xs), grad_ys)


def _in_step(
    weight: ReplicaWeight,
    compute: Callable[[Any], Any],
    target: Any,
    sources: Any,
    output_gradients: Any,
) -> Any:
    """Gradients that a step gets in place of those of its replica's losses alone.

    Args:
        compute: (gradients of the targets) -> gradients, in the structure of `sources`.
    """
    if output_gradients is not None:
        return compute(output_gradients)
    flat = tf.nest.flatten(sources)
    weighted = _output_gradients(weight, target)
    grads = tf.nest.flatten(compute(weighted))
    for loss in tf.nest.flatten(target):
        if is_symbolic(loss) and any(hasattr(source, "handle") for source in flat):
            weight.note("the loss of train_step", loss)
    flows = [weight.flows.of(source) for source in flat]
    places = [i for i, flow in enumerate(flows) if _is_weight(flat[i], flow)]
    estimates = _by_weights(weight, target, [grads[i] for i in places])
    for i, grad in zip(places, estimates, strict=True):
        grads[i] = grad
    if not (_weighs_outputs(weight) or _are_added(weight, target)):
        for i, flow in enumerate(flows):
            if grads[i] is not None and _is_of_examples(weight, target, flat[i], flow):
                bad = weight.flows.of(grads[i]).kind in BAD
                (grads[i],) = scaled([grads[i]], weight.fraction)
                if not bad:
                    weight.flows.declare(_values(grads[i]), Flow("rows", flow.axes))
    return tf.nest.pack_sequence_as(sources, grads)


def _is_weight(source: Any, flow: Flow) -> bool:
    return hasattr(source, "handle") or (is_symbolic(source) and flow.kind == "fixed")


def _is_of_examples(weight: ReplicaWeight, target: Any, source: Any, flow: Flow) -> bool:
    """Whether a source has an axis of examples."""
    if hasattr(source, "handle"):
        return False
    if is_symbolic(source):
        return flow.kind in ("rows", "size") and any(axis >= 0 for axis, _ in flow.axes)
    scalars = all(loss.shape.rank == 0 for loss in tf.nest.flatten(target))
    return scalars and bool(source.shape.rank) and source.shape[0] == int(weight.examples)


def _values(grad: Any) -> Any:
    return grad.values if isinstance(grad, tf.IndexedSlices) else grad


def _by_weights(weight: ReplicaWeight, target: Any, grads: list[Any]) -> list[Any]:
    """Gradients of this replica's losses -> estimates of those of the global loss, if possible."""
    if _are_added(weight, target) or _weighs_outputs(weight):
        grads = scaled(grads, _inverse(weight))
    for grad in grads:
        if grad is not None:
            weight.flows.declare(_values(grad), Flow("reduced"))
    if weight.exchanges.gradients and not weight.is_local:
        dense = [i for i, grad in enumerate(grads) if isinstance(grad, tf.Tensor)]
        for i, total in zip(dense, _of_all(weight, [grads[i] for i in dense]), strict=True):
            grads[i] = total
        grads = [_slices_of_all(weight, g) if isinstance(g, tf.IndexedSlices) else g for g in grads]
    weight.gradients += [_values(grad) for grad in grads if grad is not None]
    return grads


def _slices_of_all(weight: ReplicaWeight, grad: tf.IndexedSlices) -> tf.IndexedSlices:
    """Estimates of a sparse gradient -> that of the global batch, as one process has it."""
    local = tf.IndexedSlices(
        tf.stop_gradient(grad.values), tf.identity(grad.indices), grad.dense_shape
    )
    weight.flows.declare(local.indices, weight.flows.of(grad.indices))
    total = weight.slices_of_all(local)

    @tf.custom_gradient
    def differentiated_once(values: Any, of_replica: Any) -> Any:
        def refuse(upstream: Any) -> Any:
            raise UsageError(
                "a step differentiates the sparse gradient of an embedding, which several "
                "replicas can sum only once: look the rows up in tf.convert_to_tensor(embeddings), "
                "whose gradient is dense, or train on one replica."
            )

        return tf.identity(values), refuse

    values = differentiated_once(total.values, grad.values)
    indices = tf.identity(total.indices)
    for part in (values, indices):
        weight.flows.declare(part, FIXED)
    return tf.IndexedSlices(values, indices, grad.dense_shape)


def _of_all(weight: ReplicaWeight, grads: list[Any]) -> list[Any]:
    """Estimates of gradients -> gradients of the global batch, which are differentiable."""

    @tf.custom_gradient
    def exchanged(*local: Any) -> Any:
        return weight.means(local), lambda *upstream: weight.means(upstream)

    if not grads:
        return []
    totals = tf.nest.flatten(exchanged(*grads))
    for total, grad in zip(totals, grads, strict=True):
        total.set_shape(grad.shape)
        weight.flows.declare(total, FIXED)
    return totals


def _weighs_outputs(weight: ReplicaWeight) -> bool:
    return weight.coupled and weight.uneven and not (weight.in_loss or weight.is_local)


def _are_added(weight: ReplicaWeight, target: Any) -> bool:
    """Whether all losses add up over replicas."""
    losses = [loss for loss in tf.nest.flatten(target) if is_symbolic(loss)]
    return bool(losses) and all(_is_added(weight, loss) for loss in losses)


def _is_added(weight: ReplicaWeight, loss: Any) -> bool:
    """Whether a loss is a value per example, or a sum of them, which add up over replicas."""
    if not is_symbolic(loss):
        return False
    flow = weight.flows.of(loss)
    if flow.kind == "rows":
        return flow.degree != -1
    return flow.kind in ("reduced", "size") and flow.degree == 1


def _output_gradients(weight: ReplicaWeight, target: Any) -> Any:
    """Output gradients of the losses, if the replica's weight is to be applied there.

    Gradients that flow from other replicas' losses to this replica's examples have the weights of
    those replicas. So this replica's weight must be applied before the gradients are computed. It
    is removed from the gradients again, as they get it later. Otherwise losses that add up have the
    inverse of the weight, if they are beside means.
    """
    losses = tf.nest.flatten(target)
    added = [_is_added(weight, loss) for loss in losses]
    weighs = _weighs_outputs(weight)
    if _are_added(weight, target) or not (weighs or any(added)):
        return None
    one = tf.ones([], tf.float64)
    of_sum, of_mean = (one, weight.fraction) if weighs else (_inverse(weight), one)
    outputs = [
        tf.ones_like(loss) * tf.cast(of_sum if adds else of_mean, loss.dtype)
        for loss, adds in zip(losses, added, strict=True)
    ]
    return tf.nest.pack_sequence_as(target, outputs)


def _inverse(weight: ReplicaWeight) -> tf.Tensor:
    """The inverse of a replica's fraction of the examples; 0 without examples."""
    return tf.math.divide_no_nan(tf.ones([], tf.float64), weight.fraction)
