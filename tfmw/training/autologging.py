"""Autologging: what other libraries have wrapped around Keras's `fit` runs around tfmw's.

    mlflow.keras.autolog()
    tfmw.fit(model, data)        # one run of MLflow, begun and ended on the chief

The wrappers see the arguments that Keras has, too, and a model that is an ordinary one before and
after the training. The callbacks that they add run on the chief.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfmw.keras_compat import model_methods
from tfmw.training.arguments import FitArguments


def autologged(
    model: Any, arguments: FitArguments, train: Callable[[FitArguments], Any], is_chief: bool = True
) -> Any:
    """Calls `train`, on the chief within the wrappers; returns its result.

    Args:
        model: a compiled Keras model; without one (a function that makes it) there are no wrappers.
        arguments: of the call.
        train: trains with the arguments that the wrappers pass on.
        is_chief: whether this task is the one that logs.
    """
    if not is_chief or not isinstance(model, keras.Model) or not model_methods.is_wrapped():
        return train(arguments)
    result: Any = None

    def instead(**changed: Any) -> keras.callbacks.History:
        nonlocal result
        result = train(dataclasses.replace(arguments, **changed))
        return model.history

    given = {
        name: getattr(arguments, name)
        for name, parameter in model_methods.fit_parameters().items()
        if not _is(getattr(arguments, name), parameter.default)
    }
    if "callbacks" in given:
        given["callbacks"] = tf.nest.flatten(given["callbacks"])
    model_methods.run_wrapped(model, given, instead)
    return result


def _is(value: Any, default: Any) -> bool:
    """Whether an argument has its default; arrays do not."""
    simple = isinstance(value, bool | int | float | str)
    return value is default or (simple and type(value) is type(default) and value == default)
