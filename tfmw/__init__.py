"""tfmw: multi-worker training for Keras 3 on tf.distribute.

    import tfmw

    tfmw.init()
    history = tfmw.fit(model, dataset, epochs=5)

Importing tfmw costs milliseconds: TensorFlow is loaded when a name that needs it is first used.
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tfmw import callbacks, data, engines, layers, strategies
    from tfmw.cluster import Cluster
    from tfmw.engines.submit import attach, jobs, launch, submit
    from tfmw.errors import ClusterError, TaskFailed, TfmwError, UsageError
    from tfmw.export import export
    from tfmw.fit import evaluate, fit, predict
    from tfmw.on_batch import predict_on_batch, test_on_batch, train_on_batch
    from tfmw.runtime.progress import report_progress
    from tfmw.strategies import init

__version__ = "0.1.0"

# name -> (module, attribute; None for the module itself)
_NAMES: dict[str, tuple[str, str | None]] = {
    "Cluster": ("tfmw.cluster", "Cluster"),
    "ClusterError": ("tfmw.errors", "ClusterError"),
    "TaskFailed": ("tfmw.errors", "TaskFailed"),
    "TfmwError": ("tfmw.errors", "TfmwError"),
    "UsageError": ("tfmw.errors", "UsageError"),
    "attach": ("tfmw.engines.submit", "attach"),
    "callbacks": ("tfmw.callbacks", None),
    "data": ("tfmw.data", None),
    "engines": ("tfmw.engines", None),
    "evaluate": ("tfmw.fit", "evaluate"),
    "export": ("tfmw.export", "export"),
    "fit": ("tfmw.fit", "fit"),
    "init": ("tfmw.strategies", "init"),
    "jobs": ("tfmw.engines.submit", "jobs"),
    "layers": ("tfmw.layers", None),
    "launch": ("tfmw.engines.submit", "launch"),
    "predict": ("tfmw.fit", "predict"),
    "predict_on_batch": ("tfmw.on_batch", "predict_on_batch"),
    "report_progress": ("tfmw.runtime.progress", "report_progress"),
    "strategies": ("tfmw.strategies", None),
    "submit": ("tfmw.engines.submit", "submit"),
    "test_on_batch": ("tfmw.on_batch", "test_on_batch"),
    "train_on_batch": ("tfmw.on_batch", "train_on_batch"),
}

__all__ = [
    "Cluster",
    "ClusterError",
    "TaskFailed",
    "TfmwError",
    "UsageError",
    "attach",
    "callbacks",
    "data",
    "engines",
    "evaluate",
    "export",
    "fit",
    "init",
    "jobs",
    "launch",
    "layers",
    "predict",
    "predict_on_batch",
    "report_progress",
    "strategies",
    "submit",
    "test_on_batch",
    "train_on_batch",
]


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module 'tfmw' has no attribute {name!r}")
    module, attribute = _NAMES[name]
    value = importlib.import_module(module)
    if attribute is not None:
        value = getattr(value, attribute)
    globals()[name] = value
    return value


class _Package(types.ModuleType):
    """Keeps `tfmw.fit` and `tfmw.export` the functions.

    After `from tfmw.fit import fit`, anywhere in the process, the import system assigns the module
    `tfmw.fit` to the package's attribute of that name. `tfmw.fit(...)` would then call a module.
    Python has no hook for that assignment except the type of the package's module object.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, types.ModuleType) and _NAMES.get(name, ("", None))[1] == name:
            value = getattr(value, name)
        super().__setattr__(name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        # cloudpickle pickles plain modules only by name; functions of a notebook refer to tfmw.
        return importlib.import_module, (self.__name__,)


sys.modules[__name__].__class__ = _Package


def __dir__() -> list[str]:
    return sorted([*globals(), *_NAMES])
