"""Models for another process: the state of Keras objects, and new variables for it."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from keras.src.models import functional, model
from keras.src.saving import keras_saveable
from keras.src.utils import backend_utils, tracking

from tfmw.keras_compat.optimizers import with_inner_optimizers


def is_saveable(part: Any) -> bool:
    """Whether `part` is a layer, model, loss, metric, optimizer, seed generator or similar."""
    return isinstance(part, keras_saveable.KerasSaveable)


def is_functional(part: Any) -> bool:
    """Whether `part` is a functional model, or of a class that derives from one."""
    return isinstance(part, functional.Functional)


def make_functional(cls: type) -> None:
    """Makes a model class functional, as Keras does at the first `super().__init__(in, out)`."""
    if not issubclass(cls, functional.Functional):
        model.inject_functional_model_class(cls)


def backend_switch(part: Any) -> str | None:
    """The backend of a preprocessing layer's backend wrapper; None for other objects.

    On a blank wrapper `__getattr__` would recurse endlessly.
    """
    return vars(part)["_backend"] if isinstance(part, backend_utils.DynamicBackend) else None


def saveable_state(part: Any) -> dict[str, Any]:
    """Attributes of a saveable, without compiled functions and TensorFlow's own (`_self_`)."""
    state = {k: v for k, v in vars(part).items() if not k.startswith("_self_")}
    for name in ("train_function", "test_function", "predict_function", "history"):
        if name in state:
            state[name] = None
    return state


def variable_state(variable: Any) -> tuple[dict[str, Any], Any]:
    """(attributes, value) of a Keras variable, whose tf.Variable cannot be pickled."""
    dropped = ("_value", "_initializer")
    state = {
        k: v for k, v in vars(variable).items() if k not in dropped and not k.startswith("_self_")
    }
    return {**state, "_initializer": None}, variable.numpy()


def new_native(state: dict[str, Any], value: Any) -> tf.Variable:
    """A tf.Variable for a Keras variable with these attributes."""
    return tf.Variable(
        value, dtype=state["_dtype"], trainable=state.get("_trainable", True), name=state["_name"]
    )


def is_tracked_collection(part: Any) -> bool:
    """Whether `part` is a list, dict or set that Keras tracks."""
    return isinstance(part, (tracking.TrackedList, tracking.TrackedDict, tracking.TrackedSet))


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
