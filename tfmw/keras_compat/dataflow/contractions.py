"""Flows of products of matrices, of normalization, and of all operations without a rule."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from tfmw.keras_compat.dataflow.flow import (
    BAD,
    FIXED,
    ITERATIONS,
    Flow,
    Rule,
    bad_flow,
    highest_kind,
    joined_flow,
    product_flow,
    total_flow,
)

if TYPE_CHECKING:
    from tfmw.keras_compat.dataflow.walk import Dataflow

_FILTER_GRADIENTS = ("BackpropFilter", "BiasAddGrad", "BackpropFilterV2")


def _matmul(flows: Dataflow, op: Any, inputs: list[Flow]) -> Flow:
    ranks = [t.shape.rank for t in list(op.inputs)[:2]]
    if None in ranks:
        return (
            bad_flow("unknown", op) if any(f.axes for f in inputs) else product_flow(op, inputs[:2])
        )
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
    """Of a product of tensors, with named axes, summed over those that the result lacks."""
    names = list(dict.fromkeys(itertools.chain(*terms)))
    place = {name: i for i, name in enumerate(names)}
    flow = None
    for each, term in zip(inputs, terms, strict=True):
        named = each.along((place[term[a]] if a >= 0 else a, label) for a, label in each.axes)
        flow = named if flow is None else product_flow(op, [flow, named])
        if flow.kind in BAD:
            return flow
    assert flow is not None
    over = {place[name] for name in names if name not in result}
    for axis, label in flow.axes:
        # A sum over examples of one factor with what is at their place in another.
        if axis in over and label is not None and len(flow.axes) > 1:
            return bad_flow("compared", op, [flow])
    flow = total_flow(op, flow, over, "Sum", keep=True)
    if flow.kind in BAD:
        return flow
    out = {i: result.index(name) for name, i in place.items() if name in result}
    return flow.along((out[a] if a >= 0 else a, label) for a, label in flow.axes)


def _einsum(flows: Dataflow, op: Any, inputs: list[Flow]) -> Flow:
    equation = op.get_attr("equation").decode().replace(" ", "")
    sides, result = equation.split("->")
    terms: list[list[str]] = []
    broad = 0
    for term, tensor in zip(sides.split(","), op.inputs, strict=True):
        if tensor.shape.rank is None:
            return bad_flow("unknown", op)
        number = tensor.shape.rank - len(term.replace("...", "")) if "..." in term else 0
        broad = max(broad, number)
        terms.append(_letters(term, number))
    return _contraction(op, inputs, terms, _letters(result, broad))


def _letters(term: str, broad: int) -> list[str]:
    before, dots, after = term.partition("...")
    return [*before, *(f"...{i}" for i in range(-broad, 0) if dots), *after]


def _batch_norm(flows: Dataflow, op: Any, inputs: list[Flow]) -> Any:
    if not op.get_attr("is_training"):
        return [inputs[0]] + [FIXED] * (len(op.outputs) - 1)
    return bad_flow("compared", op, inputs) if inputs[0].axes else inputs[0]


def _filter_gradient(flows: Dataflow, op: Any, inputs: list[Flow]) -> Flow:
    if any(flow.kind == "reduced" or flow.affine for flow in inputs):
        return bad_flow("nonlinear", op, inputs)
    return (
        Flow("reduced", degree=1) if any(flow.axes for flow in inputs) else joined_flow(op, inputs)
    )


def by_rows(flows: Dataflow, op: Any, inputs: list[Flow]) -> Any:
    """Of any other operation: its first axis is that of the examples, as of a convolution."""
    if any(flow.kind == "reduced" or flow.affine for flow in inputs):
        return bad_flow("nonlinear", op, inputs)
    if op.type.endswith(_FILTER_GRADIENTS):
        return _filter_gradient(flows, op, inputs)
    kind = highest_kind(inputs)
    if kind in ("fixed", "size") and not any(flow.axes for flow in inputs):
        return Flow(kind, degree=None if kind == "size" else 0)
    iterations = [a for flow in inputs for a in flow.axes if a[0] == ITERATIONS]
    if any(axis > 0 for flow in inputs for axis, _ in flow.axes):
        return bad_flow("unknown", op, inputs)
    labels = {label for flow in inputs for axis, label in flow.axes if axis == 0}
    if len(labels) > 1:
        return bad_flow("unknown", op, inputs)
    origin = next((flow.origin for flow in inputs if flow.origin is not None), None)
    out = []
    for tensor in op.outputs:
        axes = list(dict.fromkeys(iterations))
        if labels and tensor.shape.rank != 0:
            axes.append((0, next(iter(labels))))
        elif labels:
            out.append(bad_flow("unknown", op))
            continue
        out.append(Flow(kind, tuple(axes), origin=origin))
    return out


RULES: dict[str, Rule] = {
    **dict.fromkeys(["MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3"], _matmul),
    **dict.fromkeys(["FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3"], _batch_norm),
    "Einsum": _einsum,
}
