"""Whether a scalar is a sum or a mean over the examples of a batch, according to its graph."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

_SAME = ("Identity", "Cast", "Neg", "StopGradient", "Reshape", "Squeeze", "EnsureShape")
_BOTH = ("Add", "AddV2", "AddN", "Sub")
_QUOTIENTS = ("RealDiv", "DivNoNan", "Div")


def batch_reduction(value: Any) -> str | None:
    """How a scalar was computed from the examples of a batch of unknown size.

    Args:
        value: a symbolic tensor []; for any other value the result is None.

    Returns:
        "sum", also for a sum multiplied by a value that does not depend on the batch; "mean"; None
        if the expression is neither, such as a weight penalty, or the batch size is known.
    """
    if not isinstance(value, tf.Tensor) or not hasattr(value, "graph") or value.shape.rank != 0:
        return None
    operation = value.op
    inputs = list(operation.inputs)
    if operation.type in ("Sum", "Mean"):
        if not inputs[0].shape.rank:
            return batch_reduction(inputs[0])
        axes = tf.get_static_value(inputs[1])
        over_batch = axes is not None and 0 in axes.reshape(-1) and inputs[0].shape[0] is None
        return operation.type.lower() if over_batch else None
    if operation.type in _SAME:
        return batch_reduction(inputs[0])
    if operation.type in _BOTH:
        kinds = {batch_reduction(t) for t in inputs}
        return kinds.pop() if len(kinds) == 1 else None
    if operation.type == "Mul" or operation.type in _QUOTIENTS:
        kind, other = batch_reduction(inputs[0]), inputs[1]
        if operation.type == "Mul" and kind is None:
            kind, other = batch_reduction(inputs[1]), inputs[0]
        if kind is None or _depends_on_values(other):
            return None
        if not _depends_on(other, ("Shape", "Size")):
            return kind
        return "mean" if kind == "sum" and operation.type in _QUOTIENTS else None
    return None


def _depends_on_values(tensor: Any) -> bool:
    """Whether a tensor depends on a batch's values, not only on constants, variables, shapes."""
    if tensor.op.type in ("Shape", "Size", "Const", "ReadVariableOp"):
        return False
    return not tensor.op.inputs or any(_depends_on_values(t) for t in tensor.op.inputs)


def _depends_on(tensor: Any, types: tuple[str, ...]) -> bool:
    return tensor.op.type in types or any(_depends_on(t, types) for t in tensor.op.inputs)
