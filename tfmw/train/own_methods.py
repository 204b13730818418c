"""Methods of a model's class, and wrappers of other libraries, around tfmw's methods.

    mlflow.keras.autolog()
    tfmw.fit(model, data)        # one run of MLflow, begun and ended on the chief

    class Scaled(keras.Model):
        def fit(self, x, *args, **kwargs):
            return super().fit(x / 255.0, *args, **kwargs)       # on all workers

    tfmw.fit(Scaled(...), data)

Each task runs the model's own method with the same arguments. The method of Keras that it calls at
the end is tfmw's, which divides the data. Keras's other methods are tfmw's there, too. Wrappers of
other libraries run on the chief. Both get the arguments that Keras's method has.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Collection, Mapping
from typing import Any

import keras
import tensorflow as tf

from tfmw.cluster import turns
from tfmw.cluster.group import Group
from tfmw.compat import model_methods
from tfmw.train import strategies


def call_own(
    name: str,
    model: keras.Model,
    strategy: Any,
    arguments: Mapping[str, Any],
    given: Collection[str],
    run: Callable[..., Any],
) -> Any:
    """Result of `model.<name>`, or of `run` for a model without a method of its own.

    Args:
        strategy: strategy of the call. It is chosen, and so the cluster joined, before the user's
            code runs TensorFlow.
        arguments: arguments of the call, by name.
        given: names of the arguments that the caller has passed.
        run: replacement of Keras's method, called with its arguments by name.
    """
    of_user = model_methods.is_overridden(model, name) or model_methods.is_wrapped(name)
    if of_user:
        strategy = strategies.choose(strategy)
    others = functools.partial(_of_tfmw, strategy)
    chief = not of_user or is_chief(strategy)
    with turns.call():
        return model_methods.call_method(model, name, arguments, given, run, others, chief)


def calling_evaluate(model: keras.Model, strategy: tf.distribute.Strategy, run: Any) -> Any:
    """A context in which `model.evaluate` is the user's, with `run` in place of Keras's method."""
    others = functools.partial(_of_tfmw, strategy)
    return model_methods.calling(model, "evaluate", run, others, is_chief(strategy))


def _of_tfmw(strategy: Any, name: str, model: Any, *args: Any, **kwargs: Any) -> Any:
    """The method of tfmw, in place of one of Keras's that a method of the user's calls."""
    method = getattr(importlib.import_module("tfmw"), name)
    return method(model, *args, strategy=strategy, **kwargs)


def is_chief(strategy: tf.distribute.Strategy) -> bool:
    """Whether this task is the first of those that make the same call."""
    if strategies.servers_of(strategy) is not None:
        return True  # the coordinator
    return Group.of(strategy).is_chief
