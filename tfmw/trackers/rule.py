"""Callbacks that log to a tracker, found by the package of their class and of objects they hold."""

from __future__ import annotations

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


def logs_to_tracker(callback: Any) -> bool:
    """Whether a callback writes to a tracker, so that only one task may run it.

    True if its class, or one that it inherits from, is of one of `PACKAGES`, or if one of its
    attributes is an object of one (a run, an experiment), a client, or a writer of TensorBoard's
    events.
    """
    if any(_package(kind) in PACKAGES for kind in type(callback).__mro__):
        return True
    return any(_is_of_tracker(type(value)) for value in getattr(callback, "__dict__", {}).values())


def _package(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def _is_of_tracker(kind: type) -> bool:
    """Whether objects of a class send metrics, or write events of TensorBoard."""
    if any(_package(k) in PACKAGES or k.__name__ == _WRITERS_OF_EVENTS for k in kind.__mro__):
        return True
    return any(callable(getattr(kind, name, None)) for name in CLIENT_METHODS)
