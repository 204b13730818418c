"""Flows of operations on shapes and sizes, of values created from a shape, and of diagonals."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable
from typing import Any

import numpy as np

from tfmw.compat.dataflow.flow import (
    BAD,
    EXAMPLES,
    FIXED,
    SIZE,
    Flow,
    bad_flow,
    by_rows,
    constant_input,
    has_total,
    highest_kind,
    is_uneven,
    joined_apart,
    joined_flow,
    joined_label,
    joined_parts,
    known_input,
    known_rank,
    rules,
    tag_of,
)
from tfmw.compat.graph import ancestors

_RANDOM = (
    "RandomUniform RandomUniformInt RandomStandardNormal TruncatedNormal RandomGamma "
    "RandomPoissonV2 StatelessRandomUniform StatelessRandomUniformV2 StatelessRandomUniformInt "
    "StatelessRandomUniformIntV2 StatelessRandomUniformFullInt StatelessRandomUniformFullIntV2 "
    "StatelessRandomNormal StatelessRandomNormalV2 StatelessTruncatedNormal "
    "StatelessTruncatedNormalV2 StatelessRandomBinomial StatelessRandomGammaV2 "
    "StatelessRandomGammaV3 StatelessRandomPoisson"
)


def _transpose(op: Any, inputs: list[Flow]) -> Flow:
    places = {int(a): i for i, a in enumerate(known_input(op, inputs, 1))}
    return inputs[0].along((places.get(a, a), label) for a, label in inputs[0].axes)


def _expand(op: Any, inputs: list[Flow]) -> Flow:
    at = int(np.squeeze(known_input(op, inputs, 1))) % (known_rank(op.inputs[0]) + 1)
    return inputs[0].along((a + (a >= at), label) for a, label in inputs[0].axes)


def _squeeze(op: Any, inputs: list[Flow]) -> Flow:
    rank = known_rank(op.inputs[0])
    gone = {a % rank for a in op.get_attr("squeeze_dims")}
    gone = gone or {i for i, d in enumerate(op.inputs[0].shape) if d == 1}
    return inputs[0].along(
        (a - sum(1 for g in gone if 0 <= g < a), label)
        for a, label in inputs[0].axes
        if a not in gone
    )


def _reshape(op: Any, inputs: list[Flow]) -> Flow:
    flow = inputs[0]
    if not any(axis >= 0 for axis, _ in flow.axes):
        keeps = flow.kind in ("fixed", "reduced") or op.outputs[0].shape.rank == 0
        return flow if keeps else flow._replace(elements=None)
    tensors = op.inputs[0], op.outputs[0]
    before, after = ([t.shape[i] for i in range(known_rank(t))] for t in tensors)
    moved = _reshaped_axes(op, flow, before, after)
    if moved is None:
        return bad_flow("compared" if flow.has_pairs else "unknown", op, [flow])
    return flow.along(moved)


def _reshaped_axes(
    op: Any, flow: Flow, before: list[Any], after: list[Any]
) -> list[tuple[int, Any]] | None:
    """The axes of examples after a reshape; None if they are unknown."""
    others = [i for i, d in enumerate(before) if d != 1 or flow.label(i) is not None]
    target = [i for i, d in enumerate(after) if d != 1]
    iterations = [(a, label) for a, label in flow.axes if a < 0]
    axes = {a: label for a, label in flow.axes if a >= 0}
    if len(others) == len(target) and all(
        before[i] is None or after[j] is None or before[i] == after[j]
        for i, j in zip(others, target, strict=True)
    ):
        places = dict(zip(others, target, strict=True))
        return [*iterations, *((places[a], label) for a, label in axes.items())]
    if not target:
        return None
    if len(axes) > 1:
        return _merged_parts(axes, others, before, after, target)
    ((axis, label),) = axes.items()
    leading = [before[i] for i in others if i < axis]
    if not leading:
        return [*iterations, *_leading_axis(op, label, before[axis], after, target)]
    if None not in leading:
        product = math.prod(leading)
        for n, j in enumerate(target):
            known = [after[i] for i in target[:n]]
            if None not in known and math.prod(known) == product:
                return [*iterations, (j, label)]
        if after[target[0]] is None or after[target[0]] % product == 0:
            return [*iterations, (target[0], ("behind", product, label))]
    elif len(target) == 1 or before[axis + 1 :] == after[-len(before[axis + 1 :]) :]:
        return [*iterations, (target[0], ("behind", None, label))]
    return None


def _leading_axis(
    op: Any, label: Any, size: Any, after: list[Any], target: list[int]
) -> list[tuple[int, Any]]:
    """The axes of examples after a reshape, if examples stand along the first one."""
    first = target[0]
    number, parts = after[first], joined_parts(label)
    if len(target) > 1 and number is not None:
        if number == len(parts) and len(set(parts)) == 1:
            return [(target[1], parts[0])]  # [2 * examples, n] -> [2, examples, n]
        if tag_of(label) == "behind" and number == label[1]:
            return [(target[1], label[2])]
    if number is None or size == number or (size and number % size == 0):
        return [(first, label)]
    if len(target) > 1:  # groups of examples
        return [(first, ("group", op.name, label)), (target[1], ("in group", op.name, label))]
    return [(first, label)]


def _merged_parts(
    axes: dict[int, Any], others: list[int], before: list[Any], after: list[Any], target: list[int]
) -> list[tuple[int, Any]] | None:
    """Labels of groups of examples that a reshape merges into a batch again."""
    places = sorted(axes)
    labels = [axes[a] for a in places]
    whole = all(tag_of(label) in ("group", "in group") for label in labels)
    if len(labels) != 2 or not whole or labels[0][1:] != labels[1][1:]:
        return None
    if tag_of(labels[0]) != "group" or places[1] != places[0] + 1:
        return None
    return None if any(i < places[0] for i in others) else [(target[0], labels[0][2])]


# graphs in which rows of a batch are padded to its longest one
_with_padding: weakref.WeakSet[Any] = weakref.WeakSet()


def _padded(op: Any, inputs: list[Flow]) -> Flow:
    """Flow of a ragged tensor that is made dense: a row for each example."""
    if has_total(inputs):
        return bad_flow("nonlinear", op, inputs)
    if None in op.outputs[0].shape.as_list()[1:]:
        _with_padding.add(op.graph)
    return Flow("rows", ((0, EXAMPLES),)) if any(flow.axes for flow in inputs) else FIXED


def padding_of(tensor: Any, flow: Flow, axes: Iterable[int]) -> Any:
    """Op that padded rows to the longest of a batch, along one of some axes; None if none did."""
    if tensor.graph not in _with_padding or flow.kind not in ("rows", "size"):
        return None
    if all(tensor.shape[a] is not None or flow.label(a) for a in axes):
        return None
    padded = [op for op in ancestors([tensor]) if op.type == "RaggedTensorToTensor"]
    return next((op for op in padded if None in op.outputs[0].shape.as_list()[1:]), None)


def _has_examples(indices: Flow, shape: Flow) -> bool:
    """Whether examples are along the first axis of a sparse tensor."""
    return tag_of(indices.label(0)) == "selected" and (shape.elements or (FIXED,))[0] == SIZE


def _sparse(op: Any, inputs: list[Flow]) -> Any:
    """Flow of a sparse tensor made of the nonzero elements of each example: a row for each."""
    shape = inputs[1 if op.type == "SparseToDense" else 2]
    if not _has_examples(inputs[0], shape) or has_total(inputs) or inputs[3].axes:
        return by_rows(op, inputs)
    if op.type.startswith("SparseReduce"):
        rank = len(shape.elements or ())
        over = {int(axis) % rank for axis in np.ravel(known_input(op, inputs, 3))}
        left = rank - (0 if op.get_attr("keep_dims") else len(over))
        op.outputs[0].set_shape([None] * left)  # TensorFlow does not know its rank
        if 0 in over:
            summed = op.type == "SparseReduceSum" and inputs[1].degree == 0
            return Flow("reduced", degree=1) if summed else bad_flow("compared", op, inputs)
    return Flow("rows", ((0, EXAMPLES),))


def _sparse_with_dense(op: Any, inputs: list[Flow]) -> Any:
    """Flow of the sum, or of the values of the product, of a sparse and a dense tensor."""
    indices, values, shape, dense = inputs
    by_example = dense.axes == ((0, EXAMPLES),) and op.inputs[3].shape.rank == len(
        shape.elements or ()
    )
    if not _has_examples(indices, shape) or has_total(inputs) or (dense.axes and not by_example):
        return by_rows(op, inputs)
    return Flow("rows", ((0, EXAMPLES),) if op.type == "SparseTensorDenseAdd" else values.axes)


def _sparse_together(op: Any, inputs: list[Flow]) -> Any:
    """Flows of the sum of sparse tensors, or of them side by side: indices, values, shape."""
    number = len(inputs) // 3
    if op.type == "SparseAdd":
        along, parts = -1, [inputs[:3], inputs[3:6]]
    else:
        along, parts = op.get_attr("concat_dim"), [inputs[i::number] for i in range(number)]
    shape = parts[0][2]
    have_examples = all(_has_examples(each[0], each[2]) for each in parts)
    if not have_examples or has_total(inputs) or along % len(shape.elements or ()) == 0:
        return by_rows(op, inputs)
    rows = Flow("rows", ((0, ("selected", op.name)),))
    return [rows, rows, shape]


def _shape(op: Any, inputs: list[Flow]) -> Any:
    return [_shape_of(flow, tensor) for flow, tensor in zip(inputs, op.inputs, strict=True)]


def size_of(label: Any) -> Flow:
    """Flow of the size of an axis with this label."""
    return SIZE._replace(sized=None if label == EXAMPLES else label)


def _shape_of(flow: Flow, tensor: Any) -> Flow:
    rank = tensor.shape.rank
    if rank is None:
        return Flow("size" if flow.kind != "fixed" else "fixed", degree=None)
    elements = []
    for axis, size in enumerate(tensor.shape):
        label = flow.label(axis)
        if label is not None and is_uneven(label):
            elements.append(Flow("reduced", degree=1, sized=label))  # the number of selected values
        elif label is not None:
            elements.append(size_of(label))
        elif flow.kind in BAD and size is None:
            elements.append(Flow("size", degree=None))
        else:
            elements.append(FIXED._replace(origin=padding_of(tensor, flow, [axis])))
    kind = highest_kind(elements)
    return Flow(kind, degree=None if kind != "reduced" else 1, elements=tuple(elements))


def _number(op: Any, inputs: list[Flow]) -> Flow:
    flow = inputs[0]
    if op.type == "Rank" or (not flow.axes and flow.kind not in BAD):
        return FIXED
    if any(is_uneven(label) for _, label in flow.axes):
        return Flow("reduced", degree=1)
    return Flow("size", degree=len(flow.axes) or None)


def _of_shape(op: Any, vector: int, inputs: list[Flow], kind: str) -> Flow:
    """Flow of an operation that creates a tensor of a shape."""
    shape, flow = op.outputs[0].shape, inputs[vector]
    labels: list[tuple[int, Any]] = []
    if flow.kind == "fixed":
        return FIXED
    if flow.elements is not None:
        for axis, element in enumerate(flow.elements):
            if element.kind in ("size", "reduced"):
                plain = element.kind == "size" and element.degree in (1, None)
                label = element.sized or (EXAMPLES if plain else ("of size", op.name))
                labels.append((axis, label))
    elif shape.rank:
        labels = [(axis, EXAMPLES) for axis, size in enumerate(shape) if size is None]
    return Flow(kind, tuple(labels)) if labels else FIXED


def _fill(op: Any, inputs: list[Flow]) -> Flow:
    out = _of_shape(op, 0, inputs, "size")
    return out if inputs[1].kind == "fixed" else joined_flow(op, [out, inputs[1]])


def _random(op: Any, inputs: list[Flow]) -> Flow:
    """Flow of random numbers, which are drawn for each row."""
    out = _of_shape(op, 0, inputs, "rows")
    if len(op.inputs) > 1 and any(flow.axes for flow in inputs[1:]):
        return by_rows(op, inputs)
    return out


def _range(op: Any, inputs: list[Flow]) -> Flow:
    if all(flow.kind == "fixed" for flow in inputs):
        return FIXED
    if any(flow.kind == "reduced" for flow in inputs):
        return Flow("size", ((0, ("of size", op.name)),))
    return Flow("size", ((0, EXAMPLES),))


def _broadcast_to(op: Any, inputs: list[Flow]) -> Flow:
    flow = inputs[0]
    rank, before = known_rank(op.outputs[0]), known_rank(op.inputs[0])
    moved = flow.along((a + rank - before if a >= 0 else a, label) for a, label in flow.axes)
    added = [
        (axis, element.sized or EXAMPLES)
        for axis, element in enumerate(inputs[1].elements or ())
        if element.kind == "size" and moved.label(axis) is None
    ]
    return with_sizes(op, moved, added)


def with_sizes(op: Any, flow: Flow, added: list[tuple[int, Any]]) -> Flow:
    """Flow of a value that is repeated as often as there are examples."""
    if not added:
        return flow
    kind = "size" if flow.kind == "fixed" else flow.kind
    out = flow._replace(kind=kind).along([*flow.axes, *added])
    if flow.kind == "reduced":
        return out._replace(kind="rows", affine=True)
    return out._replace(origin=flow.origin or op) if out.has_pairs else out


def _tile(op: Any, inputs: list[Flow]) -> Flow:
    flow, often = inputs[0], inputs[1]
    rank = known_rank(op.inputs[0])
    times = constant_input(op, inputs, 1)
    shape, out = op.inputs[0].shape, op.outputs[0].shape
    axes: list[tuple[int, Any]] = [a for a in flow.axes if a[0] < 0]
    added: list[tuple[int, Any]] = []
    for axis in range(rank):
        label = flow.label(axis)
        element = often.elements[axis] if often.elements is not None else None
        grows = element is not None and element.kind == "size"
        number = None if times is None else int(times[axis])
        if number is None and element is not None and element.kind == "fixed":
            number = None if element.constant is None else int(element.constant)
            if number is None and shape[axis] and out[axis]:
                number = out[axis] // shape[axis]
        if label is None:
            if grows:
                added.append(
                    (axis, EXAMPLES if shape[axis] == 1 else ("behind", shape[axis], EXAMPLES))
                )
        elif number == 1:
            axes.append((axis, label))
        elif number is not None:
            axes.append((axis, joined_label(joined_parts(label) * number)))
        else:
            axes.append((axis, ("repeated", label)))
    return with_sizes(op, flow.along(axes), added)


def _one_hot(op: Any, inputs: list[Flow]) -> Flow:
    flow = inputs[0]
    if flow.kind == "reduced":
        return bad_flow("nonlinear", op, inputs)
    axis = op.get_attr("axis") % known_rank(op.outputs[0])
    out = flow.along((a + (a >= axis), label) for a, label in flow.axes)
    if inputs[1].kind == "size":
        out = with_sizes(op, out, [(axis, EXAMPLES)])
        return out._replace(kind="size") if flow.kind != "rows" else out
    return out


def _diag(op: Any, inputs: list[Flow]) -> Flow:
    flow, rank = inputs[0], known_rank(op.inputs[0])
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


def _pad(op: Any, inputs: list[Flow]) -> Flow:
    return joined_apart(op, [inputs[0], *(f._replace(axes=()) for f in inputs[2:])])


def _like(op: Any, inputs: list[Flow]) -> Flow:
    flow = inputs[0]
    if flow.elements is not None:
        return Flow(constant=np.full(len(flow.elements), int(op.type == "OnesLike")))
    return Flow("size", flow.axes) if flow.axes else FIXED


RULES = rules(
    {
        "Shape ShapeN": _shape,
        "RaggedTensorToTensor": _padded,
        "SparseToDense SparseTensorDenseMatMul SparseReduceSum SparseReduceMax": _sparse,
        "SparseTensorDenseAdd SparseDenseCwiseMul SparseDenseCwiseDiv": _sparse_with_dense,
        "SparseAdd SparseConcat": _sparse_together,
        "Size Rank": _number,
        _RANDOM: _random,
        "Pad PadV2 MirrorPad": _pad,
        "ZerosLike OnesLike": _like,
        "Transpose": _transpose,
        "ExpandDims": _expand,
        "Squeeze": _squeeze,
        "Reshape": _reshape,
        "Fill": _fill,
        "Range": _range,
        "BroadcastTo": _broadcast_to,
        "OneHot": _one_hot,
        "Diag MatrixDiag MatrixDiagV2 MatrixDiagV3": _diag,
        "DiagPart MatrixDiagPart MatrixDiagPartV2 MatrixDiagPartV3": _diag,
        "Tile": _tile,
    }
)
