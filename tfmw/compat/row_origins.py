"""Origins of sparse gradients' rows: ids of each replica's examples, or the same on all replicas.

    for origin, part in row_parts(gradient):       # in the graph of the step
        ...

In one process, an embedding of a sequence's positions looks up each row once, so its gradient has
each row once. N replicas look it up N times. Optimizers that square a sparse gradient square each
occurrence of a row, so occurrences of one lookup are summed first. Ids of examples occur as often
on all replicas together as in one process, so their rows stay separate.
"""

from __future__ import annotations

import enum

import tensorflow as tf

from tfmw.compat.dataflow.arithmetic import REDUCTIONS
from tfmw.compat.dataflow.flow import EXAMPLES, FIXED, Flow
from tfmw.compat.graph import is_symbolic
from tfmw.compat.losses import current_weight


class Origin(enum.IntEnum):
    """The origin of a lookup's ids; for a value computed from several origins, the greatest."""

    SAME = 0
    """Constants, variables and lengths of a batch: each replica has all ids of one process."""
    REDUCED = 1
    """Values computed over the examples, such as the unique ids: each replica has some of them."""
    UNKNOWN = 2
    """Random numbers, other stateful values, eager tensors, and all values of unknown origin."""
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
# Operations -> the index of their output that has each id once.
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
    """A replica's sparse gradient, split by the lookups whose gradients it concatenates."""
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
    """Inverse of `row_parts`, for the results of a compiled function."""
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
        # Keras's `take` selects ids + rows of the table if ids < 0, else the ids.
        source = source.op.inputs[2 if source.op.type == "SelectV2" else 0]
    if flow.kind != "fixed" and _DISTINCT.get(source.op.type) == source.value_index:
        return Origin.REDUCED
    if flow.kind == "fixed":
        return Origin.UNKNOWN if any(map(_draws, flows.operations(ids))) else Origin.SAME
    reduces = flow.kind == "reduced"
    if flow.kind == "size":  # indices of the examples
        ranges = [op.outputs[0] for op in flows.operations(ids) if op.type == "Range"]
        reduces = any(flows.of(numbers).kind != "fixed" for numbers in ranges)
    if flow.kind == "compared":  # ids in another order have the same number
        reduces = flow.origin is None or flow.origin.type in REDUCTIONS.union(_DISTINCT)
    if flow.kind in ("nonlinear", "unknown"):
        return Origin.UNKNOWN
    return Origin.REDUCED if reduces else Origin.EXAMPLES


def _draws(op: tf.Operation) -> bool:
    """Whether an operation may have different results on replicas with equal inputs."""
    return "Random" in op.type or (op.op_def.is_stateful and op.type not in _STATELESS)
