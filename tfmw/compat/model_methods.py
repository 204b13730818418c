"""Keras's methods as a model's class, other libraries and tfmw override them.

    guard_models(refuse_fit, is_chief=False, after_export=wait)
    replace_methods(plain)                                 # model.fit(...) calls plain(...)
    with saves_by_callbacks(on_all_workers=False): ...     # model.save(...) writes nothing here
    call_method(model, "fit", arguments, given, run=train, others=of_tfmw)

A model's class may have methods of its own, which prepare the data and call `super().fit(...)`.
Autologging of MLflow, Comet and others replaces `keras.Model.fit` by a function that begins a run,
adds callbacks, and calls the original method. Both expect Keras's method at the end. So the import
of this module makes Keras's methods of `METHODS` dispatch: within `call_method`, in this thread,
they call tfmw, and otherwise Keras.

In a process that has joined a cluster, plain calls such as `model.fit(...)` go to `plain`, or
`fit` is refused, and files are saved atomically. Keras's own methods ignore the other workers.
`fit` would train this process's copy only, on all of the data; `save` would write the same file as
every other worker, which might read it half-written. All workers have the same model, so each
renames a complete file to that path. Every worker can load it afterwards, with a shared disk or
not. The chief alone writes the directory of `model.export`, for which the others wait.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import os
import sys
import threading
import types
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple, ParamSpec, TypeVar

import keras
import tensorflow as tf

from tfmw.compat.objects import Trainer, contains, overridden
from tfmw.storage.disk import replacing

P = ParamSpec("P")
R = TypeVar("R")

# `predict_on_batch` is not here: each task needs all predictions of a batch, so Keras's method
# stays.
METHODS = ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch")

_EXPORT = "export"  # writes a directory, which not every worker can replace

_CELL = "fn"  # the variable in which Keras's wrapper for tracebacks keeps the method

_now = types.SimpleNamespace(
    plain=None,  # takes the place of Keras's methods in the main thread: see `replace_methods`
    refuse_fit=None,  # raises the error for Keras's fit
    saves_on_all_workers=None,  # None: no callback is running
)


def guard_models(
    refuse_fit: Callable[[], None], is_chief: bool, after_export: Callable[[], None]
) -> None:
    """Guards the methods of every Keras model of this process.

    Args:
        refuse_fit: raises the error for `model.fit`.
        is_chief: whether this process is the one that saves.
        after_export: called after an export of a plain script, which the chief alone has written.
    """
    _now.refuse_fit = refuse_fit
    functions = [(module, "save_model") for module in (keras.saving, keras.models)]
    methods = [(keras.Model, name) for name in ("save", "save_weights", _EXPORT)]
    for owner, name in methods + functions:
        setattr(owner, name, _whole(getattr(owner, name), is_chief, after_export))


Plain = Callable[..., Any]
"""`(own, name, model, args, kwargs) -> result` of a call of Keras's method `name`: `own`."""


def replace_methods(plain: Plain | None) -> None:
    """Replaces Keras's methods of all models, in the main thread; None: they are Keras's again."""
    _now.plain = plain


@contextlib.contextmanager
def replaced_methods(plain: Plain) -> Iterator[None]:
    """The context in which Keras's methods are replaced in this thread."""
    with overridden([(_thread, "plain", plain)]):
        yield


@contextlib.contextmanager
def from_plain(model: Any, name: str) -> Iterator[None]:
    """The context in which tfmw's method takes the place of Keras's.

    A method of the model's class, and wrappers, have called it: `call_method` calls neither again.
    """
    with overridden([(_thread, "from_plain", (model, name))]):
        yield


def is_within_call() -> bool:
    """Whether this thread is in a call of tfmw's, such as in a callback of the user's."""
    return _thread.is_within


def is_of_wrapper(name: str) -> bool:
    """Whether what has replaced another method of `keras.Model` calls the method `name`."""
    wrappers = [vars(keras.Model)[n] for n in METHODS if n != name and is_wrapped(n)]
    codes = [getattr(wrapper, "__code__", None) for wrapper in wrappers]
    return any(frame.f_code in codes for frame in _frames() if codes)


def is_of_callback(holds: Callable[[Any], bool]) -> bool:
    """Whether a method of a callback with this property is running in this thread."""
    owners = (frame.f_locals.get("self") for frame in _frames())
    return any(isinstance(o, keras.callbacks.Callback) and holds(o) for o in owners)


def _frames() -> Iterator[types.FrameType]:
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


