"""Optimizers of a model, their slots, and the inputs of an update."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfmw.compat.objects import held_by, overridden, unique


def optimizers_of(model: keras.Model) -> list[Any]:
    """The outermost optimizers that the model and its layers hold, the compiled one first."""
    held = [getattr(model, "optimizer", None)]
    for layer in model._flatten_layers():  # the model itself comes first
        if type(layer).__module__.startswith("keras.") and layer is not model:
            held += vars(layer).values()  # lists and other objects of these are Keras's own
        else:
            held += [value for _, value in held_by(layer)]
    return unique(each for each in held if isinstance(each, keras.optimizers.Optimizer))


def with_inner_optimizers(*outer: Any) -> Iterator[Any]:
    """Yields optimizers, each before the inner ones of a LossScaleOptimizer or a MultiOptimizer."""
    for optimizer in outer:
        yield optimizer
        wrapped = getattr(optimizer, "inner_optimizer", None)
        inner = [wrapped, *getattr(optimizer, "_inner_optimizers", [])]
        yield from with_inner_optimizers(*(each for each in inner if each is not None))


def variables_of(optimizer: Any) -> list[Any]:
    """The Keras variables that a built optimizer updates, in its order."""
    return list(optimizer._trainable_variables)


def slot_lists(optimizer: Any) -> list[tuple[str, list[Any]]]:
    """(name, slots in the order of the updated variables; None if a variable has no slot).

    Keras keeps slots in lists as long as the list of variables, under names of their own.
    """
    count = len(optimizer._trainable_variables)
    return [
        (name, list(value))
        for name, value in vars(optimizer).items()
        if name not in ("_trainable_variables", "_variables")
        and isinstance(value, list | tuple)
        and len(value) == count
        and any(v is not None for v in value)
        and all(v is None or isinstance(v, keras.Variable) for v in value)
    ]


def optimizer_slots(optimizer: Any) -> list[list[Any]]:
    """The optimizer's slots for each variable that it updates."""
    lists = [slots for _, slots in slot_lists(optimizer)]
    return [
        unique(slots[i] for slots in lists if slots[i] is not None)
        for i in range(len(variables_of(optimizer)))
    ]


@contextlib.contextmanager
def stable_variable_keys(outer: Iterable[Any], variables: list[Any]) -> Iterator[None]:
    """Keeps the variable-to-slot maps of optimizers valid while tf.Variables are substituted."""
    overrides: list[tuple[Any, str, Any]] = []
    for each in with_inner_optimizers(*outer):
        keys = {id(v): each._var_key(v) for v in variables}
        keras_key = each._var_key

        def key(variable: Any, keys: dict[int, Any] = keys, default: Any = keras_key) -> Any:
            return keys[id(variable)] if id(variable) in keys else default(variable)

        overrides.append((each, "_var_key", key))
    with overridden(overrides):
        yield


def rebuild_variable_maps(optimizer: Any) -> None:
    """Rebuilds the maps that an optimizer keeps by the ids of variables."""
    for each in with_inner_optimizers(optimizer):
        old = dict(getattr(each, "_trainable_variables_indices", {}))
        keys = [each._var_key(v) for v in getattr(each, "_trainable_variables", [])]
        each._trainable_variables_indices = {key: i for i, key in enumerate(keys)}
        excluded = getattr(each, "_exclude_from_weight_decay", None)
        if excluded:
            each._exclude_from_weight_decay = {keys[old[k]] for k in excluded if k in old}
        if hasattr(each, "_exclude_from_weight_decay_cache"):
            each._exclude_from_weight_decay_cache = {}


# ---------------------------------------------------------------- what an update looks at

_BY_ELEMENT = (
    keras.optimizers.SGD,
    keras.optimizers.Adam,
    keras.optimizers.AdamW,
    keras.optimizers.Adamax,
    keras.optimizers.Nadam,
    keras.optimizers.Lion,
)
"""Keras's optimizers that update each element of a variable by its own gradient and slots.

Their operations round equally at any place of an array.
"""

