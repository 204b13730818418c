"""`fit` and `save` of Keras's models, where tfmw or other libraries have replaced them.

    guard_models(refuse_fit, is_chief=False)
    with saves_by_callbacks(on_all_workers=False): ...     # model.save(...) writes nothing here
    history = run_wrapped(model, {"x": x, "epochs": 3, ...}, train)

In a process that has joined a cluster, `model.fit` is refused and files are saved whole. Keras's
own methods ignore the other workers: `fit` trains this process's copy only, on all of the data, and
`save` writes the same file as every other worker, which reads it half-written. All have the same
model, so each renames a whole file to that path: every worker can load it afterwards, whether they
share the disk or not.

Autologging of MLflow, Comet and others replaces `keras.Model.fit` by a function that begins a run,
adds callbacks, and calls the method that it has replaced. `run_wrapped` makes that method train
differently.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import secrets
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import keras

from tfmw.compat.objects import Trainer, overridden

_CELL = "fn"  # the variable in which Keras's wrapper for tracebacks keeps the method

_now = types.SimpleNamespace(
    guard=None,  # in the place of Keras's fit
    refuses=True,
    saves_on_all_workers=None,  # None: no callback is running
)


def guard_models(refuse_fit: Callable[[], None], is_chief: bool) -> None:
    """Guards the methods of every Keras model of this process.

    Args:
        refuse_fit: raises the error for `model.fit`.
        is_chief: whether this process is the one that saves.
    """
    cls: Any = keras.Model
    cls.fit = _now.guard = _refusing(cls.fit, refuse_fit)
    cls.save = _whole(cls.save, is_chief)
    cls.save_weights = _whole(cls.save_weights, is_chief)


@contextlib.contextmanager
def saves_by_callbacks(on_all_workers: bool) -> Iterator[None]:
    """The context in which a guarded worker runs a callback that runs on all workers.

    Args:
        on_all_workers: whether every worker saves its model; else only the chief does.
    """
    with overridden([(_now, "saves_on_all_workers", on_all_workers)]):
        yield


def _refusing(fit: Callable[..., Any], refuse: Callable[[], None]) -> Callable[..., Any]:
    @functools.wraps(fit)
    def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _now.refuses:
            refuse()
        return fit(self, *args, **kwargs)

    return guarded


def _whole(save: Callable[..., Any], is_chief: bool) -> Callable[..., Any]:
    """`save` that renames a whole file; in a callback, which runs on all workers, by the chief."""

    @functools.wraps(save)
    def guarded(self: Any, filepath: Any, *args: Any, **kwargs: Any) -> Any:
        if _now.saves_on_all_workers is False and not is_chief:
            warnings.warn(
                f"tfmw: model.{save.__name__}({str(filepath)!r}) on a worker that is not the "
                "chief: nothing is written here, the chief writes it. A callback with "
                "chief_only = False writes on every worker.",
                stacklevel=2,
            )
            return None
        path = str(filepath)
        # Keras refuses other endings, and asks before it overwrites; other options write more than
        # one file. A file system of URLs shows a file when it is whole.
        plain = not args and not set(kwargs) - {"overwrite"} and kwargs.get("overwrite", True)
        if not plain or "://" in path or not path.endswith((".keras", ".h5")):
            return save(self, filepath, *args, **kwargs)
        target = os.path.realpath(path)  # a symbolic link remains, as when Keras writes to it
        name = f".{secrets.token_hex(6)}.{os.path.basename(path)}"
        temporary = os.path.join(os.path.dirname(target), name)
        try:
            result = save(self, temporary, *args, **kwargs)
            os.replace(temporary, target)
        finally:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        return result

    return guarded


def is_wrapped() -> bool:
    """Whether a library has replaced `keras.Model.fit`."""
    return all(keras.Model.fit is not own for own in (_now.guard, Trainer.fit))


def fit_parameters() -> dict[str, inspect.Parameter]:
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
    fit: Any = Trainer.fit
    cell = dict(zip(fit.__code__.co_freevars, fit.__closure__, strict=True))[_CELL]
    own = cell.cell_contents

    def instead(model: keras.Model, **arguments: Any) -> Any:
        cell.cell_contents = own  # what trains within may call Keras's method
        with overridden([(_now, "refuses", True)]):
            return train(**arguments)

    cell.cell_contents = instead
    try:
        with overridden([(_now, "refuses", False)]):
            return keras.Model.fit(model, **arguments)
    finally:
        cell.cell_contents = own


PRIVATE_NAMES: list[tuple[Any, str]] = [
    (Trainer, "fit"),
    (Trainer.fit, "__closure__"),
]
