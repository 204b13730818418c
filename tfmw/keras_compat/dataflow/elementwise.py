"""Flows of sums, products, functions of each element, and reductions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tfmw.keras_compat.dataflow.flow import (
    BAD,
    FIXED,
    Flow,
    Rule,
    aligned_flows,
    bad_flow,
    highest_kind,
    joined_flow,
    nonlinear_flow,
    product_flow,
    total_flow,
    words,
)
from tfmw.keras_compat.dataflow.shapes import broadcast_axes
from tfmw.keras_compat.graph import static_value

if TYPE_CHECKING:
    from tfmw.keras_compat.dataflow.walk import Dataflow

SAME = words(
    "Identity Cast Neg StopGradient EnsureShape PreventGradient CheckNumerics Snapshot "
    "CheckNumericsV2 OptimizationBarrier Real"
)

_SUMS = words("Add AddV2 AddN Sub AccumulateNV2 BiasAdd")

_QUOTIENTS = words("RealDiv DivNoNan Div")

_ELEMENTWISE = words(
    "Abs Acos Acosh Asin Asinh Atan Atanh Atan2 Ceil Cos Cosh Digamma Elu EluGrad Erf Erfc Erfinv "
    "Exp Expm1 Floor FloorDiv FloorMod Mod TruncateDiv TruncateMod Inv InvGrad Reciprocal "
    "ReciprocalGrad IsFinite IsInf IsNan LeakyRelu LeakyReluGrad Lgamma Log Log1p LogicalAnd "
    "LogicalOr LogicalNot Maximum Minimum Pow Relu Relu6 ReluGrad Relu6Grad Rint Round Rsqrt "
    "RsqrtGrad Selu SeluGrad Sigmoid SigmoidGrad Sign Sin Sinh Softplus SoftplusGrad Softsign "
    "SoftsignGrad Sqrt SqrtGrad Square SquaredDifference Tan Tanh TanhGrad Equal NotEqual Less "
    "LessEqual Greater GreaterEqual ApproximateEqual Xlogy Xlog1py Xdivy Ndtri ClipByValue "
    "LogicalXor BitwiseAnd BitwiseOr BitwiseXor Igamma Igammac Zeta Polygamma Betainc"
)

BINARY = words("Mul MulNoNan Select SelectV2") | _SUMS | _QUOTIENTS | _ELEMENTWISE

REDUCTIONS = words("Sum Mean Max Min Prod All Any ArgMax ArgMin EuclideanNorm")


def _same(flows: Dataflow, op: Any, inputs: list[Flow]) -> Any:
    return inputs[0]


def _sum_rule(flows: Dataflow, op: Any, inputs: list[Flow]) -> Flow:
    if op.type == "BiasAdd":
        return joined_flow(op, [inputs[0], inputs[1]._replace(axes=())])
    aligned = aligned_flows(op, inputs)
    kinds = {flow.kind for flow in inputs}
    if kinds == {"size", "fixed"} and _small(op, inputs):
        return next(flow for flow in aligned if flow.kind == "size")
    return joined_flow(op, aligned)


def _small(op: Any, inputs: list[Flow]) -> bool:
    """Whether the fixed inputs only prevent a division by 0, or only give a shape, as `0 * x`."""
    limit = 1.0 if op.type == "Maximum" else 1e-3

    def small(tensor: Any, flow: Flow) -> bool:
        factors = tensor.op.inputs if tensor.op.type in ("Mul", "MulNoNan") else ()
        if any(value is not None and not np.any(value) for value in map(static_value, factors)):
            return True
        return flow.constant is not None and bool(np.all(np.abs(flow.constant) <= limit))

    pairs = zip(op.inputs, inputs, strict=True)
    return all(small(tensor, flow) for tensor, flow in pairs if flow.kind == "fixed")


def _product_rule(flows: Dataflow, op: Any, inputs: list[Flow]) -> Flow:
    aligned = aligned_flows(op, inputs)
    if inputs[0].elements is not None and inputs[1].kind == "fixed" and not op.inputs[1].shape.rank:
        return product_flow(op, aligned)._replace(elements=inputs[0].elements)
    return product_flow(op, aligned, op.type in _QUOTIENTS)


def _elementwise(flows: Dataflow, op: Any, inputs: list[Flow]) -> Flow:
    if op.type == "Maximum" and {flow.kind for flow in inputs} == {"size", "fixed"}:
        if _small(op, inputs):
            return next(flow for flow in aligned_flows(op, inputs) if flow.kind == "size")
    if all(flow.kind == "fixed" for flow in inputs):
        return FIXED
    return nonlinear_flow(op, aligned_flows(op, inputs))


def _select(flows: Dataflow, op: Any, inputs: list[Flow]) -> Flow:
    if inputs[0].kind in ("fixed", "size"):
        chosen = aligned_flows(op, inputs)
        union = joined_flow(op, chosen[1:])
        return product_flow(op, [union, chosen[0]._replace(kind="fixed", degree=0)])
    return _elementwise(flows, op, inputs)


def _reduction(flows: Dataflow, op: Any, inputs: list[Flow]) -> Flow:
    tensor, flow = op.inputs[0], inputs[0]
    rank = tensor.shape.rank
    if flow.kind == "fixed":
        return FIXED
    if flow.elements is not None and op.type == "Prod":
        degrees = [each.degree for each in flow.elements]
        kinds = highest_kind(list(flow.elements)) if flow.elements else "fixed"
        known = [d for d in degrees if d is not None]
        return Flow(kinds, degree=sum(known) if len(known) == len(degrees) else None)
    if rank is None:
        if op.outputs[0].shape.rank != 0:
            return bad_flow("unknown", op)
        axes = {axis for axis, _ in flow.axes}
    else:
        found = _axes_of(op, inputs[1], rank)
        if found is None:
            if op.outputs[0].shape.rank != 0:
                return bad_flow("unknown", op)
            found = set(range(rank))
        axes = found
    keep = op.type not in ("ArgMax", "ArgMin") and bool(op.get_attr("keep_dims"))
    return total_flow(op, flow, axes, op.type, keep)


def _axes_of(op: Any, flow: Flow, rank: int) -> set[int] | None:
    """The axes that a reduction names; None if they are not known."""
    axes = op.inputs[1]
    value = static_value(axes) if flow.constant is None else flow.constant
    if value is not None:
        return {int(a) % rank for a in np.ravel(value)} if rank else set()
    if axes.op.type == "BroadcastGradientArgs":
        return broadcast_axes(axes, op.inputs[0].shape)
    return None


def _l2_loss(flows: Dataflow, op: Any, inputs: list[Flow]) -> Flow:
    flow = nonlinear_flow(op, inputs)
    return flow if flow.kind in BAD else total_flow(op, flow, {a for a, _ in flow.axes}, "Sum")


def _last_axis(flows: Dataflow, op: Any, inputs: list[Flow]) -> Any:
    """Softmax, sorting, and whatever else treats the last axis as a whole."""
    flow = nonlinear_flow(op, aligned_flows(op, inputs))
    rank = op.inputs[0].shape.rank
    if flow.kind in BAD or rank is None:
        return flow
    if flow.label(rank - 1) is not None and flow.kind == "rows":
        return bad_flow("compared", op, [flow])
    return flow


def _cross_entropy(flows: Dataflow, op: Any, inputs: list[Flow]) -> Any:
    logits, labels = inputs
    if any(flow.kind == "reduced" or flow.affine for flow in inputs):
        return bad_flow("nonlinear", op, inputs)
    if all(flow.kind == "fixed" for flow in inputs):
        return FIXED
    if logits.label(1) is not None or (labels.label(1) is not None and labels.kind == "rows"):
        return bad_flow("compared", op, inputs)
    both = nonlinear_flow(op, [logits, labels.along([])] if logits.axes else inputs)
    if logits.label(0) is not None and labels.label(0) not in (None, logits.label(0)):
        return bad_flow("compared", op, inputs)
    rows = [a for a in both.axes if a[0] == 0]
    return [both.along(rows), both.along(rows)]


def _identities(flows: Dataflow, op: Any, inputs: list[Flow]) -> Any:
    return inputs


RULES: dict[str, Rule] = {
    **dict.fromkeys(SAME, _same),
    **dict.fromkeys(_SUMS, _sum_rule),
    **dict.fromkeys(["Mul", "MulNoNan", *_QUOTIENTS], _product_rule),
    **dict.fromkeys(_ELEMENTWISE, _elementwise),
    **dict.fromkeys(["Select", "SelectV2"], _select),
    **dict.fromkeys(REDUCTIONS, _reduction),
    **dict.fromkeys(["Softmax", "LogSoftmax", "TopKV2", "TopK"], _last_axis),
    **dict.fromkeys(
        ["SoftmaxCrossEntropyWithLogits", "SparseSoftmaxCrossEntropyWithLogits"], _cross_entropy
    ),
    **dict.fromkeys(["TensorListFromTensor", "TensorListStack"], _same),
    "IdentityN": _identities,
    "L2Loss": _l2_loss,
}
