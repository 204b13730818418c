"""Tracking libraries: one run of a training, whatever the number of its workers and restarts.

    trackers.join(is_chief)        # in tfmw.init: the other tasks' calls reach no tracker

Every task of a script calls `mlflow.start_run()` or `wandb.init()`. Only the chief's calls reach
the tracker. After a restart the same calls continue the run of the last attempt. `mlflow_run.py`
and `wandb_run.py` do that for their library. A library that a script does not import is never
imported.

May import: `tfmw.errors`, `late_imports`. No TensorFlow.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Mapping
from typing import Any

from tfmw.observe.late_imports import when_imported
from tfmw.observe.trackers import mlflow_run, wandb_run

RUN_ID = "TFMW_RUN_ID"
"""Variable that names the run over all of its attempts; `tfmw run` sets it."""

_LIBRARIES = {"mlflow": mlflow_run, "wandb": wandb_run}
_joined = False
_is_chief = True

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
"""Top-level packages of trackers, and of Optuna, whose trials are reported; with integrations."""

CLIENT_METHODS = frozenset(
    {"add_scalar", "log_artifact", "log_metric", "log_metrics", "log_scalar", "report_scalar"}
)
"""Method names that identify an object as the client of a tracker, in any package."""

_WRITERS_OF_EVENTS = "SummaryWriter"  # a class of TensorFlow, tensorboardX and PyTorch


def join(is_chief: bool) -> None:
    """Lets the chief log, and continue the run of an earlier attempt; silences the other tasks.

    TFMW_RUN_ID identifies the run; without it a restart begins a new one.

    Args:
        is_chief: whether this task writes to trackers.
    """
    global _joined, _is_chief
    if _joined:
        return
    _joined, _is_chief = True, is_chief
    training = os.environ.get(RUN_ID, "")
    for name, library in _LIBRARIES.items():
        act = functools.partial(library.continue_runs, training) if is_chief else library.silence
        when_imported(name, act)


def active_runs() -> dict[str, Any]:
    """The active run of each library, for `adopt` in another process."""
    imported = [(name, module) for name, module in _LIBRARIES.items() if name in sys.modules]
    return {name: run for name, module in imported if (run := module.active()) is not None}


def adopt(runs: Mapping[str, Any]) -> None:
    """Lets this process, if it is the chief, log to runs that another process has begun.

    Args:
        runs: the result of `active_runs` there.
    """
    for name, run in runs.items():
        _LIBRARIES[name].adopt(run, _is_chief)


def logs_to_tracker(callback: Any) -> bool:
    """Whether a callback writes to a tracker, so that only one task may run it.

    It does if its class, or a base class, belongs to one of `PACKAGES`. It also does if an
    attribute is an object of such a class (a run, an experiment), a client, or a writer of
    TensorBoard's events.

    A trial of a study of Optuna in memory is no tracker: each task has its own, and reports to it.
    """
    parts = list(getattr(callback, "__dict__", {}).values())
    if any(type(getattr(part, "storage", None)).__name__ == "InMemoryStorage" for part in parts):
        return False
    if any(_package(kind) in PACKAGES for kind in type(callback).__mro__):
        return True
    return any(_is_of_tracker(type(part)) for part in parts)


def _package(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def _is_of_tracker(kind: type) -> bool:
    """Whether objects of a class send metrics, or write events of TensorBoard."""
    if any(_package(k) in PACKAGES or k.__name__ == _WRITERS_OF_EVENTS for k in kind.__mro__):
        return True
    return any(callable(getattr(kind, name, None)) for name in CLIENT_METHODS)
