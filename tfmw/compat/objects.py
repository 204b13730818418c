"""Keras objects that track their attributes: their members and state, and overridden attributes."""

from __future__ import annotations

import contextlib
import functools
import importlib
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src.models import functional, model
from keras.src.saving import keras_saveable
from keras.src.trainers import compile_utils
from keras.src.utils import backend_utils, tracking

from tfmw.compat import layer_graphs

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
"""The base class of models with Keras's own steps and `fit`; renamed in Keras 3.16."""

_base_trainer = importlib.import_module("keras.src.trainers.trainer")
BaseTrainer: Any = getattr(_base_trainer, "BaseTrainer", None) or _base_trainer.Trainer
"""The base class of all backends' trainers; renamed in Keras 3.16."""


_ABSENT = object()  # marks an attribute that the object itself does not have


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


def install_hooks(
    hooks: Iterable[tuple[Any, str, Callable[..., Any]]], current: Callable[[], Any]
) -> None:
    """Replaces functions of modules and classes for the whole process.

    Args:
        hooks: (owner, name of a function, its replacement). The function calls
            `replacement(current(), original, ...)`, and the original if `current()` is None.
        current: returns the state of this thread.
    """

    def hooked(original: Callable[..., Any], replacement: Callable[..., Any]) -> Any:
        @functools.wraps(original)
        def function(*arguments: Any, **named: Any) -> Any:
            state = current()
            if state is None:
                return original(*arguments, **named)
            return replacement(state, original, *arguments, **named)

        return function

    for owner, name, replacement in hooks:
        setattr(owner, name, hooked(getattr(owner, name), replacement))


_overriding = threading.RLock()


@contextlib.contextmanager
def overridden_here(functions: list[tuple[Any, str, Callable[..., Any]]]) -> Iterator[None]:
    """Overrides functions of modules and classes, for this thread alone, within this context.

    One thread at a time does: two would each restore what the other one has set, and the function
    of one of them would stay for the whole process.
    """
    here = threading.get_ident()

    def of_thread(function: Callable[..., Any], elsewhere: Callable[..., Any]) -> Any:
        @functools.wraps(elsewhere)
        def called(*args: Any, **named: Any) -> Any:
            return (function if threading.get_ident() == here else elsewhere)(*args, **named)

        return called

    with _overriding:
        before = [(owner, name, vars(owner)[name]) for owner, name, _ in functions]
        for owner, name, function in functions:
            setattr(owner, name, of_thread(function, vars(owner)[name]))
        try:
            yield
        finally:
            for owner, name, function in before:
                setattr(owner, name, function)


def contains(each: Any, objects: Iterable[Any]) -> bool:
    """Whether an object itself is among others; `==` would compare the values of variables."""
    return any(each is other for other in objects)


def unique(objects: Iterable[Any], without: Iterable[Any] = ()) -> list[Any]:
    """The objects without repetitions, in their order, except those in `without`."""
    skip = {id(each) for each in without}
    return list({id(each): each for each in objects if id(each) not in skip}.values())


def held_by(owner: Any) -> Iterator[tuple[str, Any]]:
    """Yields (attribute, value) of the members of a user's object, in order.

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
    """(name, value) of the attributes, in reverse order."""
    return [(prefix + name, value) for name, value in reversed(_own_state(owner).items())]


def _own_state(owner: Any) -> dict[str, Any]:
    """Attributes of the object, without those of TensorFlow."""
    return {k: v for k, v in vars(owner).items() if not k.startswith("_self_")}


def _is_plain(value: Any) -> bool:
    """Whether an object is of a user's class, and no optimizer, variable, layer or function."""
    if isinstance(value, keras.optimizers.Optimizer | keras.Variable | tf.Variable):
        return False
    # A type of an extension module, such as SWIG's, may have no module.
    package = getattr(type(value), "__module__", "builtins").partition(".")[0]
    return package not in _LIBRARIES and hasattr(value, "__dict__") and not callable(value)


# ---------------------------------------------------------------- in another process


def reduced(part: Any) -> tuple[Any, ...] | None:
    """Recipe for pickle to rebuild a Keras object that it does not support; None for other objects.

    The result has the form of `object.__reduce_ex__`.
    """
    if part is getattr(compile_utils.CompileLoss, "Loss", compile_utils):
        return getattr, (compile_utils.CompileLoss, "Loss")  # it does not know its qualified name
    if isinstance(part, keras.Variable):  # its tf.Variable cannot be pickled
        dropped = ("_value", "_initializer")
        state = {k: v for k, v in _own_state(part).items() if k not in dropped}
        return _variable, (type(part), {**state, "_initializer": None}, part.numpy())
    # Layers, losses, metrics, optimizers; operations of `keras.ops`, such as a sum of two layers.
    if isinstance(part, keras_saveable.KerasSaveable | keras.Operation):
        blank = type(part), isinstance(part, functional.Functional)
        return _blank, blank, saveable_state(part), None, None, _fill
    if isinstance(part, (tracking.TrackedList, tracking.TrackedDict, tracking.TrackedSet)):
        base = next(b for b in (list, dict, set) if isinstance(part, b))
        return _blank, (type(part),), (vars(part), base(part)), None, None, _fill_collection
    if isinstance(part, backend_utils.DynamicBackend):
        # A preprocessing layer. On a blank one `__getattr__` would recurse endlessly.
        return type(part), (vars(part)["_backend"],)
    return None


def saveable_state(part: Any) -> dict[str, Any]:
    """Attributes of a layer, model or similar object, without compiled functions and `LINKS`."""
    functions = ("train_function", "test_function", "predict_function")
    own = {k: v for k, v in _own_state(part).items() if k not in layer_graphs.LINKS}
    state = {k: None if k in functions else v for k, v in own.items()}
    if isinstance(part, keras.Model):  # Keras sets these at the start of a call
        flags = dict.fromkeys(("stop_training", "stop_evaluating", "stop_predicting"), False)
        initial: dict[str, Any] = {**flags, "history": None}
        state = {k: v for k, v in state.items() if k not in initial} | initial
    return state


def _variable(cls: type, state: dict[str, Any], value: Any) -> Any:
    variable: Any = object.__new__(cls)
    vars(variable).update(state)
    trainable = state.get("_trainable", True)
    variable._value = tf.Variable(
        value, dtype=state["_dtype"], trainable=trainable, name=state["_name"]
    )
    return variable


def _blank(cls: type, is_functional: bool = False) -> Any:
    if is_functional and not issubclass(cls, functional.Functional):
        # Keras changes the bases of a class that calls `super().__init__(inputs, outputs)` when its
        # first model is created. In a process that has only imported the class, there was none.
        model.inject_functional_model_class(cls)
    base = next((b for b in (list, dict, set) if issubclass(cls, b)), object)
    return base.__new__(cls)


def _fill(part: Any, state: dict[str, Any]) -> None:
    # `__setattr__` would track objects twice.
    vars(part).update(state)


def _fill_collection(part: Any, state: tuple[dict[str, Any], Any]) -> None:
    attributes, members = state
    vars(part).update(attributes)
    # The built-in method, which does not track the members.
    fill = list.extend if isinstance(part, list) else type(members).update
    fill(part, members)
