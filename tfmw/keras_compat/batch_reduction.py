"""Whether a scalar is a sum or a mean over the examples of a batch, according to its graph."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

_SAME = ("Identity", "Cast", "Neg", "StopGradient", "Reshape", "Squeeze", "EnsureShape")
_BOTH = ("Add", "AddV2", "AddN", "Sub")
_QUOTIENTS = ("RealDiv", "DivNoNan", "Div")


def batch_reduction(value: Any, rows: int | None = None) -> str | None:
    """How a scalar was computed from the examples of a batch.

    Args:
        value: a symbolic tensor []; for any other value the result is None.
        rows: number of examples of the batch, if its shape has it; None where it is unknown.

    Returns:
        "sum", also for a sum multiplied by a value that does not depend on the batch; "mean"; None
        if the expression is neither, such as a weight penalty.
    """
    if not _is_symbolic(value) or value.shape.rank != 0:
        return None
    return _reduction(value, rows)


def increment_kind(value: Any, rows: int | None) -> str:
    """What an increment of a variable, of any shape, is of a batch.

    Returns:
        "sum" of its examples, or a number of them; "once": a mean over its examples, or a value
        that does not depend on them; "unknown" for any other value.
    """
    if not _is_symbolic(value):
        return "unknown"
    kind = _reduction(value, rows)
    if kind is not None:
        return "sum" if kind == "sum" else "once"
    if is_of_shape(value):
        return "sum"
    if not is_independent(value):
        return "unknown"
    number = None if rows is None else tf.get_static_value(value)
    if number is None:
        return "once"
    if rows == 1:
        return "unknown"  # a number of examples, or of batches
    return "sum" if (number % rows == 0).all() and number.any() else "once"


def is_independent(value: Any) -> bool:
    """Whether a symbolic tensor depends on neither the values nor the shape of a batch."""
    return (
        _is_symbolic(value)
        and not _depends_on_values(value)
        and not _depends_on(value, ("Shape", "Size"))
    )


def is_of_shape(value: Any) -> bool:
    """Whether a symbolic tensor depends on the shape of a batch and not on its values."""
    return (
        _is_symbolic(value)
        and not _depends_on_values(value)
        and _depends_on(value, ("Shape", "Size"))
    )


def _is_symbolic(value: Any) -> bool:
    return isinstance(value, tf.Tensor) and hasattr(value, "graph")


def _reduction(value: Any, rows: int | None) -> str | None:
    """`batch_reduction` of a tensor of any shape."""
    operation = value.op
    inputs = list(operation.inputs)
    if operation.type in ("Sum", "Mean"):
        if not inputs[0].shape.rank:
            return _reduction(inputs[0], rows)
        axes = tf.get_static_value(inputs[1])
        reduced = None if axes is None else {int(a) % inputs[0].shape.rank for a in axes.ravel()}
        if reduced is not None and 0 in reduced and _has_examples(inputs[0], rows):
            return operation.type.lower()
        return _reduction(inputs[0], rows)
    if operation.type in _SAME:
        return _reduction(inputs[0], rows)
    if operation.type in _BOTH:
        kinds = {_reduction(t, rows) for t in inputs}
        if kinds == {"mean", None} and all(
            _reduction(t, rows) or is_independent(t) for t in inputs
        ):
            return "mean"  # such as 1 - mean
        return kinds.pop() if len(kinds) == 1 else None
    if operation.type == "Mul" or operation.type in _QUOTIENTS:
        kind, other = _reduction(inputs[0], rows), inputs[1]
        if operation.type == "Mul" and kind is None:
            kind, other = _reduction(inputs[1], rows), inputs[0]
        if kind is None or _depends_on_values(other):
            return None
        is_size = _depends_on(other, ("Shape", "Size")) or _is_known_size(other, inputs[0], rows)
        if not is_size:
            return kind
        return "mean" if kind == "sum" and operation.type in _QUOTIENTS else None
    return None


def _is_known_size(number: Any, total: Any, rows: int | None) -> bool:
    """Whether a constant is the number of a batch's examples, or of the values that were summed."""
    constant = None if rows is None else tf.get_static_value(number)
    if constant is None or np.size(constant) != 1:
        return False
    while total.op.type in _SAME:
        total = total.op.inputs[0]
    summed = total.op.inputs[0].shape.num_elements() if total.op.type == "Sum" else None
    return float(np.squeeze(constant)) in (rows, summed)


def _has_examples(tensor: Any, rows: int | None) -> bool:
    """Whether the first dimension of a tensor is that of the batch's examples."""
    size = tensor.shape[0]
    if size is None or rows is None:
        return size is None
    # A layer may have as many units as a batch has examples.
    return bool(size == rows) and _depends_on_values(tensor) and _reduction(tensor, rows) is None


def _depends_on_values(tensor: Any) -> bool:
    """Whether a tensor depends on a batch's values, not only on constants, variables, shapes."""
    if tensor.op.type in ("Shape", "Size", "Const", "ReadVariableOp"):
        return False
    return not tensor.op.inputs or any(_depends_on_values(t) for t in tensor.op.inputs)


def _depends_on(tensor: Any, types: tuple[str, ...]) -> bool:
    return tensor.op.type in types or any(_depends_on(t, types) for t in tensor.op.inputs)
