"""Guards in a process that has joined a cluster: `model.fit` is refused, files are saved whole.

    undo = guard_models(refuse_fit, is_chief=False)
    with saves_by_callbacks(on_all_workers=False): ...     # model.save(...) writes nothing here

Keras's own methods ignore the other workers: `fit` trains this process's copy only, on all of the
data, and `save` writes the same file as every other worker, which reads it half-written. All have
the same model, so each renames a whole file to that path: every worker can load it afterwards,
whether they share the disk or not.
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import keras

_on_all_workers: bool | None = None  # None: no callback is running
_guard: Callable[..., Any] | None = None  # in the place of Keras's fit
_refuses = True


def guard_models(refuse_fit: Callable[[], None], is_chief: bool) -> Callable[[], None]:
    """Guards the methods of every Keras model of this process.

    Args:
        refuse_fit: raises the error for `model.fit`.
        is_chief: whether this process is the one that saves.

    Returns:
        A function that removes the guards.
    """
    methods: dict[str, Any] = {
        "fit": _refusing(keras.Model.fit, refuse_fit),
        "save": _whole(keras.Model.save, is_chief),
        "save_weights": _whole(keras.Model.save_weights, is_chief),
    }
    own = {name: vars(keras.Model).get(name) for name in methods}
    for name, method in methods.items():
        setattr(keras.Model, name, method)
    global _guard
    _guard = methods["fit"]

    def undo() -> None:
        for name, method in own.items():
            if method is None:  # the method was inherited
                delattr(keras.Model, name)
            else:
                setattr(keras.Model, name, method)

    return undo


def is_guard(fit: Any) -> bool:
    """Whether a function is the one that refuses `model.fit`."""
    return fit is _guard


@contextlib.contextmanager
def unguarded() -> Iterator[None]:
    """The context in which `model.fit` is not refused."""
    with _refusing_is(False):
        yield


@contextlib.contextmanager
def guarded_again() -> Iterator[None]:
    """Within `unguarded`: the context in which `model.fit` is refused."""
    with _refusing_is(True):
        yield


@contextlib.contextmanager
def _refusing_is(value: bool) -> Iterator[None]:
    global _refuses
    before, _refuses = _refuses, value
    try:
        yield
    finally:
        _refuses = before


@contextlib.contextmanager
def saves_by_callbacks(on_all_workers: bool) -> Iterator[None]:
    """The context in which a guarded worker runs a callback that runs on all workers.

    Args:
        on_all_workers: whether every worker saves its model; else only the chief does.
    """
    global _on_all_workers
    before, _on_all_workers = _on_all_workers, on_all_workers
    try:
        yield
    finally:
        _on_all_workers = before


def _refusing(fit: Callable[..., Any], refuse: Callable[[], None]) -> Callable[..., Any]:
    @functools.wraps(fit)
    def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _refuses:
            refuse()
        return fit(self, *args, **kwargs)

    return guarded


def _whole(save: Callable[..., Any], is_chief: bool) -> Callable[..., Any]:
    """`save` that renames a whole file; in a callback, which runs on all workers, by the chief."""

    @functools.wraps(save)
    def guarded(self: Any, filepath: Any, *args: Any, **kwargs: Any) -> Any:
        if _on_all_workers is False and not is_chief:
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
