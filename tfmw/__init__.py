"""tfmw: multi-worker training for Keras 3 on tf.distribute.

    import tfmw

    tfmw.init()
    history = tfmw.fit(model, dataset, epochs=5)

Importing tfmw costs milliseconds: TensorFlow is loaded when a name that needs it is first used.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tfmw import callbacks, data, datasets, engines, layers, storage, strategies
    from tfmw.cluster import Cluster
    from tfmw.errors import ClusterError, Preempted, TaskFailed, TfmwError, UsageError
    from tfmw.launcher.engines.submit import attach, jobs, launch, submit
    from tfmw.observe.progress import report_progress
    from tfmw.train.batch_calls import predict_on_batch, test_on_batch, train_on_batch
    from tfmw.train.calls import evaluate, fit, predict
    from tfmw.train.local_sgd.sync_settings import DiLoCo, LocalSGD
    from tfmw.train.plain_calls import options
    from tfmw.train.saved_model import export, verify_export
    from tfmw.train.strategies import init
    from tfmw.train.workers import Workers

__version__ = "0.1.0"

# Other names of `__all__` are modules.
_SOURCES = {
    "tfmw.cluster": ("Cluster",),
    "tfmw.launcher.engines.submit": ("attach", "jobs", "launch", "submit"),
    "tfmw.errors": ("ClusterError", "Preempted", "TaskFailed", "TfmwError", "UsageError"),
    "tfmw.train.plain_calls": ("options", "plain_call"),
    "tfmw.train.saved_model": ("export", "verify_export"),
    "tfmw.train.calls": ("evaluate", "fit", "predict"),
    "tfmw.train.local_sgd.sync_settings": ("DiLoCo", "LocalSGD"),
    "tfmw.train.mirrored.collectives.transports": ("connected_strategy",),
    "tfmw.train.batch_calls": ("predict_on_batch", "test_on_batch", "train_on_batch"),
    "tfmw.train.workers": ("Workers",),
    "tfmw.observe.progress": ("report_progress",),
    "tfmw.strategies": ("init",),
}
_SOURCE_OF = {name: module for module, names in _SOURCES.items() for name in names}

__all__ = [
    "Cluster",
    "ClusterError",
    "DiLoCo",
    "LocalSGD",
    "Preempted",
    "TaskFailed",
    "TfmwError",
    "UsageError",
    "Workers",
    "attach",
    "callbacks",
    "data",
    "datasets",
    "engines",
    "evaluate",
    "export",
    "fit",
    "init",
    "jobs",
    "launch",
    "layers",
    "options",
    "predict",
    "predict_on_batch",
    "report_progress",
    "storage",
    "strategies",
    "submit",
    "test_on_batch",
    "train_on_batch",
    "verify_export",
]


def __getattr__(name: str) -> Any:
    if name not in __all__ and name not in _SOURCE_OF:
        raise AttributeError(f"module 'tfmw' has no attribute {name!r}")
    if name in _SOURCE_OF:
        value = getattr(importlib.import_module(_SOURCE_OF[name]), name)
    else:
        value = importlib.import_module(f"tfmw.{name}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])


# `keras.distribution` has processes on the TensorFlow backend, too, if Keras was imported before.
if "keras.distribution" in sys.modules and sys.modules["keras"].backend.backend() == "tensorflow":
    importlib.import_module("tfmw.cluster.keras_distribution").install()
