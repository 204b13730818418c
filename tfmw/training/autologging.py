"""Autologging: what other libraries have wrapped around Keras's `fit` runs around tfmw's.

    mlflow.keras.autolog()
    tfmw.fit(model, data)        # one run of MLflow, begun and ended on the chief

The wrappers see the arguments that Keras has, too, and a model that is an ordinary one before and
after the training. The callbacks that they add run on the chief.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfmw import trackers
from tfmw.checkpoint.resume import Backups
from tfmw.keras_compat import wrapped_fit
from tfmw.training.arguments import FitArguments
from tfmw.training.session import Session


def autologged(
    session: Session,
    backups: Backups,
    arguments: FitArguments,
    train: Callable[[FitArguments], Any],
) -> Any:
    """Calls `train`, on the chief within the wrappers; returns its result.

    Args:
        session: of the call.
        backups: of the run; runs of trackers go on with those of its record.
        arguments: of the call.
        train: trains with the arguments that the wrappers pass on.
    """
    if not session.group.is_chief:
        return train(arguments)
    if backups.record is not None:
        trackers.resume(backups.record.get("trackers", {}))
    if not wrapped_fit.is_wrapped():
        return train(arguments)
    result: Any = None

    def instead(**changed: Any) -> keras.callbacks.History:
        nonlocal result
        result = train(dataclasses.replace(arguments, **changed))
        return session.model.history

    own = inspect.signature(keras.Model.fit).parameters.keys() - {"self"}
    given = {name: value for name, value in vars(arguments).items() if name in own}
    if given["callbacks"] is not None:
        given["callbacks"] = tf.nest.flatten(given["callbacks"])
    wrapped_fit.run_wrapped(session.model, given, instead)
    return result
