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

# Other names of `__all__` are modules.
_SOURCES = {
    "tfmw.cluster": ("Cluster",),
    "tfmw.engines.submit": ("attach", "jobs", "launch", "submit"),
    "tfmw.errors": ("ClusterError", "TaskFailed", "TfmwError", "UsageError"),
    "tfmw.export": ("export",),
    "tfmw.fit": ("evaluate", "fit", "predict"),
    "tfmw.on_batch": ("predict_on_batch", "test_on_batch", "train_on_batch"),
    "tfmw.runtime.progress": ("report_progress",),
    "tfmw.strategies": ("init",),
}
_SOURCE_OF = {name: module for module, names in _SOURCES.items() for name in names}

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
    if name not in __all__:
        raise AttributeError(f"module 'tfmw' has no attribute {name!r}")
    if name in _SOURCE_OF:
        value = getattr(importlib.import_module(_SOURCE_OF[name]), name)
    else:
        value = importlib.import_module(f"tfmw.{name}")
    globals()[name] = value
    return value


class _Package(types.ModuleType):
    """Keeps `tfmw.fit` and `tfmw.export` the functions.

    After `from tfmw.fit import fit`, anywhere in the process, the import system assigns the module
    `tfmw.fit` to the package's attribute of that name. `tfmw.fit(...)` would then call a module.
    Python has no hook for that assignment except the type of the package's module object.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, types.ModuleType) and name in _SOURCE_OF:
            value = getattr(value, name)
        super().__setattr__(name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        # cloudpickle pickles plain modules only by name; functions of a notebook refer to tfmw.
        return importlib.import_module, (self.__name__,)


sys.modules[__name__].__class__ = _Package


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