_BY_ELEMENT_COMPILED = (
    *_BY_ELEMENT,
    keras.optimizers.RMSprop,
    keras.optimizers.Adagrad,
    keras.optimizers.Adadelta,
)
"""Optimizers that update each element alone only if XLA compiles the update.

Without XLA, TensorFlow divides by a square root, and rounds the last few elements of an array
differently. Ftrl's power may differ so in both.
"""

_OWN_UPDATE = {"update_step", "get_config", "from_config"}
"""Methods that a user's optimizer may define."""


def refuses_parts(optimizer: Any) -> str | None:
    """Reason why an optimizer must see all variables at once; None if it need not.

    Args:
        optimizer: a built optimizer.
    """
    for each in with_inner_optimizers(optimizer):
        if getattr(each, "_inner_optimizers", None):
            return f"{type(each).__name__} holds several optimizers"
        own = _overrides_of_user(each)
        if own:
            return f"{type(each).__name__} has its own {', '.join(sorted(own))}"
        if each.global_clipnorm and each.gradient_accumulation_steps:
            return "global_clipnorm looks at accumulated gradients"
        if not all(isinstance(v, keras.Variable) for v in each._trainable_variables):
            return f"{type(each).__name__} updates variables that are not Keras's"
        known = {id(slot) for _, slots in slot_lists(each) for slot in slots if slot is not None}
        inner = getattr(each, "inner_optimizer", None)
        known |= {id(v) for v in ([] if inner is None else inner.variables)}
        if any(id(v) not in known and len(v.shape) for v in each.variables):
            return f"{type(each).__name__} keeps state that belongs to no variable"
    return None


def _overrides_of_user(optimizer: Any) -> set[str]:
    found: set[str] = set()
    for kind in type(optimizer).__mro__:
        if kind.__module__.startswith("keras."):
            break
        found |= {n for n in vars(kind) if hasattr(keras.optimizers.Optimizer, n)}
    return {n for n in found if not n.startswith("__") and n not in _OWN_UPDATE}


def updated_by_element(optimizer: Any, variable: Any, compiled: bool) -> bool:
    """Whether the elements of a variable may be updated separately, with the same result.

    Args:
        compiled: whether XLA compiles the update.
    """
    inner = list(with_inner_optimizers(optimizer))[-1]
    return (
        type(inner) in (_BY_ELEMENT_COMPILED if compiled else _BY_ELEMENT)
        and not inner.clipnorm
        and variable.constraint is None
    )


def has_slots(optimizer: Any) -> bool:
    """Whether the optimizer keeps state for each variable."""
    return any(slot_lists(each) for each in with_inner_optimizers(optimizer))


def global_clipnorm(optimizer: Any) -> float | None:
    """The norm to which all gradients are clipped together; None if they are not."""
    norms = [each.global_clipnorm for each in with_inner_optimizers(optimizer)]
    return next((norm for norm in norms if norm), None)


def loss_scale(optimizer: Any) -> Any:
    """The factor by which the optimizer divides gradients."""
    scale = getattr(optimizer, "dynamic_scale", None)
    if scale is not None:
        return tf.identity(scale.value)
    return optimizer.loss_scale_factor or 1.0


def checks_finite(optimizer: Any) -> bool:
    """Whether the optimizer skips a step if a gradient is not finite."""
    return hasattr(optimizer, "check_finite")


def uses_weight_decay(optimizer: Any, variable: Any) -> bool:
    """Whether an optimizer decays this variable."""
    return bool(optimizer.weight_decay) and bool(optimizer._use_weight_decay(variable))


def current_learning_rate(optimizer: Any) -> Any:
    """The learning rate of this step, computed from the schedule if the optimizer has one."""
    return optimizer._get_current_learning_rate()


def updates_rows_alone(optimizer: Any) -> bool:
    """Whether Keras's own dense update leaves rows without a gradient unchanged."""
    if type(optimizer) is keras.optimizers.SGD:
        return not optimizer.momentum
    return type(optimizer) is keras.optimizers.Adagrad and not optimizer.weight_decay
