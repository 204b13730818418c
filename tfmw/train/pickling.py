"""Pickles of Keras models for child processes of this one.

    packed = pack((model, settings), large)          # bytes; large arrays go into the list
    model, settings = call.loads(packed, large)      # in a child process
    rebuilt(model)

Keras's own archive needs a `get_config` and registered classes, which models of a notebook often
lack. Here layers, losses, metrics and optimizers are pickled attribute by attribute, and variables
as arrays. Classes and functions that no module contains are pickled too (cloudpickle). The bytes
are passed in memory to children of this process: they are never read from a disk or a network.
"""

from __future__ import annotations

import io
import pickle
import threading
import weakref
from typing import Any

import keras
import tensorflow as tf

from tfmw.compat import objects, optimizers
from tfmw.errors import UsageError, first_line
from tfmw.launcher import call

# Errors of objects that cannot be pickled; OpError: for example a layer's lookup table.
_REFUSALS = (TypeError, ValueError, AttributeError, NotImplementedError, tf.errors.OpError)


def pack(value: Any, large: list[pickle.PickleBuffer] | None = None) -> bytes:
    """Pickles a structure of models, data and settings.

    Args:
        value: the structure.
        large: list for the arrays that are too large to be copied into the pickle; None: all are
            copied.

    Raises:
        UsageError: an object in it cannot be pickled, or cloudpickle is not installed.
    """
    cloudpickle = call.pickler()
    if cloudpickle is pickle:
        raise UsageError(
            "sending a model to other processes needs cloudpickle, which is not installed: "
            "pip install cloudpickle."
        )

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


def rebuilt(model: keras.Model) -> keras.Model:
    """An unpacked model, whose optimizers' maps of variables are rebuilt."""
    for optimizer in optimizers.optimizers_of(model):
        optimizers.rebuild_variable_maps(optimizer)
    return model


def _reduced(part: Any) -> Any:
    """The `__reduce__` value of an object that pickle does not support; None for others."""
    if isinstance(part, weakref.ReferenceType):
        return weakref.ref, (part(),)
    if isinstance(part, _LOCKS):
        return threading.RLock, ()
    return objects.reduced(part)


_LOCKS = (type(threading.Lock()), type(threading.RLock()))
