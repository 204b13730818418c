"""Rows of sparse gradients: whether replicas look up rows of their own examples, or all the same.

    for origin, part in row_parts(gradient):       # in the graph of the step
        ...

In one process, an embedding of a sequence's positions looks up each row once, and so its gradient
has it once. N replicas look it up N times. Optimizers that square a sparse gradient square each
occurrence of a row, so occurrences of one lookup are summed first. Occurrences of ids of the
examples are as many on all replicas together as in one process, and stay apart.
"""

from __future__ import annotations

import enum
from typing import Any

import numpy as np
import tensorflow as tf

from tfmw.keras_compat.graph import BottomUp, is_symbolic, static_value


class Origin(enum.IntEnum):
    """The origin of a lookup's ids; of a value computed from several, the greatest."""

    SAME = 0
    """Constants, variables and lengths of a batch: each replica has all of one process's ids."""
    REDUCED = 1
    """Computed over the examples, such as the distinct ids: each replica has some of them."""
    UNKNOWN = 2
    """Results of functions, random numbers, what else has state, eager tensors."""
    EXAMPLES = 3
    """Ids of each example: each replica has those of its own examples."""


_CONSTANT = ("Const", "ReadVariableOp", "VarHandleOp")
_ITERATORS = ("Iterator", "MultiDeviceIterator", "Optional")  # what names begin with
_READS = ("ResourceGather", "ResourceGatherNd", "LookupTableFind", "LookupTableFindV2")
_CALLS = ("PartitionedCall", "While", "If", "Case")  # what names end with
_DISTINCT = ("Unique", "UniqueV2", "UniqueWithCounts", "UniqueWithCountsV2", "Range")
_REDUCTIONS = ("Max", "Min", "Sum", "Mean", "Prod", "Any", "All", "ArgMax", "ArgMin")


def row_parts(slices: tf.IndexedSlices) -> list[tuple[Origin, tf.IndexedSlices]]:
    """A sparse gradient of a replica, by the lookups whose gradients it joins."""
    indices = slices.indices
    if not is_symbolic(indices):
        return [(Origin.UNKNOWN, slices)]
    joins = indices.op.type == "ConcatV2"
    parts = list(indices.op.inputs)[:-1] if joins else [indices]
    origins = [_of_tensor(part, _origin(part)) for part in parts]
    if len(set(origins)) == 1 and origins[0] is not Origin.SAME:
        return [(origins[0], slices)]
    sizes = tf.stack([tf.size(part) for part in parts])
    values = tf.split(slices.values, sizes, num=len(parts)) if joins else [slices.values]
    return [
        (origin, tf.IndexedSlices(value, tf.cast(part, indices.dtype), slices.dense_shape))
        for origin, part, value in zip(origins, parts, values, strict=True)
    ]


def joined(parts: list[tuple[Origin, tf.IndexedSlices]]) -> tf.IndexedSlices:
    """What `row_parts` divides, of parts that have become results of a compiled function."""
    indices = [tf.identity(part.indices) for _, part in parts]
    for (origin, _), own in zip(parts, indices, strict=True):
        _origin.set(own, origin)
    return tf.IndexedSlices(
        tf.concat([part.values for _, part in parts], 0),
        tf.concat(indices, 0) if len(indices) > 1 else indices[0],
        parts[0][1].dense_shape,
    )


def _rule(op: tf.Operation, values: list[Origin]) -> Origin:
    if op.type in _CONSTANT:
        return Origin.SAME
    if op.type == "Placeholder":
        return _of_placeholder(op.outputs[0])
    if op.type.startswith(_ITERATORS):
        return Origin.EXAMPLES
    inputs = [_of_tensor(t, value) for t, value in zip(op.inputs, values, strict=True)]
    greatest = max(inputs, default=Origin.EXAMPLES)
    if op.type == "Reshape":
        return inputs[0]
    if op.type.endswith(_CALLS):
        return Origin.UNKNOWN if greatest is not Origin.SAME else greatest
    if "Random" in op.type or (op.op_def.is_stateful and op.type not in _READS):
        return max(Origin.UNKNOWN, greatest)
    if greatest is Origin.EXAMPLES and (op.type in _DISTINCT or _reduces_examples(op)):
        return Origin.REDUCED
    return greatest


_origin = BottomUp(_rule)


def _of_placeholder(argument: tf.Tensor) -> Origin:
    """The origin of an argument of a traced function, or of what the function captures."""
    if argument.dtype == tf.resource:
        return Origin.SAME
    for outside, inside in getattr(argument.graph, "captures", ()):
        if inside is argument:
            return _of_tensor(outside, _origin(outside)) if is_symbolic(outside) else Origin.SAME
    return Origin.EXAMPLES


def _of_tensor(tensor: tf.Tensor, of_op: Origin) -> Origin:
    """The origin of one output of an operation: a length is not a number of examples."""
    op = tensor.op
    if op.type not in ("StridedSlice", "Unpack") or op.inputs[0].op.type != "Shape":
        return of_op
    measured, axis = op.inputs[0].op.inputs[0], tensor.value_index
    if op.type == "StridedSlice":
        begin, step = static_value(op.inputs[1]), static_value(op.inputs[3])
        if begin is None or begin[0] < 0 or step is None or step[0] < 0:
            return of_op
        axis = 0 if op.get_attr("begin_mask") else int(begin[0])
        if axis and not op.get_attr("shrink_axis_mask"):
            return Origin.SAME if measured.op.type != "Transpose" else of_op
    while measured.op.type == "Transpose":
        axes = static_value(measured.op.inputs[1])
        if axes is None:
            return of_op
        measured, axis = measured.op.inputs[0], int(axes[axis])
    return Origin.SAME if axis else of_op


def _reduces_examples(op: tf.Operation) -> bool:
    if op.type not in _REDUCTIONS:
        return False
    axes: Any = static_value(op.inputs[1])
    rank = op.inputs[0].shape.rank
    return axes is None or not rank or 0 in {int(axis) % rank for axis in np.ravel(axes)}
