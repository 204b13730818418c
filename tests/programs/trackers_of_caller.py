"""`tfmw.fit(workers=2)` beside runs of MLflow and W&B: `trackers_of_caller.py FOLDER`."""

import sys
from pathlib import Path
from typing import Any

import keras
import mlflow
import numpy as np
import wandb
from wandb.integration.keras import WandbMetricsLogger

import tfmw


class OwnReport(keras.callbacks.Callback):
    """Runs on every worker, and names the tracker."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        wandb.log({"own": epoch}, commit=False)


def main(folder: Path) -> None:
    mlflow.set_tracking_uri(f"sqlite:///{folder}/mlflow.db")
    mlflow.keras.autolog(log_models=False)
    x: np.ndarray = np.random.default_rng(0).normal(size=(48, 4)).astype("float32")
    y = x.sum(axis=1, keepdims=True)
    wandb.init(project="training", mode="offline", dir=folder)
    model = keras.Sequential([keras.Input([4]), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    loggers = [WandbMetricsLogger(), OwnReport()]
    tfmw.fit(model, x, y, batch_size=8, epochs=2, verbose=0, workers=2, callbacks=loggers)
    wandb.log({"after": 1})
    wandb.finish()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
