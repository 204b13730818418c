"""Wrappers of other libraries around `keras.Model.fit`, applied to another training.

    history = run_wrapped(model, {"x": x, "epochs": 3, ...}, train)

Autologging of MLflow, Comet and others replaces `keras.Model.fit` by a function that begins a run,
adds callbacks, and calls the method that it has replaced. Here that method trains differently.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import keras

from tfmw.keras_compat import guards
from tfmw.keras_compat.objects import Trainer

_NAME = "fn"  # the variable in which Keras's wrapper for tracebacks keeps the method


def is_wrapped() -> bool:
    """Whether a library has replaced `keras.Model.fit`."""
    return not guards.is_guard(keras.Model.fit) and (keras.Model.fit is not Trainer.fit)


def parameters() -> dict[str, inspect.Parameter]:
    """The arguments of Keras's `fit`, by name; what has replaced it need not name them."""
    found = dict(inspect.signature(Trainer.fit).parameters)
    del found["self"]
    return found


def run_wrapped(model: keras.Model, arguments: dict[str, Any], train: Callable[..., Any]) -> Any:
    """Calls `keras.Model.fit` as it was replaced, with `train` in the place of Keras's method.

    Args:
        model: as for `keras.Model.fit`.
        arguments: of `fit`, by name.
        train: called with the arguments, by name, that the wrappers pass on.
    """
    with _replaced(train):
        return keras.Model.fit(model, **arguments)


@contextlib.contextmanager
def _replaced(train: Callable[..., Any]) -> Iterator[None]:
    def instead(model: keras.Model, **arguments: Any) -> Any:
        cell.cell_contents = own  # what trains within may call Keras's method
        with guards.guarded_again():
            return train(**arguments)

    cell = _cell()
    own = cell.cell_contents
    cell.cell_contents = instead
    try:
        with guards.unguarded():
            yield
    finally:
        cell.cell_contents = own


def _cell() -> Any:
    fit: Any = Trainer.fit
    return dict(zip(fit.__code__.co_freevars, fit.__closure__, strict=True))[_NAME]


PRIVATE_NAMES: list[tuple[Any, str]] = [
    (Trainer, "fit"),
    (Trainer.fit, "__closure__"),
]
"""(owner, name) of each private name that this module uses; see `keras_compat.missing_names`."""
