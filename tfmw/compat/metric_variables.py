"""Variables that steps assign, and the combination of the replicas' values.

In one process a batch is added to a variable once. Here each replica adds its own shard:

* A metric of a user's own adds up over replicas. Sums over examples are right already. One process
  adds some values once per batch, such as its mean or the number 1. Here they are multiplied by the
  replica's fraction of the batch.
* A variable of a layer is averaged over replicas, by their numbers of examples. Means are right
  already. A sum over a replica's examples is scaled to an estimate of the sum over the batch.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfmw.compat.assigned_weights import increment, reading_operations
from tfmw.compat.graph import ancestors, is_symbolic
from tfmw.compat.losses import ReplicaWeight, current_weight
from tfmw.compat.objects import contains, overridden, unique
from tfmw.errors import UsageError

_collecting = threading.local()


def leaf_metrics(model: keras.Model) -> list[Any]:
    """All metrics, including those inside the compiled container."""
    found: list[Any] = []
    todo = list(model.metrics)
    while todo:
        metric = todo.pop(0)
        if not contains(metric, found):
            found.append(metric)
            todo.extend(getattr(metric, "metrics", None) or getattr(metric, "_metrics", []) or [])
    return [m for m in found if m is not None]


def metric_variables(model: keras.Model) -> list[Any]:
    """The variables of a model's metrics, each once."""
    return unique(variable for metric in model.metrics for variable in metric.variables)


def packed(rows: int, values: Sequence[np.ndarray]) -> np.ndarray:
    """Values of variables, [rows, ...] each, as one uint8 [rows, bytes] for `assign_row`.

    Bytes keep large integers and complex numbers exactly.
    """
    flat = [np.reshape(v, [rows, math.prod(v.shape[1:])]).view(np.uint8) for v in values]
    return np.concatenate([np.zeros([rows, 0], np.uint8), *flat], axis=1)


def assign_row(variables: Iterable[tf.Variable], row: np.ndarray) -> None:
    """Assigns a row of `packed` to variables."""
    start = 0
    for variable in variables:
        dtype = np.dtype(variable.dtype.as_numpy_dtype)
        size = variable.shape.num_elements() * dtype.itemsize
        part = row[start : start + size].view(dtype)
        variable.assign(part.reshape(variable.shape.as_list()))
        start += size


def combination(variable: Any, value: Any) -> str | None:
    """Combination of the values of several replicas, derived from the update in a step.

    Args:
        variable: a Keras variable.
        value: the tensor that a step assigns to it.

    Returns:
        "sum" for variable + x, "max" for max(variable, x), "min" for min(variable, x); None for any
        other update, such as a moving average or the last value.
    """
    if not is_symbolic(value):
        return "sum"  # eager: there is no graph to inspect
    reading = reading_operations(variable, value)
    kinds: dict[str, str | None] = {}  # kind of update of each operation that reads the variable
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


def note_combination(combined: dict[int, str], variable: Any, value: Any) -> None:
    """Records the `combination` of a metric's variable, by its id, at an assignment in a step.

    Raises:
        UsageError: values of several replicas or workers cannot be combined.
    """
    how = combination(variable, value)
    if how == "unchanged":
        return
    if how is None or combined.setdefault(id(variable), how) != how:
        raise UsageError(
            f"a metric updates its variable {variable.path!r} neither by addition nor by a "
            "maximum or minimum, so values of several replicas cannot be combined: keep sums "
            "and counts in variables, and divide in result()."
        )


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
        note: called with (variable, value) at each assignment; returns the value to assign.
    """
    cls = keras.Variable
    keras_direct_assign = cls._direct_assign

    def direct_assign(self: Any, value: Any) -> Any:
        if not contains(self, seen):
            seen.append(self)
        if note is not None:
            value = note(self, value)
        return keras_direct_assign(self, value)

    cls._direct_assign = direct_assign
    try:
        yield
    finally:
        cls._direct_assign = keras_direct_assign


# ---------------------------------------------------------------- increments


def increment_kind(value: Any, weight: ReplicaWeight) -> str:
    """The kind of an increment of a variable, of any shape.

    Returns:
        "sum": a sum over its examples, or their number; "once": a mean over its examples, or a
        value that does not depend on them; "unknown" for any other value.
    """
    if not is_symbolic(value):
        return "unknown"
    reduction = weight.reduction_of(value)
    if reduction is not None:
        return "sum" if reduction == "sum" else "once"
    return "once" if weight.flows.of(value).kind == "fixed" else "unknown"


def note_metric_update(variable: Any, value: Any) -> None:
    """Records an assignment to a variable of a metric, within its `update_state`."""
    updates = getattr(_collecting, "updates", None)
    if updates is not None:
        updates.append((variable, value))


def counting_batches_once(model: Any) -> list[tuple[Any, str, Callable[..., Any]]]:
    """(metric, "update_state", replacement) of each metric of a class that is not Keras's."""
    own = [
        metric
        for metric in leaf_metrics(model)
        if not type(metric).update_state.__module__.startswith(("keras.", "tfmw."))
    ]
    return [(metric, "update_state", _counted_once(metric)) for metric in own]


def _counted_once(metric: Any) -> Callable[..., Any]:
    update_state = metric.update_state

    def wrapper(*arguments: Any, **named: Any) -> Any:
        updates: list[tuple[Any, Any]] = []
        with overridden([(_collecting, "updates", updates)]):
            out = update_state(*arguments, **named)
        weight = current_weight()
        if weight is not None:
            _correct(metric, updates, weight)
        return out

    return wrapper


def _correct(metric: Any, updates: list[tuple[Any, Any]], weight: ReplicaWeight) -> None:
    """Removes the surplus that replicas add together; records updates that it cannot correct."""
    kinds, once = set(), []
    for variable, value in updates:
        if combination(variable, value) != "sum":
            continue
        parts = increment(variable, value)
        added = None if parts is None else parts[1]
        kind = increment_kind(added, weight)
        if is_symbolic(added):
            weight.note(f"the metric {metric.name}", added)
        if kind == "once" and added is not None and added.dtype.is_floating:
            once.append((variable, added))
        elif kind == "once":  # an integer, of which no fraction can be added
            kind = "unknown"
        kinds.add(kind)
    if "unknown" in kinds:
        if once:
            weight.differences.messages.append(
                f"the metric {metric.name} adds up values of a whole batch together with others: "
                "it is the mean of what replicas find in their parts of the batch. Return one "
                "value per example, or keep sums and counts in variables and divide in result()."
            )
        return
    for variable, added in once:
        much = added * tf.cast(1 - weight.fraction, added.dtype)
        variable.assign(variable.value - tf.cast(much, variable.dtype))


def python_logs(logs: Mapping[str, Any]) -> dict[str, Any]:
    """Logs in Keras's form: flat, with Python floats for scalars."""
    flat: dict[str, Any] = {}
    for name, value in logs.items():
        if isinstance(value, dict):
            flat.update(python_logs(value))
            continue
        array = np.asarray(value)
        flat[name] = float(array) if array.ndim == 0 else array
    return flat
