"""Flows of sums, products, elementwise functions, reductions and normalization."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from tfmw.compat.dataflow.flow import (
    BAD,
    FIXED,
    Flow,
    aligned_flows,
    bad_flow,
    has_total,
    highest_kind,
    joined_flow,
    known_rank,
    nonlinear_flow,
    product_flow,
    rules,
    total_flow,
)
from tfmw.compat.dataflow.shapes import padding_of
from tfmw.compat.graph import static_value

_SAME = (
    "Identity Cast Neg StopGradient EnsureShape PreventGradient CheckNumerics Snapshot "
    "CheckNumericsV2 OptimizationBarrier Real"
)

_SUMS = "Add AddV2 AddN Sub AccumulateNV2 BiasAdd"

_QUOTIENTS = "RealDiv DivNoNan Div"

_ELEMENTWISE = (
    "Abs Acos Acosh Asin Asinh Atan Atanh Atan2 Ceil Cos Cosh Digamma Elu EluGrad Erf Erfc Erfinv "
    "Exp Expm1 Floor FloorDiv FloorMod Mod TruncateDiv TruncateMod Inv InvGrad Reciprocal "
    "ReciprocalGrad IsFinite IsInf IsNan LeakyRelu LeakyReluGrad Lgamma Log Log1p LogicalAnd "
    "LogicalOr LogicalNot Maximum Minimum Pow Relu Relu6 ReluGrad Relu6Grad Rint Round Rsqrt "
    "RsqrtGrad Selu SeluGrad Sigmoid SigmoidGrad Sign Sin Sinh Softplus SoftplusGrad Softsign "
    "SoftsignGrad Sqrt SqrtGrad Square SquaredDifference Tan Tanh TanhGrad Equal NotEqual Less "
    "LessEqual Greater GreaterEqual ApproximateEqual Xlogy Xlog1py Xdivy Ndtri ClipByValue "
    "LogicalXor BitwiseAnd BitwiseOr BitwiseXor Igamma Igammac Zeta Polygamma Betainc"
)

_REDUCTIONS = "Sum Mean Max Min Prod All Any ArgMax ArgMin EuclideanNorm"

SAME = frozenset(_SAME.split())
BINARY = frozenset(f"Mul MulNoNan Select SelectV2 {_SUMS} {_QUOTIENTS} {_ELEMENTWISE}".split())
REDUCTIONS = frozenset(_REDUCTIONS.split())


def first_flow(op: Any, inputs: list[Flow]) -> Flow:
    """Flow of an operation that keeps the flow of its first input."""
    return inputs[0]


def _sum_rule(op: Any, inputs: list[Flow]) -> Flow:
    if op.type == "BiasAdd":
        return joined_flow(op, [inputs[0], inputs[1]._replace(axes=())])
    aligned = aligned_flows(op, inputs)
    kinds = {flow.kind for flow in inputs}
    if kinds == {"size", "fixed"} and _small(op, inputs):
        return next(flow for flow in aligned if flow.kind == "size")
    if kinds != {"fixed"}:
        aligned = [flow for flow in aligned if not is_zero(flow)] or aligned
    return joined_flow(op, aligned)


def is_zero(flow: Flow) -> bool:
    """Whether a value is a constant 0, as the initial value of a sum is."""
    return flow.kind == "fixed" and flow.constant is not None and not np.any(flow.constant)


def _small(op: Any, inputs: list[Flow]) -> bool:
    """Whether the fixed inputs only prevent a division by 0, or give a shape, as in `0 * x`."""
    limit = 1.0 if op.type == "Maximum" else 1e-3

    def small(tensor: Any, flow: Flow) -> bool:
        factors = tensor.op.inputs if tensor.op.type in ("Mul", "MulNoNan") else ()
        if any(value is not None and not np.any(value) for value in map(static_value, factors)):
            return True
        return flow.constant is not None and bool(np.all(np.abs(flow.constant) <= limit))

    pairs = zip(op.inputs, inputs, strict=True)
    return all(small(tensor, flow) for tensor, flow in pairs if flow.kind == "fixed")


def _product_rule(op: Any, inputs: list[Flow]) -> Flow:
    aligned = aligned_flows(op, inputs)
    if inputs[0].elements is not None and inputs[1].kind == "fixed" and not op.inputs[1].shape.rank:
        return product_flow(op, aligned)._replace(elements=inputs[0].elements)
    return product_flow(op, aligned, op.type in _QUOTIENTS.split())


def _elementwise(op: Any, inputs: list[Flow]) -> Flow:
    if op.type == "Maximum" and {flow.kind for flow in inputs} == {"size", "fixed"}:
        if _small(op, inputs):
            return next(flow for flow in aligned_flows(op, inputs) if flow.kind == "size")
    if all(flow.kind == "fixed" and flow.origin is None for flow in inputs):
        return FIXED
    return nonlinear_flow(op, aligned_flows(op, inputs))


def _select(op: Any, inputs: list[Flow]) -> Flow:
    if inputs[0].kind in ("fixed", "size"):
        chosen = aligned_flows(op, inputs)
        union = joined_flow(op, chosen[1:])
        if union.kind in BAD:
            return union
        return product_flow(op, [union, chosen[0]._replace(kind="fixed", degree=0)])
    return _elementwise(op, inputs)


def _reduction(op: Any, inputs: list[Flow]) -> Flow:
    tensor, flow = op.inputs[0], inputs[0]
    rank = tensor.shape.rank
    if flow.kind == "fixed":
        return FIXED
    if flow.elements is not None and op.type == "Prod":
        known = [each.degree for each in flow.elements if each.degree is not None]
        degree = sum(known) if len(known) == len(flow.elements) else None
        return Flow(highest_kind(flow.elements), degree=degree)
    axes = None if rank is None else _axes_of(op, inputs[1], rank)
    if axes is None:
        if op.outputs[0].shape.rank != 0:
            return bad_flow("unknown", op)
        axes = {axis for axis, _ in flow.axes} if rank is None else set(range(rank))
    counts = op.type == "Sum" and flow.kind == "size"  # the length of each row, as padded
    if (counts or op.type == "Mean") and (padding := padding_of(tensor, flow, axes)) is not None:
        return bad_flow("compared", padding)
    keep = op.type not in ("ArgMax", "ArgMin") and bool(op.get_attr("keep_dims"))
    return total_flow(op, flow, axes, op.type, keep)


def _axes_of(op: Any, flow: Flow, rank: int) -> set[int] | None:
    """The axes of a reduction; None if they are not known."""
    axes = op.inputs[1]
    value = static_value(axes) if flow.constant is None else flow.constant
    if value is not None:
        return {int(a) % rank for a in np.ravel(value)} if rank else set()
    if axes.op.type == "BroadcastGradientArgs":
        return _broadcast_axes(axes, op.inputs[0].shape)
    return None


def _broadcast_axes(axes: Any, shape: Any) -> set[int] | None:
    """The axes along which an operand was broadcast, in the gradient of a binary operation."""
    vectors = [_static_dims(t) for t in axes.op.inputs]
    own = vectors[axes.value_index]
    if own is None:
        return None
    lead = shape.rank - len(own)
    ones = {lead + i for i, d in enumerate(own) if d == 1 and shape[lead + i] != 1}
    return set(range(lead)) | ones


def _static_dims(vector: Any) -> list[int | None] | None:
    """The known dimensions of a shape that is the value of a tensor."""
    value = static_value(vector)
    if value is not None:
        return [int(d) for d in value]
    if vector.op.type == "Shape" and vector.op.inputs[0].shape.rank is not None:
        return vector.op.inputs[0].shape.as_list()
    return None


def _l2_loss(op: Any, inputs: list[Flow]) -> Flow:
    flow = nonlinear_flow(op, inputs)
    return flow if flow.kind in BAD else total_flow(op, flow, {a for a, _ in flow.axes}, "Sum")


def _last_axis(op: Any, inputs: list[Flow]) -> Any:
    """Flow of operations on the whole last axis, such as softmax and sorting."""
    flow = nonlinear_flow(op, aligned_flows(op, inputs))
    rank = op.inputs[0].shape.rank
    if flow.kind in BAD or rank is None:
        return flow
    if flow.label(rank - 1) is not None and flow.kind == "rows":
        return bad_flow("compared", op, [flow])
    return flow


def _cross_entropy(op: Any, inputs: list[Flow]) -> Any:
    logits, labels = inputs
    if has_total(inputs):
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


def _matmul(op: Any, inputs: list[Flow]) -> Flow:
    ranks = [known_rank(tensor) for tensor in list(op.inputs)[:2]]
    names = ("transpose_a", "transpose_b") if op.type == "MatMul" else ("adj_x", "adj_y")
    turned = [op.get_attr(name) for name in names]
    batch = [f"b{i}" for i in range(max(ranks) - 2)]
    left = ["i", "k"][:: -1 if turned[0] else 1]
    right = ["k", "j"][:: -1 if turned[1] else 1]
    terms = [
        batch[len(batch) - (ranks[0] - 2) :] + left,
        batch[len(batch) - (ranks[1] - 2) :] + right,
    ]
    return _contraction(op, inputs[:2], terms, [*batch, "i", "j"])


def _contraction(op: Any, inputs: list[Flow], terms: list[list[str]], result: list[str]) -> Flow:
    """Flow of a product of tensors with named axes, summed over the axes that the result lacks."""
    names = list(dict.fromkeys(itertools.chain(*terms)))
    place = {name: i for i, name in enumerate(names)}
    flow = None
    for each, term in zip(inputs, terms, strict=True):
        axes = [(place[term[a]] if a >= 0 else a, label) for a, label in each.axes]
        named = each.along(dict.fromkeys(axes))  # "bibj->bij" takes the diagonal of pairs
        flow = named if flow is None else product_flow(op, [flow, named])
        if flow.kind in BAD:
            return flow
    assert flow is not None
    over = {place[name] for name in names if name not in result}
    for axis, label in flow.axes:
        # A sum over examples of products between elements of the same example.
        if axis in over and label is not None and len(flow.axes) > 1:
            return bad_flow("compared", op, [flow])
    flow = total_flow(op, flow, over, "Sum", keep=True)
    if flow.kind in BAD:
        return flow
    out = {i: result.index(name) for name, i in place.items() if name in result}
    return flow.along((out[a] if a >= 0 else a, label) for a, label in flow.axes)


def _einsum(op: Any, inputs: list[Flow]) -> Flow:
    equation = op.get_attr("equation").decode().replace(" ", "")
    sides, result = equation.split("->")
    terms: list[list[str]] = []
    broad = 0
    for term, tensor in zip(sides.split(","), op.inputs, strict=True):
        rank = known_rank(tensor)
        number = rank - len(term.replace("...", "")) if "..." in term else 0
        broad = max(broad, number)
        terms.append(_letters(term, number))
    return _contraction(op, inputs, terms, _letters(result, broad))


def _letters(term: str, broad: int) -> list[str]:
    before, dots, after = term.partition("...")
    return [*before, *(f"...{i}" for i in range(-broad, 0) if dots), *after]


def _batch_norm(op: Any, inputs: list[Flow]) -> Any:
    if not op.get_attr("is_training"):
        return [inputs[0]] + [FIXED] * (len(op.outputs) - 1)
    return bad_flow("compared", op, inputs) if inputs[0].axes else inputs[0]


RULES = rules(
    {
        _SAME: first_flow,
        _SUMS: _sum_rule,
        f"Mul MulNoNan {_QUOTIENTS}": _product_rule,
        _ELEMENTWISE: _elementwise,
        "Select SelectV2": _select,
        _REDUCTIONS: _reduction,
        "Softmax LogSoftmax TopKV2 TopK": _last_axis,
        "SoftmaxCrossEntropyWithLogits SparseSoftmaxCrossEntropyWithLogits": _cross_entropy,
        "TensorListFromTensor TensorListStack": first_flow,
        "IdentityN": lambda op, inputs: inputs,
        "L2Loss": _l2_loss,
        "MatMul BatchMatMul BatchMatMulV2 BatchMatMulV3": _matmul,
        "FusedBatchNorm FusedBatchNormV2 FusedBatchNormV3": _batch_norm,
        "Einsum": _einsum,
    }
)
