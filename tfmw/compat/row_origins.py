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

import tensorflow as tf

from tfmw.compat.dataflow.arithmetic import REDUCTIONS
from tfmw.compat.dataflow.flow import EXAMPLES, FIXED, Flow
from tfmw.compat.graph import is_symbolic
from tfmw.compat.losses import current_weight


class Origin(enum.IntEnum):
    """The origin of a lookup's ids; of a value computed from several, the greatest."""

    SAME = 0
    """Constants, variables and lengths of a batch: each replica has all of one process's ids."""
    REDUCED = 1
    """Computed over the examples, such as the distinct ids: each replica has some of them."""
    UNKNOWN = 2
    """Random numbers, what else has state, eager tensors, and what cannot be told."""
    EXAMPLES = 3
    """Ids of each example: each replica has those of its own examples."""


_STATELESS = (
    "Const",
    "ReadVariableOp",
    "VarHandleOp",
    "Placeholder",
    "ResourceGather",
    "ResourceGatherNd",
    "LookupTableFind",
    "LookupTableFindV2",
)
# Operations -> the index of their output that has each of several ids once.
_DISTINCT = {
    **dict.fromkeys(("Unique", "UniqueV2", "UniqueWithCounts", "UniqueWithCountsV2"), 0),
    # Gradients of `tf.nn.embedding_lookup_sparse`, which Keras calls for sparse ids.
    **dict.fromkeys((f"SparseSegment{kind}GradV2" for kind in ("Sum", "Mean", "SqrtN")), 1),
}
_ELEMENTWISE = ("AddV2", "Cast", "FloorMod", "Identity", "Mul", "Sub")
_KEEPS_NUMBER = (*_ELEMENTWISE, "EnsureShape", "ExpandDims", "Reshape", "SelectV2", "Squeeze")
_FLOWS = {
    Origin.SAME: FIXED,
    Origin.REDUCED: Flow("reduced"),
    Origin.UNKNOWN: Flow("unknown"),
    Origin.EXAMPLES: Flow("rows", ((0, EXAMPLES),)),
}


def row_parts(slices: tf.IndexedSlices) -> list[tuple[Origin, tf.IndexedSlices]]:
    """A sparse gradient of a replica, by the lookups whose gradients it joins."""
    indices = slices.indices
    if not is_symbolic(indices):
        return [(Origin.UNKNOWN, slices)]
    joins = indices.op.type == "ConcatV2"
    parts = list(indices.op.inputs)[:-1] if joins else [indices]
    origins = [_origin(part) for part in parts]
    if len(set(origins)) == 1 and origins[0] is not Origin.SAME:
        return [(origins[0], slices)]
    sizes = tf.stack([tf.size(part) for part in parts])
    values = tf.split(slices.values, sizes, num=len(parts)) if joins else [slices.values]
    return [
        (origin, tf.IndexedSlices(value, tf.cast(part, indices.dtype), slices.dense_shape))
        for origin, part, value in zip(origins, parts, values, strict=True)
    ]


def joined(parts: list[tuple[Origin, tf.IndexedSlices]]) -> tf.IndexedSlices:
    """The inverse of `row_parts`, of parts that are results of a compiled function."""
    weight = current_weight()
    assert weight is not None
    indices = [tf.identity(part.indices) for _, part in parts]
    for (origin, _), own in zip(parts, indices, strict=True):
        weight.flows.declare(own, _FLOWS[origin])
    return tf.IndexedSlices(
        tf.concat([part.values for _, part in parts], 0),
        tf.concat(indices, 0) if len(indices) > 1 else indices[0],
        parts[0][1].dense_shape,
    )


def _origin(ids: tf.Tensor) -> Origin:
    weight = current_weight()
    if weight is None:
        return Origin.UNKNOWN
    flows = weight.flows
    flow = flows.of(ids)
    source = ids
    while source.op.type in _KEEPS_NUMBER:
        # Keras's `take` selects ids + rows of the table where ids < 0, else the ids.
        source = source.op.inputs[2 if source.op.type == "SelectV2" else 0]
    if flow.kind != "fixed" and _DISTINCT.get(source.op.type) == source.value_index:
        return Origin.REDUCED
    if flow.kind == "fixed":
        return Origin.UNKNOWN if any(map(_draws, flows.operations(ids))) else Origin.SAME
    reduces = flow.kind == "reduced"
    if flow.kind == "size":  # examples are numbered
        ranges = [op.outputs[0] for op in flows.operations(ids) if op.type == "Range"]
        reduces = any(flows.of(numbers).kind != "fixed" for numbers in ranges)
    if flow.kind == "compared":  # ids in another order are as many
        reduces = flow.origin is None or flow.origin.type in REDUCTIONS.union(_DISTINCT)
    if flow.kind in ("nonlinear", "unknown"):
        return Origin.UNKNOWN
    return Origin.REDUCED if reduces else Origin.EXAMPLES


def _draws(op: tf.Operation) -> bool:
    """Whether replicas may have other results of an operation on equal inputs."""
    return "Random" in op.type or (op.op_def.is_stateful and op.type not in _STATELESS)
