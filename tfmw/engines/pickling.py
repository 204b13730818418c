"""Pickles Keras models for child processes of this one.

    packed = pack((model, settings), large)          # bytes; large arrays go into the list
    model, settings = call.loads(packed, large)      # in a child process
    settled(model)

Keras's own archive needs a `get_config` and registered classes, which models of a notebook often
lack. Here layers, losses, metrics and optimizers are pickled attribute by attribute, and variables
as arrays. Classes and functions that no module contains are pickled too (cloudpickle). The bytes
are passed in memory to children of this process: nothing is read from a disk or a network.
"""

from __future__ import annotations

import importlib
import io
import pickle
import threading
import weakref
from typing import Any

import keras
import tensorflow as tf

from tfmw.errors import UsageError, first_line
from tfmw.keras_compat import models, objects, optimizers
from tfmw.launcher import call

# Errors of objects that cannot be pickled; OpError: a layer's lookup table, say.
_REFUSALS = (TypeError, ValueError, AttributeError, NotImplementedError, tf.errors.OpError)


def pack(value: Any, large: list[pickle.PickleBuffer] | None = None) -> bytes:
    """Pickles a structure of models, data and settings.

    Args:
        value: the structure.
        large: gets the arrays that are too large to be copied into the pickle; None: all are.

    Raises:
        UsageError: an object in it cannot be pickled, or cloudpickle is not installed.
    """
    try:
        cloudpickle = importlib.import_module("cloudpickle")
    except ImportError:
        raise UsageError(
            "sending a model to other processes needs cloudpickle, which is not installed: "
            "pip install cloudpickle."
        ) from None

    class Pickler(cloudpickle.Pickler):  # type: ignore[name-defined]
        def reducer_override(self, part: Any) -> Any:
            reduced = _reduced(part)
            return super().reducer_override(part) if reduced is None else reduced

    buffer = io.BytesIO()
    try:
        Pickler(buffer, 5, None if large is None else call.apart(large)).dump(value)
    except (*_REFUSALS, pickle.PicklingError) as e:
        reason = first_line(e)
        raise UsageError(
            f"something in the arguments cannot be sent to other processes ({reason}): pass "
            "callables that make the model and the dataset in each process."
        ) from e
    return buffer.getvalue()


def settled(model: keras.Model) -> keras.Model:
    """An unpacked model, after rebuilding its optimizers' maps of variables."""
    for optimizer in optimizers.optimizers_of(model):
        optimizers.rebuild_variable_maps(optimizer)
    return model


def _reduced(part: Any) -> Any:
    """How to rebuild an object that pickle does not support; None for other objects."""
    if isinstance(part, keras.Variable):
        return _variable, (type(part), *objects.variable_state(part))
    if objects.is_saveable(part):
        make = _blank_functional if objects.is_functional(part) else _blank
        return make, (type(part),), objects.saveable_state(part), None, None, _fill
    if objects.is_tracked_collection(part):
        base = next(b for b in (list, dict, set) if isinstance(part, b))
        return _blank, (type(part),), (vars(part), base(part)), None, None, _fill_collection
    if (backend := objects.backend_switch(part)) is not None:
        return type(part), (backend,)
    if isinstance(part, weakref.ReferenceType):
        return weakref.ref, (part(),)
    if isinstance(part, _LOCKS):
        return threading.RLock, ()
    return None


_LOCKS = (type(threading.Lock()), type(threading.RLock()))


def _blank(cls: type) -> Any:
    base = next((b for b in (list, dict, set) if issubclass(cls, b)), object)
    return base.__new__(cls)


def _blank_functional(cls: type) -> Any:
    """A blank model of a class that calls `super().__init__(inputs, outputs)`.

    Keras changes the bases of such a class when its first model is created. In a process that has
    only imported the class, that has not happened.
    """
    objects.make_functional(cls)
    return _blank(cls)


def _fill(part: Any, state: dict[str, Any]) -> None:
    # Not by __setattr__, which would track objects twice.
    vars(part).update(state)


def _fill_collection(part: Any, state: tuple[dict[str, Any], Any]) -> None:
    attributes, members = state
    vars(part).update(attributes)
    if isinstance(part, list):
        list.extend(part, members)
    elif isinstance(part, dict):
        dict.update(part, members)
    else:
        set.update(part, members)


def _variable(cls: type, state: dict[str, Any], value: Any) -> Any:
    variable: Any = object.__new__(cls)
    vars(variable).update(state)
    models.set_native(variable, objects.new_native(state, value))
    return variable
