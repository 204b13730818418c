"""Keras objects that track their attributes: their members and state, and overridden attributes."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterable, Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src.models import functional, model
from keras.src.saving import keras_saveable
from keras.src.utils import backend_utils, tracking

_LIBRARIES = ("builtins", "keras", "tensorflow", "numpy", "collections")


def backend_module(name: str) -> Any:
    """A module of Keras's TensorFlow backend, such as "nn"; since Keras 3.16 it is under `ops`."""
    package = "keras.src.backend.tensorflow"
    try:
        return importlib.import_module(f"{package}.{name}")
    except ModuleNotFoundError:
        return importlib.import_module(f"{package}.ops.{name}")


_trainer = importlib.import_module("keras.src.backend.tensorflow.trainer")
Trainer: Any = getattr(_trainer, "TensorFlowTrainer", None) or _trainer.Trainer
"""The base class of models with Keras's own steps and `fit`; renamed in Keras 3.16, as the next."""

_base_trainer = importlib.import_module("keras.src.trainers.trainer")
BaseTrainer: Any = getattr(_base_trainer, "BaseTrainer", None) or _base_trainer.Trainer
"""The base class of all backends' trainers."""


_ABSENT = object()  # of an attribute that an object does not have itself


@contextlib.contextmanager
def overridden(overrides: list[tuple[Any, str, Any]]) -> Iterator[None]:
    """Overrides attributes of single objects, without attribute tracking, within this context."""
    before = [(obj, name, vars(obj).get(name, _ABSENT)) for obj, name, _ in overrides]
    for obj, name, value in overrides:
        vars(obj)[name] = value
    try:
        yield
    finally:
        for obj, name, value in reversed(before):
            if value is _ABSENT:
                vars(obj).pop(name, None)
            else:
                vars(obj)[name] = value


def unique(objects: Iterable[Any]) -> list[Any]:
    """Each object once, in order. Variables cannot be compared by `==`."""
    return list({id(each): each for each in objects}.values())


def held_by(owner: Any) -> Iterator[tuple[str, Any]]:
    """Yields (attribute, value) of what a user's object holds, in order.

    Members of (nested) lists, tuples, dicts and plain objects have the name of the attribute.
    """
    left = _attributes(owner)
    seen = {id(owner)}
    while left:
        name, value = left.pop()
        members: list[tuple[str, Any]]
        if isinstance(value, dict):
            members = [(name, member) for member in reversed(value.values())]
        elif isinstance(value, (list, tuple)):
            members = [(name, member) for member in reversed(value)]
        elif _is_plain(value):
            members = _attributes(value, f"{name}.")
        else:
            yield name, value
            continue
        if id(value) not in seen:
            seen.add(id(value))
            left += members


def _attributes(owner: Any, prefix: str = "") -> list[tuple[str, Any]]:
    """(name, value), the last first; without TensorFlow's own attributes."""
    own = reversed(vars(owner).items())
    return [(prefix + name, value) for name, value in own if not name.startswith("_self_")]


def _is_plain(value: Any) -> bool:
    """Whether an object is of a user's class that is no optimizer, variable, layer or function."""
    if isinstance(value, keras.optimizers.Optimizer | keras.Variable | tf.Variable):
        return False
    package = type(value).__module__.partition(".")[0]
    return package not in _LIBRARIES and hasattr(value, "__dict__") and not callable(value)


# ---------------------------------------------------------------- state for another process


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
