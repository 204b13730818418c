"""Variables that a step assigns without an optimizer: SGD by hand, SAM, a codebook, a counter.

One process assigns a value computed from the whole batch. Each replica computes one from its shard
of the batch, so the replicas combine their values before the assignment:

* A weight gets the sum over replicas of sums over examples, and the weighted mean of means. A value
  computed from gradients is not combined. Instead `ReplicaWeight.exchanges` replaces the gradients
  by those of the global batch. Any other function of the examples is refused.
* A variable that a layer updates itself, such as a moving average, stays different on each replica,
  and is averaged when the epoch ends. If the step also reads it, it is combined like a weight.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import tensorflow as tf
from tensorflow.python.ops import resource_variable_ops

from tfmw.compat.dataflow.flow import FIXED
from tfmw.compat.differences import user_line
from tfmw.compat.graph import descendants, is_symbolic, static_value
from tfmw.compat.kept import ATTRIBUTE
from tfmw.compat.memory import copies_of
from tfmw.compat.models import native
from tfmw.compat.objects import overridden, overridden_here
from tfmw.errors import UsageError

if TYPE_CHECKING:
    from tfmw.compat.losses import ReplicaWeight


class Assignable(NamedTuple):
    """A variable that a step may assign."""

    variable: Any  # a Keras variable
    by_layer: bool  # whether it is a layer's non-trainable variable
    of_keras: bool = False  # whether the layer is one of Keras's
    of_replica: bool = False  # whether each replica has its own value: metrics and seeds


class Exchanges(NamedTuple):
    """Values that replicas combine in the middle of a step, because the step computes with them.

    Attributes:
        gradients: whether a tape's gradients are all-reduced to those of the global batch.
        variables: ids of the layers' variables that the step reads outside of their update.
    """

    gradients: bool = False
    variables: frozenset[int] = frozenset()


def increment(variable: Any, value: Any) -> tuple[Any, Any] | None:
    """(f(variable), x) of an update to f(variable) + x; None if it has another form."""
    if not is_symbolic(value):
        return None
    addends = _addends(value)
    reading = reading_operations(variable, value) if addends else set()
    for base, added in addends:
        if base.op.name in reading and added.op.name not in reading:
            return base, added
    return None


def _addends(value: Any) -> list[tuple[Any, Any]]:
    """(a, b) and (b, a) of a symbolic a + b, (a, -b) of a - b, none of other values."""
    operation = value.op
    while operation.type in ("Identity", "EnsureShape", "StopGradient"):
        operation = operation.inputs[0].op
    kind = operation.type
    if kind not in ("Add", "AddV2", "Sub", "TensorScatterAdd", "TensorScatterSub"):
        return []
    base, added = operation.inputs[0], operation.inputs[-1]
    if kind.startswith("TensorScatter"):
        indices = operation.inputs[1]
        added = tf.scatter_nd(indices, added, tf.shape(base, indices.dtype))
    if kind.endswith("Sub"):
        return [(base, -added)]
    return [(base, added), (added, base)]


def reading_operations(variable: Any, value: Any) -> set[str]:
    """Names of the operations in the graph of `value` that depend on a Keras variable."""
    return descendants(value.graph.capture(copy.handle) for copy in copies_of(native(variable)))


def is_read(variable: tf.Variable, graph: Any, before: set[str]) -> bool:
    """Whether the operations of a graph compute something other than the variable's new value.

    Args:
        before: names of the graph's operations to ignore.
    """
    handle = graph.capture(variable.handle)
    updates = {op.name for op in handle.consumers() if "Assign" in op.type or "Scatter" in op.type}
    results = {id(tensor) for tensor in graph.outputs}
    for name in descendants([handle]) - updates - before:
        op = graph.get_operation_by_name(name)
        if not any(tensor.consumers() for tensor in op.outputs):
            unused = op.type in ("ReadVariableOp", "Identity", "NoOp")
            if not unused or any(id(tensor) in results for tensor in op.outputs):
                return True
    return False


# ---------------------------------------------------------------- values


def _combined(
    weight: ReplicaWeight, copy: Any, value: Any, parts: tuple[Any, Any] | None = None
) -> Any:
    """The value to assign: equal on all replicas, unless they may differ until the epoch ends.

    Args:
        copy: this replica's `tf.Variable`.
        parts: (a value that does not depend on examples, the value added to it), if known.
    """
    target = weight.assignable[id(copy.handle)]
    parts = parts or increment(target.variable, value)
    flow = weight.flows.of(value)
    if flow.kind == "rows":
        _refuse_examples(target.variable, value)
    own = target.by_layer and value.dtype.is_floating
    if weight.is_local or (own and id(target.variable) not in weight.exchanges.variables):
        if is_symbolic(value):
            weight.own_values.append((target.variable, copy, value))
        return _estimate(weight, target, value, parts)
    new = _of_all(weight, target, value, parts)
    if weight.size_known:
        return new
    # At the end of the data no replica has examples, so that step assigns nothing.
    return tf.where(weight.global_examples > 0, new, copy.read_value())


def _estimate(weight: ReplicaWeight, target: Assignable, value: Any, parts: Any) -> Any:
    """A value whose mean over replicas is that of one process."""
    if not target.by_layer or not value.dtype.is_floating:
        return value
    if parts is not None and weight.reduction_of(parts[1]) == "sum":
        return parts[0] + weight.estimate_of_sum(parts[1])
    if not target.of_keras:  # the behaviour of Keras's layers is documented
        weight.note(f"the variable {target.variable.path}", value)
    return value


def _of_all(weight: ReplicaWeight, target: Assignable, value: Any, parts: Any) -> Any:
    flow = weight.flows.of(value)
    if not is_symbolic(value):
        return weight.means([value])[0] if value.dtype.is_floating else value
    if flow.kind == "fixed":
        return weight.of_first_replica(value) if _is_random(weight, value) else value
    if weight.wants_gradients(value):
        return value  # the step will be traced again, with other gradients
    for base, added in [parts] if parts is not None else _addends(value):
        if weight.flows.of(base).kind == "fixed" and weight.flows.of(added).kind != "fixed":
            total = weight.total(added)
            if total is not None:
                return base + total
    total = weight.total(value)
    if total is not None:
        return total
    if not target.by_layer or not value.dtype.is_floating:
        _refuse(target.variable, flow)
    weight.note(f"the variable {target.variable.path}", value)
    return weight.means([value])[0]


def _is_random(weight: ReplicaWeight, value: Any) -> bool:
    """Whether a value is computed from random numbers, which replicas draw on their own."""
    drawn = ("Random", "TruncatedNormal", "Multinomial")
    return any(
        any(word in op.type for word in drawn)
        and not (op.type.startswith("Stateless") and static_value(op.inputs[1]) is not None)
        for op in weight.flows.operations(value)
    )


def _refuse_examples(variable: Any, value: Any) -> None:
    line = user_line(value.op)
    raise UsageError(
        f"the variable {variable.path!r} gets values of single examples"
        f"{'' if line is None else f' at {line}'}, such as a queue of features: replicas have "
        "different examples, and a weight must be the same on all of them. Train on one "
        "replica, or keep a mean or sum over the batch in the variable."
    )


def _refuse(variable: Any, flow: Any) -> None:
    line = None if flow.origin is None else user_line(flow.origin)
    raise UsageError(
        f"the variable {variable.path!r} is assigned in a step, and its value is neither a sum nor "
        f"a mean over the examples of a batch{'' if line is None else f' ({line})'}: replicas have "
        "different examples, and a weight must be the same on all of them. Let an optimizer update "
        "it, assign sums and means to variables and compute from these, or train on one replica."
    )


def _refuse_other(variable: Any) -> None:
    raise UsageError(
        f"a step assigns the variable {variable.name!r}, which the model does not hold, such as "
        "one of a loss or a global one: each replica would have its own value. Create it with "
        "self.add_weight(...) in a layer or the model, return its metric from the model's "
        "`metrics`, or keep its optimizer in an attribute of the model."
    )


# ---------------------------------------------------------------- TensorFlow's methods


def _watched(replacement: Callable[..., Any]) -> Callable[..., Any]:
    """Replaces a method for the variables of the model, outside of `optimizer.apply`.

    Other variables are refused.
    """

    def hook(weight: ReplicaWeight, method: Any, copy: Any, *arguments: Any, **named: Any) -> Any:
        if not weight.watches or ATTRIBUTE in vars(copy):  # one of tfmw's own
            return method(copy, *arguments, **named)
        if id(copy.handle) not in weight.assignable:
            _refuse_other(copy)
        if weight.assignable[id(copy.handle)].of_replica:
            return method(copy, *arguments, **named)
        with overridden([(weight, "watches", False)]):
            return replacement(weight, method, copy, *arguments, **named)

    return hook


def _assign(weight: ReplicaWeight, method: Any, copy: Any, value: Any, *a: Any, **k: Any) -> Any:
    value = tf.convert_to_tensor(value, copy.dtype)
    return method(copy, _combined(weight, copy, value), *a, **k)


def _added(sign: int) -> Callable[..., Any]:
    def assign_add(
        weight: ReplicaWeight, method: Any, copy: Any, delta: Any, *_: Any, **__: Any
    ) -> Any:
        return _assign_sum(weight, copy, sign * tf.convert_to_tensor(delta, copy.dtype))

    return assign_add


def _assign_sum(weight: ReplicaWeight, copy: Any, added: Any) -> Any:
    base = copy.read_value()
    return copy.assign(_combined(weight, copy, base + added, (base, added)))


def _assign_slice(
    weight: ReplicaWeight,
    method: Any,
    copy: Any,
    begin: Any,
    end: Any,
    strides: Any,
    value: Any,
    *arguments: Any,
    **named: Any,
) -> Any:
    value = tf.convert_to_tensor(value, copy.dtype)
    target = weight.assignable[id(copy.handle)]
    if weight.flows.of(value).kind == "rows":
        _refuse_examples(target.variable, value)
    value = value if weight.is_local else _of_all(weight, target, value, None)
    return method(copy, begin, end, strides, value, *arguments, **named)


_SCATTERED: dict[str, Any] = {
    "update": tf.tensor_scatter_nd_update,
    "max": tf.tensor_scatter_nd_max,
    "min": tf.tensor_scatter_nd_min,
}


def _scatter(name: str) -> Callable[..., Any]:
    """Replaces `scatter_<how>` and `scatter_nd_<how>`."""
    how = name.rpartition("_")[2]

    def scatter(
        weight: ReplicaWeight, method: Any, copy: Any, slices: Any, *rest: Any, **named: Any
    ) -> Any:
        if isinstance(slices, tf.IndexedSlices):
            indices, updates = slices.indices[:, None], slices.values
        else:
            indices, updates = slices, rest[0] if rest else named["updates"]
        updates = tf.convert_to_tensor(updates, copy.dtype)
        if how in ("add", "sub"):
            shape = tf.constant(copy.shape.as_list(), indices.dtype)
            added = tf.scatter_nd(indices, updates if how == "add" else -updates, shape)
            return _assign_sum(weight, copy, added)
        if how in _SCATTERED:
            new = _SCATTERED[how](copy.read_value(), indices, updates)
            return copy.assign(_combined(weight, copy, new))
        if any(weight.flows.of(tensor) != FIXED for tensor in (indices, updates)):
            _refuse(weight.assignable[id(copy.handle)].variable, weight.flows.of(updates))
        return method(copy, slices, *rest, **named)

    return scatter


_REPLACED: dict[str, Callable[..., Any]] = {
    "assign": _assign,
    "assign_add": _added(1),
    "assign_sub": _added(-1),
    "_strided_slice_assign": _assign_slice,
    **{
        name: _scatter(name)
        for name in (
            *(f"scatter_{how}" for how in ("add", "sub", "update", "max", "min", "mul", "div")),
            *(f"scatter_nd_{how}" for how in ("add", "sub", "update", "max", "min")),
        )
    },
}

HOOKS: list[tuple[Any, str, Callable[..., Any]]] = [
    (cls, name, _watched(replacement))
    for cls in (resource_variable_ops.BaseResourceVariable, resource_variable_ops.ResourceVariable)
    for name, replacement in _REPLACED.items()
    if name in vars(cls)  # TensorFlow wraps some methods in the subclass
]
"""Methods and their replacements; see `step_hooks`."""


def refusing_others() -> contextlib.AbstractContextManager[None]:
    """Refuses a step's assignments to variables other than tfmw's own, which a worker's are."""

    def refusing(method: Any) -> Any:
        def assign(copy: Any, *arguments: Any, **named: Any) -> Any:
            if tf.inside_function() and ATTRIBUTE not in vars(copy):
                _refuse_other(copy)
            return method(copy, *arguments, **named)

        return assign

    return overridden_here([(cls, name, refusing(vars(cls)[name])) for cls, name, _ in HOOKS])
