"""Tracking libraries: one run of a training, whatever the number of its workers and restarts.

    trackers.join(is_chief)        # in tfmw.init: the other tasks' calls reach no tracker

Every task of a script calls `mlflow.start_run()` or `wandb.init()`. Only the chief's calls reach
the tracker. After a restart the same calls continue the run of the last attempt. `mlflow_run.py`
and `wandb_run.py` do that for their library, `rule.py` finds callbacks that log. A library that a
script does not import is never imported.

May import: `tfmw.errors`. No TensorFlow.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Mapping
from typing import Any

from tfmw.trackers import mlflow_run, wandb_run
from tfmw.trackers.import_hooks import when_imported
from tfmw.trackers.rule import logs_to_tracker

__all__ = ["RUN_ID", "active_runs", "adopt", "join", "logs_to_tracker"]

RUN_ID = "TFMW_RUN_ID"
"""Variable that names the run over all of its attempts; `tfmw run` sets it."""

_LIBRARIES = {"mlflow": mlflow_run, "wandb": wandb_run}
_joined = False
_is_chief = True


def join(is_chief: bool, environ: Mapping[str, str] = os.environ) -> None:
    """Lets the chief log, and continue the run of an earlier attempt; silences the other tasks.

    Args:
        is_chief: whether this task is the one that writes.
        environ: TFMW_RUN_ID identifies the run; without it a restart begins a new one.
    """
    global _joined, _is_chief
    if _joined:
        return
    _joined, _is_chief = True, is_chief
    training = environ.get(RUN_ID, "")
    for name, library in _LIBRARIES.items():
        continues = functools.partial(library.continue_runs, training)
        when_imported(name, continues if is_chief else library.silence)


def active_runs() -> dict[str, Any]:
    """The active run of each library, for `adopt` in another process."""
    imported = [(name, module) for name, module in _LIBRARIES.items() if name in sys.modules]
    return {name: run for name, module in imported if (run := module.active()) is not None}


def adopt(runs: Mapping[str, Any]) -> None:
    """Lets this process, if it is the chief, log to runs that another process has begun.

    Args:
        runs: what `active_runs` returned there.
    """
    for name, run in runs.items():
        _LIBRARIES[name].adopt(run, _is_chief)
