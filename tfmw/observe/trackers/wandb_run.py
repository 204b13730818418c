"""Weights & Biases: one run of all tasks and attempts, by W&B's own `id` and `resume`."""

from __future__ import annotations

import functools
import itertools
import logging
import os
import pickle
from types import ModuleType
from typing import Any

logger = logging.getLogger("tfmw")

FLUSH_S = 0.5
"""Seconds between two writes of W&B's file of a run; with W&B's 15, a kill loses more."""

_FLUSH = "WANDB_X_TRANSACTION_LOG_FLUSH_INTERVAL"
_SERVICE = "WANDB_SERVICE"  # variable with the address of W&B's service, as W&B sets it
_CHOICES = frozenset({"id", "resume", "resume_from", "fork_from"})  # arguments that name a run


def silence(module: ModuleType) -> None:
    """Makes `wandb.init` return a run that logs nothing."""
    init = module.init

    @functools.wraps(init)
    def disabled(*args: Any, **kwargs: Any) -> Any:
        return init(*args, **{**kwargs, "mode": "disabled"})

    module.init = disabled  # type: ignore[attr-defined]


def continue_runs(training: str, module: ModuleType) -> None:
    """Makes `wandb.init` resume the runs of earlier attempts, in the same order.

    Args:
        training: TFMW_RUN_ID of the training; "": each attempt begins its own runs.
        module: wandb.
    """
    init = module.init
    ids = (f"{training}-{number}" if number else training for number in itertools.count())
    os.environ.setdefault(_FLUSH, str(FLUSH_S))

    @functools.wraps(init)
    def continued(*args: Any, **kwargs: Any) -> Any:
        chosen = any(kwargs.get(name) is not None for name in _CHOICES)
        if training and not chosen and "WANDB_RUN_ID" not in os.environ:
            kwargs |= {"id": next(ids), "resume": "allow"}
        return init(*args, **kwargs)

    module.init = continued  # type: ignore[attr-defined]


def active() -> dict[str, Any] | None:
    """The active run, which travels with the address of its service."""
    import wandb

    if wandb.run is None or wandb.run.disabled:
        return None
    return {"run": pickle.dumps(wandb.run), "service": os.environ.get(_SERVICE)}


def adopt(sent: dict[str, Any], is_chief: bool) -> None:
    """Lets `wandb.log` log to a run of another process of this machine, on the chief."""
    import wandb

    if not is_chief:
        wandb.init(mode="disabled")
        return
    try:
        if sent["service"]:
            os.environ[_SERVICE] = sent["service"]
        run = pickle.loads(sent["run"])
        wandb.run, wandb.log = run, run.log
        wandb.log_artifact, wandb.define_metric = run.log_artifact, run.define_metric
    except Exception as error:  # for example a run of another machine
        logger.warning("the caller's W&B run cannot be joined here: %s", error)
