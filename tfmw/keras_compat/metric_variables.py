"""The variables of a model's metrics, and how values of several replicas are combined."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfmw.keras_compat.graph import ancestors, descendants, is_symbolic
from tfmw.keras_compat.models import native
from tfmw.keras_compat.objects import Trainer, unique


def leaf_metrics(model: keras.Model) -> list[Any]:
    """All metrics, including those inside the compiled container."""
    found: list[Any] = []
    todo = list(model.metrics)
    while todo:
        metric = todo.pop(0)
        if all(metric is not f for f in found):
            found.append(metric)
            todo.extend(getattr(metric, "metrics", None) or getattr(metric, "_metrics", []) or [])
    return [m for m in found if m is not None]


def metric_variables(model: keras.Model) -> list[Any]:
    """The variables of a model's metrics, each once."""
    return unique(variable for metric in model.metrics for variable in metric.variables)


def combination(variable: Any, value: Any) -> str | None:
    """How values of several replicas are combined, according to a step's update of the variable.

    Args:
        variable: a Keras variable.
        value: the tensor that a step assigns to it.

    Returns:
        "sum" for variable + x, "max" for max(variable, x), "min" for min(variable, x); None for any
        other update, such as a moving average or the last value.
    """
    if not is_symbolic(value):
        return "sum"  # eager: there is no graph to inspect
    handles = _handles(variable, value)
    reading = descendants(handles)
    kinds: dict[str, str | None] = {}  # of the operations that read the variable
    for op in ancestors([value], stop=lambda t: t.op.name not in reading):
        kinds[op.name] = _update_kind(op, [kinds.get(t.op.name) for t in op.inputs], reading)
    return kinds.get(value.op.name)


def _update_kind(op: tf.Operation, kinds: list[str | None], reading: set[str]) -> str | None:
    """`combination` of one operation, or "unchanged"."""
    reads = [t.op.name in reading for t in op.inputs]
    if op.type in ("Identity", "Cast", "Reshape", "EnsureShape", "StopGradient"):
        return kinds[0]
    if op.type == "ReadVariableOp":
        return "unchanged"
    if op.type in ("AddV2", "Add", "AddN", "Sub", "Maximum", "Minimum"):
        if sum(reads) != 1 or (op.type == "Sub" and not reads[0]):
            return None
        done = {"Maximum": "max", "Minimum": "min"}.get(op.type, "sum")
        return done if kinds[reads.index(True)] in ("unchanged", done) else None
    if op.type in ("SelectV2", "Select"):
        found = set(kinds[1:]) - {"unchanged"} or {"unchanged"}
        return found.pop() if len(found) == 1 and not reads[0] else None
    if op.type == "TensorScatterAdd":
        return "sum" if kinds[0] else None
    return None


def increment(variable: Any, value: Any) -> Any | None:
    """The tensor x of an update to f(variable) + x, where only f reads the variable; else None."""
    if not is_symbolic(value):
        return None
    operation = value.op
    while operation.type in ("Identity", "EnsureShape", "StopGradient"):
        operation = operation.inputs[0].op
    if operation.type not in ("AddV2", "Add"):
        return None
    reading = descendants(_handles(variable, value))
    others = [t for t in operation.inputs if t.op.name not in reading]
    return others[0] if len(others) == 1 else None


def _handles(variable: Any, value: Any) -> list[tf.Tensor]:
    """The tensors by which the graph of `value` refers to a Keras variable."""
    replica = tf.distribute.get_replica_context()
    here = replica.strategy.experimental_local_results(native(variable))
    return [value.graph.capture(copy.handle) for copy in here]


def flatten_metrics(model: keras.Model, logs: dict[str, Any]) -> Any:
    """Logs in the order in which Keras reports them."""
    return model._flatten_metrics_in_order(logs)


@contextlib.contextmanager
def recorded_assignments(
    seen: list[Any], note: Callable[[Any, Any], Any] | None = None
) -> Iterator[None]:
    """Collects the Keras variables that are assigned to while a step is traced.

    Args:
        seen: list to which each variable is added once.
        note: called with (variable, value) at each assignment; returns what is assigned.
    """
    cls = keras.Variable
    keras_direct_assign = cls._direct_assign

    def direct_assign(self: Any, value: Any) -> Any:
        if all(self is not s for s in seen):
            seen.append(self)
        if note is not None:
            value = note(self, value)
        return keras_direct_assign(self, value)

    cls._direct_assign = direct_assign
    try:
        yield
    finally:
        cls._direct_assign = keras_direct_assign


PRIVATE_NAMES: list[tuple[Any, str]] = [
    (Trainer, "_flatten_metrics_in_order"),
    (keras.Variable, "_direct_assign"),
]
