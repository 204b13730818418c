"""Keras objects that track their attributes: listing members, and overriding attributes."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

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


@contextlib.contextmanager
def overridden(overrides: list[tuple[Any, str, Any]]) -> Iterator[None]:
    """Overrides attributes of single objects, without attribute tracking, within this context."""
    before = [(obj, name, obj.__dict__.get(name)) for obj, name, _ in overrides]
    for obj, name, value in overrides:
        obj.__dict__[name] = value
    try:
        yield
    finally:
        for obj, name, value in reversed(before):
            if value is None:
                obj.__dict__.pop(name, None)
            else:
                obj.__dict__[name] = value


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
