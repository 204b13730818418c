"""Whether a scalar is a sum or a mean over the examples of a batch, according to its graph."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfmw.keras_compat.graph import BottomUp, is_symbolic, static_value

_SAME = ("Identity", "Cast", "Neg", "StopGradient", "Reshape", "Squeeze", "EnsureShape")
_BOTH = ("Add", "AddV2", "AddN", "Sub")
_QUOTIENTS = ("RealDiv", "DivNoNan", "Div")
_SHAPES = ("Shape", "Size")


def batch_reduction(value: Any, rows: int | None = None) -> str | None:
    """How a scalar was computed from the examples of a batch.

    Args:
        value: a symbolic tensor []; for any other value the result is None.
        rows: number of examples of the batch, if its shape has it; None where it is unknown.

    Returns:
        "sum", also for a sum multiplied by a value that does not depend on the batch; "mean"; None
        if the expression is neither, such as a weight penalty.
    """
    if not is_symbolic(value) or value.shape.rank != 0:
        return None
    return _reductions(rows)(value).reduction


def increment_kind(value: Any, rows: int | None) -> str:
    """What an increment of a variable, of any shape, is of a batch.

    Returns:
        "sum" of its examples, or a number of them; "once": a mean over its examples, or a value
        that does not depend on them; "unknown" for any other value.
    """
    if not is_symbolic(value):
        return "unknown"
    kind = _reductions(rows)(value).reduction
    if kind is not None:
        return "sum" if kind == "sum" else "once"
    if is_of_shape(value):
        return "sum"
    if not is_independent(value):
        return "unknown"
    number = None if rows is None else static_value(value)
    if number is None:
        return "once"
    if rows == 1:
        return "unknown"  # a number of examples, or of batches
    return "sum" if (number % rows == 0).all() and number.any() else "once"


def is_independent(value: Any) -> bool:
    """Whether a symbolic tensor depends on neither the values nor the shape of a batch."""
    origin = _origin(value) if is_symbolic(value) else None
    return origin is not None and not origin.values and not origin.shape


def is_of_shape(value: Any) -> bool:
    """Whether a symbolic tensor depends on the shape of a batch and not on its values."""
    origin = _origin(value) if is_symbolic(value) else None
    return origin is not None and not origin.values and origin.shape


def uses_shape(value: Any) -> bool:
    """Whether a symbolic tensor depends on the shape of any tensor."""
    return is_symbolic(value) and _origin(value).shape


class _Origin(NamedTuple):
    """What a tensor was computed from.

    Attributes:
        values: it depends on a batch's values, not only on constants, variables, shapes.
        shape: it depends on the shape of some tensor.
    """

    values: bool
    shape: bool


def _origin_rule(op: tf.Operation, inputs: list[_Origin]) -> _Origin:
    known = op.type in (*_SHAPES, "Const", "ReadVariableOp")
    return _Origin(
        values=not known and (not inputs or any(origin.values for origin in inputs)),
        shape=op.type in _SHAPES or any(origin.shape for origin in inputs),
    )


_origin = BottomUp(_origin_rule)


class _Kind(NamedTuple):
    """How a tensor was computed from the examples of a batch.

    Attributes:
        reduction: see `batch_reduction`.
        summed: number of values that were summed, if this is a sum of a known number of them.
    """

    reduction: str | None
    summed: int | None = None


@functools.cache
def _reductions(rows: int | None) -> BottomUp[_Kind]:
    """`batch_reduction` of tensors of any shape, for batches of some size."""

    def rule(op: tf.Operation, kinds: list[_Kind]) -> _Kind:
        inputs = list(op.inputs)
        if op.type in ("Sum", "Mean"):
            summed = inputs[0].shape.num_elements() if op.type == "Sum" else None
            if _reduces_examples(op, kinds[0], rows):
                return _Kind(op.type.lower(), summed)
            return _Kind(kinds[0].reduction, summed)
        if op.type in _SAME:
            return kinds[0]
        if op.type in _BOTH:
            found = {kind.reduction for kind in kinds}
            if found == {"mean", None} and all(
                kind.reduction or is_independent(t) for t, kind in zip(inputs, kinds, strict=True)
            ):
                return _Kind("mean")  # such as 1 - mean
            return _Kind(found.pop() if len(found) == 1 else None)
        if op.type == "Mul" or op.type in _QUOTIENTS:
            kind, other = kinds[0], inputs[1]
            if op.type == "Mul" and kind.reduction is None:
                kind, other = kinds[1], inputs[0]
            if kind.reduction is None or _origin(other).values:
                return _Kind(None)
            if not (_origin(other).shape or _is_known_size(other, kinds[0], rows)):
                return _Kind(kind.reduction)
            is_mean = kind.reduction == "sum" and op.type in _QUOTIENTS
            return _Kind("mean" if is_mean else None)
        return _Kind(None)

    return BottomUp(rule)


def _reduces_examples(op: tf.Operation, reduced: _Kind, rows: int | None) -> bool:
    """Whether a Sum or Mean is over the dimension of the batch's examples."""
    values, rank = op.inputs[0], op.inputs[0].shape.rank
    axes = static_value(op.inputs[1]) if rank else None
    if axes is None or 0 not in {int(a) % rank for a in axes.ravel()}:
        return False
    size = values.shape[0]
    if size is None or rows is None:
        return size is None
    # A layer may have as many units as a batch has examples.
    return bool(size == rows) and _origin(values).values and reduced.reduction is None


def _is_known_size(number: Any, total: _Kind, rows: int | None) -> bool:
    """Whether a constant is the number of a batch's examples, or of the values that were summed."""
    constant = None if rows is None else static_value(number)
    if constant is None or np.size(constant) != 1:
        return False
    return float(np.squeeze(constant)) in (rows, total.summed)
