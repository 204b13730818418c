"""Which callbacks log to a tracker: by their package, by what they hold, by what their code names.

class Report(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        wandb.log(logs)                      # logs_to_tracker(Report()) is True
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

PACKAGES = frozenset(
    {
        "aim",
        "azureml",
        "clearml",
        "comet_ml",
        "dagshub",
        "determined",
        "dvclive",
        "labml",
        "mlflow",
        "neptune",
        "neptune_scale",
        "neptune_tensorflow_keras",
        "optuna",
        "polyaxon",
        "sacred",
        "swanlab",
        "tensorboardX",
        "traceml",
        "trackio",
        "visdom",
        "wandb",
    }
)
"""Top-level packages of trackers, and of Optuna, whose trials are told; integrations included."""

CLIENT_METHODS = frozenset(
    {"add_scalar", "log_artifact", "log_metric", "log_metrics", "log_scalar", "report_scalar"}
)
"""An object with one of these methods is the client of a tracker, whatever its package is."""

_WRITERS_OF_EVENTS = "SummaryWriter"  # of TensorFlow, tensorboardX and PyTorch

_BASES = frozenset({"keras", "builtins"})  # packages of what every callback inherits from


def logs_to_tracker(callback: Any) -> bool:
    """Whether a callback writes to a tracker, so that only one task may run it.

    True if its class, or one that it inherits from, is of one of `PACKAGES`; if it holds, by itself
    or in a list or dict, an object of one (a run, an experiment), a client or a writer of
    TensorBoard's events; or if one of its methods names such a package or object.
    """
    kinds = [kind for kind in type(callback).__mro__ if _package(kind) not in _BASES]
    if any(_is_of_tracker(kind) for kind in kinds):
        return True
    held = [*_flat(vars(callback).values())] if hasattr(callback, "__dict__") else []
    if any(_is_of_tracker(value) for value in held):
        return True
    functions = [member for kind in kinds for member in vars(kind).values()]
    return any(_names_tracker(function) for function in [*functions, *held])


def _package(thing: Any) -> str:
    name = getattr(thing, "__module__", None)
    return name.partition(".")[0] if isinstance(name, str) else ""


def _flat(values: Iterable[Any]) -> Iterator[Any]:
    """The values, and those within lists, tuples and dicts."""
    for value in values:
        yield value
        if isinstance(value, dict):
            yield from value.values()
        elif isinstance(value, (list, tuple)):
            yield from value


def _is_of_tracker(value: Any) -> bool:
    if isinstance(value, ModuleType):
        return value.__name__.partition(".")[0] in PACKAGES
    if isinstance(value, MethodType):  # run.log
        value = value.__self__
    kind = value if isinstance(value, type) else type(value)
    if _package(kind) in PACKAGES:
        return True
    return not isinstance(value, type) and _is_client(kind)


def _is_client(kind: type) -> bool:
    """Whether objects of a class send metrics, or write events of TensorBoard."""
    if any(base.__name__ == _WRITERS_OF_EVENTS for base in kind.__mro__):
        return True
    return any(callable(getattr(kind, name, None)) for name in CLIENT_METHODS)


def _names_tracker(member: Any) -> bool:
    """Whether a function's code imports a tracker, or names a global or a cell that is of one."""
    if isinstance(member, (staticmethod, classmethod, MethodType)):
        member = member.__func__
    if not isinstance(member, FunctionType):
        return False
    cells = [_content(cell) for cell in member.__closure__ or ()]
    if any(_is_of_tracker(value) for value in cells):
        return True
    return any(_names_in(code, member.__globals__) for code in _codes(member.__code__))


def _names_in(code: CodeType, known: Mapping[str, Any]) -> bool:
    """The names that a code uses: globals, attributes and imported modules."""
    for name in code.co_names:
        if name.partition(".")[0] in PACKAGES and (name not in known or name in sys.modules):
            return True  # import wandb, inside of the function
        value = known.get(name)
        if value is not None and (_is_of_tracker(value) or _package(value) in PACKAGES):
            return True
    return False


def _codes(code: CodeType) -> Iterator[CodeType]:
    """A function's code and those of the functions within it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None
