"""Flows of elements that are chosen, counted or placed by an index."""

from __future__ import annotations

from typing import Any

import numpy as np

from tfmw.keras_compat.dataflow.arithmetic import SAME, first_flow
from tfmw.keras_compat.dataflow.flow import (
    BAD,
    EXAMPLES,
    FIXED,
    Flow,
    bad_flow,
    by_rows,
    constant_input,
    has_total,
    highest_kind,
    is_uneven,
    joined_apart,
    nonlinear_flow,
    rules,
    vector_flow,
    without_axes,
)
from tfmw.keras_compat.dataflow.parts import selected_rows
from tfmw.keras_compat.dataflow.shapes import with_sizes


def _gather(op: Any, inputs: list[Flow]) -> Flow:
    params, indices = inputs[0], inputs[1]
    rank, of_indices = op.inputs[0].shape.rank, op.inputs[1].shape.rank
    if op.type == "ResourceGather":
        params, rank = FIXED, 2
        axis, batch_dims = 0, op.get_attr("batch_dims")
    elif op.type == "Gather":
        axis, batch_dims = 0, 0
    else:
        number = constant_input(op, inputs, 2)
        if params.elements is not None and number is not None:
            return _gather_elements(op, inputs)
        batch_dims = op.get_attr("batch_dims")
        if rank is None or number is None:
            return bad_flow("unknown", op)
        axis = int(np.squeeze(number)) % rank
    if params.kind == "fixed" and indices.kind == "fixed":
        return FIXED
    if has_total([indices]):
        return bad_flow("nonlinear", op, inputs)
    if of_indices is None:
        return bad_flow("unknown", op)
    label = params.label(axis)
    if label is not None:
        if not (indices.axes and indices.label(0) is not None):
            return selected_rows(op, params)
        if is_uneven(indices.label(0)) or _is_place(op.inputs[1]):
            at = [(axis, indices.label(0))]
            return params.along([a for a in params.axes if a[0] != axis] + at)
        return selected_rows(op, params)
    width = of_indices - batch_dims
    moved = [(a if a < axis else a + width - 1, lab) for a, lab in params.axes]
    mine = [(a if a < batch_dims else a + axis - batch_dims, lab) for a, lab in indices.axes]
    if params.kind == "reduced":
        linear = Flow("reduced", degree=params.degree)
        if indices.kind == "size":
            return with_sizes(op, linear, mine)
        return linear.along(mine)._replace(kind="rows", affine=True)
    out = nonlinear_flow(op, [params.along(moved)._replace(affine=False), indices.along(mine)])
    if out.kind in BAD:
        return out
    return out._replace(affine=params.affine, degree=params.degree)


def _gather_elements(op: Any, inputs: list[Flow]) -> Flow:
    params, places = inputs[0], constant_input(op, inputs, 1)
    if places is None or params.elements is None:
        return Flow(params.kind, degree=None)
    chosen = [params.elements[int(i)] for i in np.ravel(places)]
    return vector_flow(chosen) if np.ndim(places) else chosen[0]


def _is_place(indices: Any) -> bool:
    """Whether indices are 0, 1, 2 ... of all examples, so that each is taken for itself."""
    while indices.op.type in (*SAME, "Reshape", "ExpandDims"):
        indices = indices.op.inputs[0]
    return bool(indices.op.type == "Range")


def _gather_nd(op: Any, inputs: list[Flow]) -> Flow:
    params, indices = (FIXED, inputs[1]) if op.type == "ResourceGatherNd" else inputs
    if params.kind == "reduced" or params.affine or indices.kind == "reduced":
        return bad_flow("nonlinear", op, inputs)
    rank = op.inputs[1].shape.rank
    rows = [a for a in indices.axes if rank is None or a[0] != rank - 1]
    if params.axes:
        place = _first_index(op.inputs[1])
        if not rows or params.axes[0][0] != 0 or len(params.axes) > 1:
            return selected_rows(op, params)
        if not (is_uneven(rows[0][1]) or (place is not None and _is_place(place))):
            return selected_rows(op, params)
    kind = "rows" if "rows" in (params.kind, indices.kind) else highest_kind(inputs)
    return Flow(kind, tuple(rows), params.degree, origin=indices.origin)


def _first_index(indices: Any) -> Any:
    """The tensor of the first component of indices [..., n]; None if it cannot be told."""
    while indices.op.type in SAME:
        indices = indices.op.inputs[0]
    if indices.op.type in ("Pack", "ConcatV2"):
        return indices.op.inputs[0]
    return None


def _where(op: Any, inputs: list[Flow]) -> Flow:
    if not inputs[0].axes:
        return bad_flow("nonlinear", op, inputs) if inputs[0].kind == "reduced" else inputs[0]
    pairs = inputs[0].kind == "size" or inputs[0].has_pairs
    origin = inputs[0].origin if pairs else None
    return Flow("rows", ((0, ("selected", op.name)),), origin=origin)


