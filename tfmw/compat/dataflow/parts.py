"""Flows of concatenations, slices and lists, and of elements at an index."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from tfmw.compat.dataflow.arithmetic import SAME, first_flow
from tfmw.compat.dataflow.flow import (
    BAD,
    EXAMPLES,
    FIXED,
    ITERATIONS,
    SEGMENTS,
    Flow,
    UnknownArgument,
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
    nonlinear_flow,
    rules,
    tag_of,
    vector_flow,
)
from tfmw.compat.dataflow.shapes import size_of, with_sizes
from tfmw.compat.graph import static_value


def _concat(op: Any, inputs: list[Flow]) -> Flow:
    parts, rank = list(op.inputs)[:-1], known_rank(op.outputs[0])
    axis = int(np.squeeze(known_input(op, inputs, -1))) % rank
    inputs = inputs[:-1]
    labels = [flow.label(axis) for flow in inputs]
    if all(label is None for label in labels):
        known = [_elements(flow, tensor) for flow, tensor in zip(inputs, parts, strict=True)]
        elements = [each for each in known if each is not None]
        if rank == 1 and len(elements) == len(parts) and _are_sizes(inputs):
            return vector_flow(itertools.chain.from_iterable(elements))
        return joined_apart(op, inputs)
    rest = [flow.along(a for a in flow.axes if a[0] != axis) for flow in inputs]
    out = joined_apart(op, rest)
    if out.kind in BAD:
        return out
    if None in labels:
        mixed = tuple((each, flow.kind) for each, flow in zip(labels, rest, strict=True))
        label: Any = ("mixed", op.name, mixed)
    else:
        label = joined_label([part for each in labels for part in joined_parts(each)])
    return out.along([*out.axes, (axis, label)])


def _elements(flow: Flow, tensor: Any) -> list[Flow] | None:
    if flow.elements is not None:
        return list(flow.elements)
    if tensor.shape.rank == 1 and tensor.shape[0] is not None and tensor.shape[0] <= 8:
        if flow.kind == "fixed":
            values = [None] * tensor.shape[0] if flow.constant is None else flow.constant
            return [Flow(constant=value) for value in values]
        if tensor.shape[0] == 1:
            return [flow._replace(elements=None)]
    return None


def _are_sizes(flows: list[Flow]) -> bool:
    """Whether all values are fixed, or numbers of examples or of their values."""
    return all(f.kind in ("fixed", "size") or f.sized or f.elements for f in flows)


def _pack(op: Any, inputs: list[Flow]) -> Flow:
    rank = known_rank(op.outputs[0])
    if rank == 1 and _are_sizes(inputs) and not any(f.axes for f in inputs):
        return vector_flow(flow._replace(elements=None) for flow in inputs)
    axis = op.get_attr("axis") % rank
    shifted = [f.along((a + (a >= axis), label) for a, label in f.axes) for f in inputs]
    return joined_apart(op, shifted)


def _unpack(op: Any, inputs: list[Flow]) -> Any:
    flow = inputs[0]
    if flow.elements is not None and len(flow.elements) == len(op.outputs):
        return list(flow.elements)
    axis = op.get_attr("axis") % known_rank(op.inputs[0])
    if flow.label(axis) is not None:
        return _selected_rows(op, flow)
    return flow.along((a - (a > axis), label) for a, label in flow.axes)


def _selected_rows(op: Any, flow: Flow) -> Flow:
    """Flow of rows of a batch selected by position: each replica selects other examples."""
    if flow.kind == "size":
        return Flow("size", degree=None)
    return bad_flow("compared", op, [flow])


def _split(op: Any, inputs: list[Flow]) -> Any:
    at, values = (0, 1) if op.type == "Split" else (2, 0)
    flow = inputs[values]
    if not flow.axes:
        return flow._replace(elements=None)
    axis = int(np.squeeze(known_input(op, inputs, at))) % known_rank(op.inputs[values])
    label = flow.label(axis)
    if label is None:
        return flow.along(flow.axes)
    count = len(op.outputs)
    if count == 1:
        return flow
    labels = joined_parts(label)
    each, left = divmod(len(labels), count)
    if not left:
        groups = [joined_label(labels[i * each : (i + 1) * each]) for i in range(count)]
        rest = [a for a in flow.axes if a[0] != axis]
        return [flow.along([*rest, (axis, group)]) for group in groups]
    return _selected_rows(op, flow)


def _slice_bounds(op: Any) -> list[tuple[Any, ...]]:
    """Entries of a StridedSlice: ("new",), ("all",), ("index", i) or ("range", i)."""
    rank, count = known_rank(op.inputs[0]), op.inputs[1].shape.num_elements()
    if count is None:
        raise UnknownArgument
    names = ("begin", "end", "ellipsis", "new_axis", "shrink_axis")
    masks = {name: op.get_attr(f"{name}_mask") for name in names}
    out: list[tuple[Any, ...]] = []
    others = (
        count  # the ellipsis, or the end, stands for all axes that remain after this many entries
    )
    for i in range(count):
        marks = {name for name in names if masks[name] >> i & 1}
        if "ellipsis" in marks:
            others = i
        elif "new_axis" in marks:
            out.append(("new",))
        elif "shrink_axis" in marks:
            out.append(("index", i))
        else:
            out.append(("range", i, "begin" in marks, "end" in marks))
    left = rank - sum(entry[0] != "new" for entry in out)
    return [*out[:others], *[("all",)] * left, *out[others:]]


def _strided_slice(op: Any, inputs: list[Flow]) -> Flow:
    flow = inputs[0]
    if flow.elements is not None:
        return _slice_of_elements(op, inputs)
    if not any(axis >= 0 for axis, _ in flow.axes):
        return flow
    axes: list[tuple[int, Any]] = [a for a in flow.axes if a[0] < 0]
    source = place = 0
    for entry in _slice_bounds(op):
        if entry[0] == "new":
            place += 1
            continue
        label = flow.label(source)
        if label is not None:
            if entry[0] == "index":
                if not inputs[1].axes:
                    return _selected_rows(op, flow)
                axes.append((ITERATIONS, label))
                source += 1
                continue
            part = label if entry[0] == "all" else _slice_label(op, inputs, entry, label)
            if part is None:
                return _selected_rows(op, flow)
            axes.append((place, part))
        source += 1
        place += entry[0] != "index"
    return flow.along(axes)


def _slice_of_elements(op: Any, inputs: list[Flow]) -> Flow:
    flow = inputs[0]
    bounds = [constant_input(op, inputs, i) for i in (1, 2, 3)]
    if flow.elements is None or any(b is None or np.size(b) != 1 for b in bounds):
        return Flow(flow.kind, degree=None)
    begin, end, stride = (int(np.squeeze(b)) for b in bounds)
    if op.get_attr("shrink_axis_mask"):
        if not -len(flow.elements) <= begin < len(flow.elements):
            return FIXED
        return flow.elements[begin]
    first = None if op.get_attr("begin_mask") else begin
    last = None if op.get_attr("end_mask") else end
    return vector_flow(flow.elements[slice(first, last, stride)])


def _slice_label(op: Any, inputs: list[Flow], entry: tuple[Any, ...], label: Any) -> Any:
    """The label of a range of an axis; None if it selects some of the examples."""
    _, i, from_begin, to_end = entry
    strides = constant_input(op, inputs, 3)
    if strides is None or int(strides[i]) != 1:
        return None
    begin, end = (_bound(op.inputs[k], inputs[k], i) for k in (1, 2))
    from_begin = from_begin or begin == 0
    if from_begin and to_end:
        return label
    if tag_of(label) == "splits":  # where the rows of a ragged tensor begin, or end
        return label[1] if (from_begin and end == -1) or (begin == 1 and to_end) else None
    parts = joined_parts(label)
    if from_begin and end == "size":
        return parts[0]
    return joined_label(parts[1:]) if len(parts) > 1 and begin == "size" and to_end else None


def _bound(tensor: Any, flow: Flow, i: int) -> Any:
    """A bound of a slice: a number, or "size" for the number of examples."""
    value = static_value(tensor) if flow.constant is None else flow.constant
    if value is not None:
        return int(value[i])
    element = _element(flow, i)
    if element.constant is not None:
        return int(element.constant)
    is_number_of_examples = (element.kind, element.degree, element.sized) == ("size", 1, None)
    return "size" if is_number_of_examples else None


def _slice(op: Any, inputs: list[Flow]) -> Flow:
    flow = inputs[0]
    if not any(axis >= 0 for axis, _ in flow.axes):
        return flow._replace(elements=None)
    begin, size = constant_input(op, inputs, 1), constant_input(op, inputs, 2)
    sizes = inputs[2].elements
    for axis, label in flow.axes:
        part = _part_of_mixed(label, axis, inputs)
        if part is not None and len(flow.axes) == 1:
            return FIXED if part == (None, "fixed") else flow.along([(axis, part[0])])
        if begin is None or begin[axis] != 0:
            return _selected_rows(op, flow)
        if size is not None and size[axis] in (-1, op.inputs[0].shape[axis]):
            continue
        if sizes is None or sizes[axis] != size_of(label):
            return _selected_rows(op, flow)
    return flow


def _part_of_mixed(label: Any, axis: int, inputs: list[Flow]) -> tuple[Any, str] | None:
    """(label, kind) of the first or the second of two concatenated values, which a slice selects.

    `tf.nn.sampled_softmax_loss` looks up the labels of all examples and given negatives at once.
    """
    if tag_of(label) != "mixed" or len(label[2]) != 2 or label[2][0][0] is None:
        return None
    begin, size = (_element(flow, axis) for flow in inputs[1:])
    length = size_of(label[2][0][0])
    if (begin.constant, size) == (0, length):
        return label[2][0]
    return label[2][1] if (begin, size.constant) == (length, -1) else None


def _element(flow: Flow, i: int) -> Flow:
    """The flow of an element of a small vector."""
    if flow.constant is not None:
        return Flow(constant=int(flow.constant[i]))
    elements = flow.elements or ()
    return elements[i] if i < len(elements) else Flow("unknown")


def _along_axis(op: Any, inputs: list[Flow]) -> Flow:
    """Flow of operations that mix the elements of some axes: cumulative sums, reverse, roll."""
    flow = inputs[0]
    if not flow.axes or flow.kind != "rows":
        nonlinear = flow.kind == "reduced" and op.type == "Cumprod"
        return nonlinear_flow(op, [flow]) if nonlinear else flow
    rank, axes = known_rank(op.inputs[0]), known_input(op, inputs, 2 if op.type == "Roll" else 1)
    if any(flow.label(int(a) % rank) is not None for a in np.ravel(axes)):
        return bad_flow("compared", op, [flow])
    return flow


def _list_item(op: Any, inputs: list[Flow]) -> Flow:
    """Flow of an element of a list of tensors, whose `axes` are those of the stacked list."""
    flow = inputs[0]
    axes = [(ITERATIONS if a == 0 else a - 1, label) for a, label in flow.axes]
    return flow.along(axes)


def _list_with_item(op: Any, inputs: list[Flow]) -> Flow:
    at = 2 if op.type == "TensorListSetItem" else 1
    item = inputs[at]
    axes = [(0 if a == ITERATIONS else a + 1, label) for a, label in item.axes]
    if inputs[0].kind == "fixed":
        return item.along(axes)
    return joined_flow(op, [inputs[0], item.along(axes)])


def _shuffled(op: Any, inputs: list[Flow]) -> Flow:
    return _selected_rows(op, inputs[0]) if inputs[0].kind == "rows" else inputs[0]


def _gather(op: Any, inputs: list[Flow]) -> Flow:
    params, indices = inputs[0], inputs[1]
    if op.type == "ResourceGather":
        params = FIXED
        axis, batch_dims = 0, op.get_attr("batch_dims")
    elif op.type == "Gather":
        axis, batch_dims = 0, 0
    else:
        number = constant_input(op, inputs, 2)
        if params.elements is not None and number is not None:
            places = constant_input(op, inputs, 1)
            if places is None:
                return Flow(params.kind, degree=None)
            chosen = [params.elements[int(i)] for i in np.ravel(places)]
            return vector_flow(chosen) if np.ndim(places) else chosen[0]
        batch_dims = op.get_attr("batch_dims")
        axis = int(np.squeeze(known_input(op, inputs, 2))) % known_rank(op.inputs[0])
    if params.kind == "fixed" and indices.kind == "fixed":
        return FIXED
    if has_total([indices]):
        return bad_flow("nonlinear", op, inputs)
    of_indices = known_rank(op.inputs[1])
    label = params.label(axis)
    if label is not None:
        if of_indices == 0 and indices.label(ITERATIONS) is not None:
            rest = [(a - (a > axis), lab) for a, lab in params.axes if a != axis]
            return params.along([*rest, (ITERATIONS, label)])
        if not (indices.axes and indices.label(0) is not None):
            return _selected_rows(op, params)
        if is_uneven(indices.label(0)) or _is_place(op.inputs[1]):
            at = [(axis, indices.label(0))]
            return params.along([a for a in params.axes if a[0] != axis] + at)
        return _selected_rows(op, params)
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


def _is_place(indices: Any) -> bool:
    """Whether indices are 0, 1, 2 ... over all examples, so that each example is selected once."""
    while indices.op.type in (*SAME, "Reshape", "ExpandDims", "SelectV2"):
        if indices.op.type == "SelectV2":  # `tf.vectorized_map` selects 0 if there is one example
            if indices.op.inputs[0].shape.rank != 0:
                return False
            indices = indices.op.inputs[1]
        else:
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
            return _selected_rows(op, params)
        if not (is_uneven(rows[0][1]) or (place is not None and _is_place(place))):
            return _selected_rows(op, params)
    kind = "rows" if "rows" in (params.kind, indices.kind) else highest_kind(inputs)
    return Flow(kind, tuple(rows), params.degree, origin=indices.origin)


def _first_index(indices: Any) -> Any:
    """The first component of indices [..., n]; None if it is unknown."""
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
    if ids.sized == SEGMENTS and numbered.kind == "size":
        return Flow("rows", ((0, EXAMPLES),))
    if not op.type.endswith("Sum") or "Sparse" in op.type:
        return bad_flow("compared", op, inputs)
    if numbered.kind == "size" or op.type == "SegmentSum":
        return Flow("rows", ((0, EXAMPLES),))
    return Flow("reduced", degree=None if data.degree is None else data.degree + 1)


def _bincount(op: Any, inputs: list[Flow]) -> Flow:
    if inputs[1].kind == "size" and not has_total(inputs):
        return Flow("rows", ((0, EXAMPLES),))  # a count for each example, as of its ragged values
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
        total = Flow("reduced", degree=None if updates.degree is None else updates.degree + 1)
        to_zeros = op.type == "ScatterNd" or _is_zeros(op.inputs[0])
        return total if to_zeros else joined_flow(op, [target, total])
    return Flow("rows", ((0, ("mixed", op.name, EXAMPLES)),))


def _is_zeros(tensor: Any) -> bool:
    """Whether a tensor is made of zeros, to which something is added."""
    if tensor.op.type == "Fill":
        tensor = tensor.op.inputs[1]
    value = static_value(tensor)
    return tensor.op.type == "ZerosLike" or (value is not None and not np.any(value))


def _unique(op: Any, inputs: list[Flow]) -> Flow:
    return bad_flow("compared", op, inputs) if inputs[0].axes else inputs[0]


RULES = rules(
    {
        "Split SplitV": _split,
        "Cumsum Cumprod CumulativeLogsumexp ReverseV2 Roll": _along_axis,
        "TensorListSetItem TensorListPushBack": _list_with_item,
        "TensorListGetItem": _list_item,
        "TensorListPopBack": lambda op, inputs: [inputs[0], _list_item(op, inputs)],
        "ConcatV2": _concat,
        "Pack": _pack,
        "Unpack": _unpack,
        "StridedSlice": _strided_slice,
        "Slice": _slice,
        "RandomShuffle": _shuffled,
        "Gather GatherV2 ResourceGather": _gather,
        "GatherNd ResourceGatherNd": _gather_nd,
        "MatrixBandPart MatrixSetDiag MatrixSetDiagV2 MatrixSetDiagV3": first_flow,
        "SegmentSum SegmentMean SegmentMax SegmentMin SegmentProd": _segments,
        "UnsortedSegmentSum UnsortedSegmentMax UnsortedSegmentMin UnsortedSegmentProd": _segments,
        "Bincount DenseBincount": _bincount,
        "ScatterNd TensorScatterUpdate TensorScatterAdd TensorScatterSub": _scatter,
        "TensorScatterMax TensorScatterMin": _scatter,
        "Unique UniqueV2 UniqueWithCounts UniqueWithCountsV2": _unique,
        "Where": _where,
        "DynamicPartition": _dynamic_partition,
    }
)
