"""Callbacks see an ordinary Keras model, although replicas have copies of its variables.

Users' callbacks read and assign weights, save the model, or train another one with it, and so does
Keras's own SwapEMAWeights. What works on a `tf.Variable` may not work on the copies of a strategy.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import keras

from tfmw.callbacks.roles import acts_in


class OnOrdinaryModel:
    """A list of callbacks whose hooks run while the model is an ordinary one.

    Args:
        callback_list: as Keras makes it.
        ordinary_model: makes the context for a hook. It copies the weights, so it is left out for
            hooks in which no callback acts. Its argument is whether moving averages are the same on
            all replicas: not before a step, where a run goes on within an epoch.

    Attributes:
        callbacks: of the list.
    """

    def __init__(
        self,
        callback_list: keras.callbacks.CallbackList,
        ordinary_model: Callable[[bool], contextlib.AbstractContextManager[None]],
    ):
        self.callbacks: list[Any] = callback_list.callbacks
        self._list = callback_list
        self._ordinary_model = ordinary_model

    def __getattr__(self, hook: str) -> Callable[..., None]:
        method: Callable[..., None] = getattr(self._list, hook)
        if not any(acts_in(callback, hook) for callback in self.callbacks):
            return method

        def run(*arguments: Any, **named: Any) -> None:
            with self._ordinary_model(hook != "on_train_batch_begin"):
                method(*arguments, **named)

        return run
