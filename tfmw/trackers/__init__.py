"""Tracking libraries: one run of a training, whatever the number of its workers and restarts.

    trackers.join(is_chief)        # in tfmw.init: the other tasks' calls reach no tracker
    saved = trackers.positions()   # JSON for a backup: which run, how far
    trackers.resume(saved)         # a resumed training goes on with that run
    trackers.flush()               # what was logged is on disk, or with the server

Every task of a script calls `mlflow.start_run()` or `wandb.init()`. Only the chief's calls reach
the tracker. After a restart the same calls continue the run of the last attempt, and what it has
logged already is not logged again. `mlflow_run.py` and `wandb_run.py` do that for their library,
`rule.py` finds callbacks that log. A library that a script does not import is never imported.

May import: `tfmw.errors`. No TensorFlow.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

from tfmw.trackers import mlflow_run, wandb_run
from tfmw.trackers.imports import when_imported
from tfmw.trackers.rule import logs_to_tracker

__all__ = [
    "RUN_ID",
    "active_runs",
    "adopt",
    "flush",
    "join",
    "logs_to_tracker",
    "positions",
    "resume",
]

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
    run = environ.get(RUN_ID, "")
    for name, library in _LIBRARIES.items():
        when_imported(name, library.Chief(run) if is_chief else library.silence)


def positions() -> dict[str, Any]:
    """JSON: the active run of each library, and how far it is."""
    return {name: found for name, module in _imported() if (found := module.position()) is not None}


def resume(saved: Mapping[str, Any]) -> None:
    """Continues the runs of `positions`.

    Args:
        saved: what `positions` returned in the interrupted training.
    """
    for name, module in _imported():
        if name in saved:
            module.resume(saved[name])


def active_runs() -> dict[str, Any]:
    """The active run of each library, for `adopt` in another process."""
    return {name: run for name, module in _imported() if (run := module.active()) is not None}


def adopt(runs: Mapping[str, Any]) -> None:
    """Lets this process, if it is the chief, log to runs that another process has begun.

    Args:
        runs: what `active_runs` returned there.
    """
    if _is_chief:
        for name, run in runs.items():
            _LIBRARIES[name].adopt(run)


def flush() -> None:
    """Waits until what was logged is where a restarted process finds it."""
    for _, module in _imported():
        module.flush()


def _imported() -> list[tuple[str, Any]]:
    return [(name, module) for name, module in _LIBRARIES.items() if name in sys.modules]
