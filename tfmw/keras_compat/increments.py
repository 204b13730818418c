"""Increments of users' own variables: once for a batch, or for each example.

In one process a batch is added to a variable once. Here each replica adds its own part:

* A metric of a user's own adds up over replicas. Sums over examples are right as they are. What
  one process adds once for a batch, its mean or the number 1, is multiplied by the replica's
  fraction of the batch.
* A variable of a layer is averaged over replicas, by their numbers of examples. Means are right as
  they are. A sum over a replica's examples is made an estimate of that over the batch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfmw.errors import UsageError
from tfmw.keras_compat.differences import user_line
from tfmw.keras_compat.graph import is_symbolic
from tfmw.keras_compat.losses import ReplicaWeight, current_weight
from tfmw.keras_compat.metric_variables import combination, increment, leaf_metrics
from tfmw.keras_compat.objects import overridden

_collecting = threading.local()


def assigned_in_layer(variable: Any, value: Any) -> Any:
    """The value for a variable of a layer in a step of a replica, in place of `value`."""
    weight = current_weight()
    if weight is None or not variable.dtype.startswith(("float", "bfloat")):
        return value
    if is_symbolic(value):
        _refuse_rows(variable, value, weight)
    added = increment(variable, value)
    if added is None or increment_kind(added, weight) != "sum":
        return value
    return value + (weight.estimate_of_sum(added) - added)


def _refuse_rows(variable: Any, value: Any, weight: ReplicaWeight) -> None:
    """Refuses a queue of examples, or whatever else keeps values of single examples."""
    if weight.flows.of(value).kind != "rows":
        return
    line = user_line(value.op)
    raise UsageError(
        f"the variable {variable.path!r} gets values of single examples"
        f"{'' if line is None else f' at {line}'}, such as a queue of features: replicas have "
        "different examples, and a weight must be the same on all of them. Train on one replica, "
        "or keep a mean or sum over the batch in the variable."
    )


def increment_kind(value: Any, weight: ReplicaWeight) -> str:
    """The kind of an increment of a variable, of any shape.

    Returns:
        "sum" of its examples, or a number of them; "once": a mean over its examples, or a value
        that does not depend on them; "unknown" for any other value.
    """
    if not is_symbolic(value):
        return "unknown"
    reduction = weight.reduction_of(value)
    if reduction is not None:
        return "sum" if reduction == "sum" else "once"
    return "once" if weight.flows.of(value).kind == "fixed" else "unknown"


def note_metric_update(variable: Any, value: Any) -> None:
    """Notes an assignment to a variable of a metric, within its `update_state`."""
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
    """Takes back what replicas add too much; of what is unknown, nothing, but it is noted."""
    kinds, once = set(), []
    for variable, value in updates:
        if combination(variable, value) != "sum":
            continue
        added = increment(variable, value)
        kind = increment_kind(added, weight)
        if is_symbolic(added):
            weight.note(f"the metric {metric.name}", added)
        if kind == "once" and added is not None and added.dtype.is_floating:
            once.append((variable, added))
        elif kind == "once":  # an integer: no part of it can be added
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