@contextlib.contextmanager
def saves_by_callbacks(on_all_workers: bool) -> Iterator[None]:
    """The context in which a guarded worker runs a callback that runs on all workers.

    Args:
        on_all_workers: whether every worker saves its model; else only the chief does.
    """
    with overridden([(_now, "saves_on_all_workers", on_all_workers)]):
        yield


def _whole(
    save: Callable[..., Any], is_chief: bool, after_export: Callable[[], None]
) -> Callable[..., Any]:
    """Wraps `save` to rename a complete file; in callbacks on all workers, the chief's only."""
    writes_directory = save.__name__ == _EXPORT

    @functools.wraps(save)
    def guarded(self: Any, filepath: Any, *args: Any, **kwargs: Any) -> Any:
        chosen = _now.saves_on_all_workers
        if writes_directory and chosen is None and _now.plain:  # no other way writes it once
            if is_chief:
                save(self, filepath, *args, **kwargs)
            return after_export()
        if chosen is False and not is_chief:
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
        with replacing(target) as temporary:
            return save(self, temporary, *args, **kwargs)

    return guarded


def given_arguments(method: Callable[P, R]) -> Callable[P, R]:
    """Decorates a function so that `given` returns the names of its caller's arguments."""
    names = list(inspect.signature(method).parameters)

    @functools.wraps(method)
    def noting(*args: P.args, **kwargs: P.kwargs) -> R:
        _thread.given = frozenset(names[: len(args)]) | set(kwargs)
        return method(*args, **kwargs)

    return noting


def given() -> frozenset[str]:
    """Names of the arguments that the caller of the decorated function has passed."""
    return _thread.given


def call_given(method: Callable[..., R], arguments: Mapping[str, Any], given: Collection[str]) -> R:
    """Calls a decorated function like a caller who passes only the arguments named in `given`."""
    _thread.given = frozenset(given)
    return inspect.unwrap(method)(**arguments)


def is_overridden(model: Any, name: str) -> bool:
    """Whether a model, or its class, overrides a method of Keras."""
    return any(name in vars(owner) for owner in _owners(model))


def is_wrapped(name: str) -> bool:
    """Whether a library has replaced a method of `keras.Model`."""
    return name in vars(keras.Model)


def _owners(model: Any) -> list[Any]:
    of_keras = (keras.Model, Trainer)
    classes = itertools.takewhile(lambda cls: cls not in of_keras, type(model).__mro__)
    return [model, *classes]


def call_method(
    model: Any,
    name: str,
    arguments: Mapping[str, Any],
    given: Collection[str],
    run: Callable[..., Any],
    others: Callable[..., Any] | None,
    is_chief: bool = True,
    overrides: bool = True,
) -> Any:
    """Calls `model.<name>` with `run` in place of Keras's method; returns its result.

    An override of the user runs on every task; the wrappers of other libraries run on the chief.

    Args:
        arguments: the arguments of Keras's method by name, and perhaps others.
        given: names of the arguments that the caller has passed. The user's override need not take
            others, and may have other defaults.
        run: called with all arguments that reach Keras's method, by name.
        others: called as (name, model, ...) if the user's code calls a Keras method of another name
            or model; None: Keras's method is called.
        is_chief: whether this process is the one in which wrappers run.
        overrides: whether the model's override is called, or only the wrappers.
    """
    parameters = _parameters(name)
    has_wrapper = is_chief and is_wrapped(name) and not _is_from_plain(model, name)
    overrides &= is_overridden(model, name) and not is_within(model, name)
    if not (has_wrapper or overrides):
        with overridden([(_thread, "is_within", True)]):
            return run(**{k: v for k, v in arguments.items() if k in parameters})
    passed = {
        k: arguments[k]
        for k, parameter in parameters.items()
        if k in given or not _is(arguments.get(k, parameter.default), parameter.default)
    }
    if passed.get("callbacks") is not None:  # wrappers add theirs to a list
        passed["callbacks"] = tf.nest.flatten(passed["callbacks"])
    data = []  # the user's override may have other names for them
    for k in itertools.takewhile(passed.__contains__, ("x", "y")):
        data.append(passed.pop(k))
    with calling(model, name, run, others, is_chief):
        method = getattr(model, name) if overrides else getattr(keras.Model, name).__get__(model)
        return method(*data, **passed)


