"""Keras models as bytes, for child processes of this one.

    parcel = pack((model, settings))                 # bytes
    model, settings = unpack(parcel)                 # in a child process

Keras's own archive needs a `get_config` and registered classes; a notebook's models have neither.
Here layers, losses, metrics and optimizers are pickled attribute by attribute, with their classes
and functions where no module has them (cloudpickle), and variables as arrays. The bytes go through
memory to children of this process: nothing is ever read from a disk or a network.
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

from tfmw import keras_compat
from tfmw.errors import UsageError

# Errors of objects that cannot be pickled; OpError: a layer's lookup table, say.
_REFUSALS = (TypeError, ValueError, AttributeError, NotImplementedError, tf.errors.OpError)


def pack(parcel: Any) -> bytes:
    """The parcel as bytes.

    Raises:
        UsageError: something in it cannot be sent, or cloudpickle is not installed.
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
        Pickler(buffer).dump(parcel)
    except (*_REFUSALS, pickle.PicklingError) as e:
        reason = (str(e) or type(e).__name__).splitlines()[0]
        raise UsageError(
            f"something in the arguments cannot be sent to other processes ({reason}): pass "
            "callables that make the model and the dataset in each process."
        ) from e
    return buffer.getvalue()


def unpack(parcel: bytes) -> Any:
    """What `pack` packed, in a child of the process that did."""
    return pickle.loads(parcel)


def settled(model: keras.Model) -> keras.Model:
    """A model that has arrived, with its optimizers knowing their variables again."""
    for optimizer in keras_compat.optimizers_of(model):
        keras_compat.index_variables_anew(optimizer)
    return model


def _reduced(part: Any) -> Any:
    """How to rebuild a part that pickle cannot handle by itself; None for others."""
    if isinstance(part, keras.Variable):
        return _variable, (type(part), *keras_compat.variable_state(part))
    if keras_compat.is_saveable(part):
        make = _blank_functional if keras_compat.is_functional(part) else _blank
        return make, (type(part),), keras_compat.saveable_state(part), None, None, _fill
    if keras_compat.is_tracked_collection(part):
        base = next(b for b in (list, dict, set) if isinstance(part, b))
        return _blank, (type(part),), (vars(part), base(part)), None, None, _fill_collection
    if (backend := keras_compat.backend_switch(part)) is not None:
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
    """Of a class that calls `super().__init__(inputs, outputs)`.

    Keras makes such a class a functional one when the first model of it is created, which has not
    happened in the process that imports the class now.
    """
    keras_compat.make_functional(cls)
    return _blank(cls)


def _fill(part: Any, state: dict[str, Any]) -> None:
    # Past __setattr__, which would track what is tracked already.
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
    keras_compat.set_native(variable, keras_compat.new_native(state, value))
    return variable
