"""Logs to MLflow, W&B and TensorBoard: `trackers.py FOLDER [keras]`; killed once in each training.

The first training has their callbacks, the second MLflow's autologging. With `keras` it is Keras
alone that trains, in one process.
"""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import keras
import mlflow
import numpy as np
import wandb
from wandb.integration.keras import WandbMetricsLogger, WandbModelCheckpoint

import tfmw
from tests.helpers.wandb_rows import wandb_rows
from tests.programs import _result
from tfmw.train.callbacks.log import flush_events

folder, by_keras = Path(sys.argv[1]), len(sys.argv) > 2
EPOCHS, STEPS, KILLED_AT = 2, 6, 9
X = np.random.default_rng(0).normal(size=(STEPS * 8, 4)).astype("float32")
Y = X.sum(axis=1, keepdims=True)


class Killed(keras.callbacks.Callback):
    """Kills the chief after a step, when all that it has logged is on disk."""

    chief_only = True

    def __init__(self, name: str, others: list[Any]) -> None:
        super().__init__()
        self.killed = folder / f"killed in {name}"
        self.others = others
        self.steps = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.steps += 1
        if self.steps == KILLED_AT and not self.killed.exists():
            wait_for_rows()
            flush_events(self.others)
            self.killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def wait_for_rows() -> None:
    """Waits until W&B's file has the rows of all steps; returns at once if the run has ended."""
    if wandb.run is not None:
        (file,) = Path(wandb.run.settings.sync_dir).glob("*.wandb")
        while len(list(wandb_rows(file))) < KILLED_AT:
            time.sleep(0.05)


class OwnReport(keras.callbacks.Callback):
    """Logs as users write it, on every worker."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        mlflow.log_metric("own", 10.0 * epoch, step=epoch)


def fit(name: str, callbacks: list[Any]) -> None:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input([4]), keras.layers.Dense(1, name="out")], name="model")
    model.compile(keras.optimizers.SGD(0.1), "mse")
    settings: dict[str, Any] = {
        "epochs": EPOCHS,
        "batch_size": 8,
        "verbose": 0,
        "shuffle": False,
        "validation_data": (X, Y),
    }
    if by_keras:
        model.fit(X, Y, callbacks=callbacks, **settings)
        return
    callbacks = [*callbacks, Killed(name, callbacks)]
    backup: dict[str, Any] = {"backup_dir": folder / f"backup {name}", "backup_every": 4}
    tfmw.fit(model, X, Y, callbacks=callbacks, **backup, **settings)


mlflow.set_tracking_uri(f"sqlite:///{folder}/mlflow.db")
mlflow.set_experiment("training")
run = wandb.init(project="training", mode="offline", dir=folder, config={"rate": 0.1})
with mlflow.start_run(run_name="callbacks"):
    mlflow.log_param("chosen", 7)
    mlflow.log_param("attempt", os.environ.get("TFMW_ATTEMPT", "0"))  # MLflow refuses another value
    mlflow.log_text("as it was", "note.txt")
    fit(
        "callbacks",
        [
            mlflow.keras.MlflowCallback(log_every_epoch=False, log_every_n_steps=1),
            WandbMetricsLogger(log_freq="batch"),
            WandbModelCheckpoint(folder / "{epoch}.keras"),
            keras.callbacks.TensorBoard(folder / "board", update_freq=1),
            OwnReport(),
        ],
    )
wandb.finish()
mlflow.keras.autolog(log_models=False)
fit("autolog", [])
if not by_keras:
    _result.write({"wandb": run.id, "silent": run.disabled, "mlflow": mlflow.get_tracking_uri()})