@contextlib.contextmanager
def calling(
    model: Any,
    name: str,
    run: Callable[..., Any],
    others: Callable[..., Any] | None,
    is_chief: bool = True,
) -> Iterator[None]:
    """The context in which `call_method` calls the method, with the same arguments."""
    call = _Call(model, name, run, others)
    here = [(_thread, "call", call), (_thread, "is_within", True)]
    with overridden(here), _wrappers_alone(name, is_chief):
        yield


class _Call(NamedTuple):
    """A call of tfmw while code of the user or of a wrapper runs in this thread."""

    model: Any
    name: str
    run: Callable[..., Any]
    others: Callable[..., Any] | None  # None: Keras's own


class _Thread(threading.local):
    call: _Call | None = None
    given: frozenset[str] = frozenset()
    plain: Plain | None = None
    from_plain: tuple[Any, str] | None = None  # (model, method)
    is_within: bool = False


_thread = _Thread()


@functools.cache
def _parameters(name: str) -> dict[str, inspect.Parameter]:
    """Parameters of Keras's method, without the model."""
    found = dict(inspect.signature(getattr(Trainer, name)).parameters)
    del found["self"]
    return found


def _is(value: Any, default: Any) -> bool:
    """Whether an argument has its default; false for arrays."""
    simple = isinstance(value, bool | int | float | str)
    return value is default or (simple and type(value) is type(default) and value == default)


def _is_from_plain(model: Any, name: str) -> bool:
    caller = _thread.from_plain
    return caller is not None and caller[0] is model and caller[1] == name


def is_within(model: Any, name: str) -> bool:
    """Whether the model's override has called tfmw, which then must not call it again."""
    if _is_from_plain(model, name):
        return True
    methods = [vars(owner)[name] for owner in _owners(model) if name in vars(owner)]
    codes = [getattr(inspect.unwrap(method), "__code__", None) for method in methods]
    for frame in _frames() if methods else ():
        if frame.f_code in codes:
            first = next(iter(frame.f_locals.values()), None)  # `self`, or all of `*args`
            if first is model or (isinstance(first, tuple) and contains(model, first)):
                return True
    return False


@contextlib.contextmanager
def _wrappers_alone(name: str, is_chief: bool) -> Iterator[None]:
    """Runs wrappers of a `keras.Model` method on the chief only, in this context.

    So a wrapper must not call anything that waits for other tasks, except the method itself.
    """
    wrapper = vars(keras.Model).get(name)
    if wrapper is None:
        yield
        return

    def alone(self: Any, *args: Any, **kwargs: Any) -> Any:
        call = _thread.call and _thread.call._replace(others=None)
        with overridden([(_thread, "call", call)]):
            return wrapper(self, *args, **kwargs)

    setattr(keras.Model, name, alone) if is_chief else delattr(keras.Model, name)
    try:
        yield
    finally:
        setattr(keras.Model, name, wrapper)


def _dispatching(name: str, own: Callable[..., Any]) -> Callable[..., Any]:
    """Makes Keras's method call its replacement, if this thread is in a call of tfmw."""
    signature = inspect.signature(own)

    @functools.wraps(own)
    def dispatched(self: Any, *args: Any, **kwargs: Any) -> Any:
        call = _thread.call
        is_called = call is not None and self is call.model and name == call.name
        if call is None or not (is_called or call.others):
            plain = _thread.plain
            if plain is None and threading.current_thread() is threading.main_thread():
                plain = _now.plain
            if plain is not None and call is None:
                return plain(own, name, self, args, kwargs)
            if name == "fit" and plain is None and _now.refuse_fit is not None:
                _now.refuse_fit()
            return own(self, *args, **kwargs)
        with overridden([(_thread, "call", None)]):  # code within may call Keras's methods
            if not is_called and call.others is not None:
                return call.others(name, self, *args, **kwargs)
            bound = signature.bind(self, *args, **kwargs)
            bound.apply_defaults()
            arguments = dict(bound.arguments)
            del arguments["self"]
            return call.run(**arguments.pop("kwargs", {}), **arguments)

    return dispatched


def _install() -> None:
    """Makes Keras's methods dispatch.

    Libraries may have wrapped the methods before. So Keras's function remains, and the method in
    its wrapper for tracebacks is replaced. No library wraps methods without that wrapper.
    """
    for name in METHODS:
        method: Any = getattr(Trainer, name)
        cells = dict(zip(method.__code__.co_freevars, method.__closure__ or (), strict=True))
        if _CELL in cells:
            cell = cells[_CELL]
            cell.cell_contents = _dispatching(name, cell.cell_contents)
        else:
            setattr(Trainer, name, _dispatching(name, method))


_install()