def _dynamic_partition(op: Any, inputs: list[Flow]) -> Any:
    if not any(flow.axes for flow in inputs):
        return nonlinear_flow(op, inputs)
    if has_total(inputs):
        return bad_flow("nonlinear", op, inputs)
    return [Flow("rows", ((0, ("selected", f"{op.name}:{i}")),)) for i in range(len(op.outputs))]


def _one_hot(op: Any, inputs: list[Flow]) -> Flow:
    flow, rank = inputs[0], op.outputs[0].shape.rank
    if flow.kind == "reduced":
        return bad_flow("nonlinear", op, inputs)
    if rank is None:
        return without_axes(op, flow)
    axis = op.get_attr("axis") % rank
    out = flow.along((a + (a >= axis), label) for a, label in flow.axes)
    if inputs[1].kind == "size":
        out = with_sizes(op, out, [(axis, EXAMPLES)])
        return out._replace(kind="size") if flow.kind != "rows" else out
    return out


def _diag(op: Any, inputs: list[Flow]) -> Flow:
    flow, rank = inputs[0], op.inputs[0].shape.rank
    if rank is None:
        return without_axes(op, flow)
    if op.type in ("Diag", "MatrixDiag", "MatrixDiagV2", "MatrixDiagV3"):
        label = flow.label(rank - 1)
        if label is None:
            return flow.along(flow.axes)
        return flow.along([*flow.axes, (rank, label)])._replace(origin=flow.origin or op)
    first, second = flow.label(rank - 2), flow.label(rank - 1)
    if first != second:
        return bad_flow("compared" if flow.kind == "rows" else "unknown", op, [flow])
    rest = [a for a in flow.axes if a[0] < rank - 1]
    return flow.along(rest)._replace(origin=None)


def _segments(op: Any, inputs: list[Flow]) -> Flow:
    data, ids = inputs[0], inputs[1]
    if has_total(inputs):
        return bad_flow("nonlinear", op, inputs)
    numbered = inputs[2] if len(inputs) > 2 else FIXED
    joined = op.inputs[1].shape.rank  # the first axes of the data become one
    if joined and ids.kind == numbered.kind == "fixed" and all(a >= joined for a, _ in data.axes):
        return data.along((a + 1 - joined, label) for a, label in data.axes)
    if data.label(0) is None and ids.label(0) is None:
        return by_rows(op, inputs)
    if not op.type.endswith("Sum") or "Sparse" in op.type:
        return bad_flow("compared", op, inputs)
    if numbered.kind == "size" or op.type == "SegmentSum":
        return Flow("rows", ((0, EXAMPLES),))
    return Flow("reduced", degree=1)


def _bincount(op: Any, inputs: list[Flow]) -> Flow:
    rank = op.inputs[0].shape.rank
    if rank == 1 or op.type == "Bincount":
        return Flow("reduced", degree=1)
    return by_rows(op, inputs)


def _scatter(op: Any, inputs: list[Flow]) -> Flow:
    if op.type == "ScatterNd":
        indices, updates, target = inputs[0], inputs[1], FIXED
        if inputs[2].kind == "size":
            return Flow("rows", ((0, EXAMPLES),))
    else:
        target, indices, updates = inputs
        if target.axes:
            return by_rows(op, inputs)
    if has_total([indices, updates]):
        if indices.kind == "fixed" and not indices.axes:
            return joined_apart(op, [target, updates])
        return bad_flow("nonlinear", op, inputs)
    if not (indices.axes or updates.axes):
        return joined_apart(op, [target, updates, indices])
    if op.type in ("ScatterNd", "TensorScatterAdd", "TensorScatterSub"):
        return Flow("reduced", degree=1)
    return Flow("rows", ((0, ("mixed", op.name, EXAMPLES)),))


def _unique(op: Any, inputs: list[Flow]) -> Flow:
    return bad_flow("compared", op, inputs) if inputs[0].axes else inputs[0]


RULES = rules(
    {
        "Gather GatherV2 ResourceGather": _gather,
        "GatherNd ResourceGatherNd": _gather_nd,
        "Diag MatrixDiag MatrixDiagV2 MatrixDiagV3": _diag,
        "DiagPart MatrixDiagPart MatrixDiagPartV2 MatrixDiagPartV3": _diag,
        "MatrixBandPart MatrixSetDiag MatrixSetDiagV2 MatrixSetDiagV3": first_flow,
        "SegmentSum SegmentMean SegmentMax SegmentMin SegmentProd": _segments,
        "UnsortedSegmentSum UnsortedSegmentMax UnsortedSegmentMin UnsortedSegmentProd": _segments,
        "Bincount DenseBincount": _bincount,
        "ScatterNd TensorScatterUpdate TensorScatterAdd TensorScatterSub": _scatter,
        "TensorScatterMax TensorScatterMin": _scatter,
        "Unique UniqueV2 UniqueWithCounts UniqueWithCountsV2": _unique,
        "Where": _where,
        "DynamicPartition": _dynamic_partition,
        "OneHot": _one_hot,
    }
)
