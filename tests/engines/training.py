"""A small fit for every engine: a model class that no module has, and a worker that is killed."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np

import tfmw
from tests.engines.contract import wait_for
from tfmw.engines import Engine
from tfmw.launcher.call import ELSEWHERE

EPOCHS = 6
X = np.random.default_rng(0).normal(size=(96, 8)).astype("float32")
Y = (X.sum(axis=1) > 0).astype("int32")


class DiesOnce(keras.callbacks.Callback):
    """Kills worker 1 of a job's first attempt, once there is a file.

    Args:
        order: the file.
    """

    def __init__(self, order: str) -> None:
        super().__init__()
        self.order = order

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        here = ELSEWHERE in os.environ and os.environ["TFMW_TASK"] == "worker 1"
        if here and os.environ["TFMW_ATTEMPT"] == "0" and epoch == 2:
            wait_for(Path(self.order).exists)
            os.kill(os.getpid(), signal.SIGKILL)


def make_model() -> Any:
    class Network(keras.Model):  # travels with the call
        def __init__(self) -> None:
            super().__init__()
            self.hidden = keras.layers.Dense(16, activation="relu")
            self.out = keras.layers.Dense(2)

        def call(self, x: Any) -> Any:
            return self.out(self.hidden(x))

    keras.utils.set_random_seed(1)
    model = Network()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])
    return model


def fit(on: Any, folder: Path) -> tuple[Any, Any]:
    """(History, model) of a fit on two workers."""
    model = make_model()
    history = tfmw.fit(
        model,
        X,
        Y,
        epochs=EPOCHS,
        batch_size=32,
        workers=2,
        on=on,
        callbacks=[DiesOnce(str(folder / "order"))],
    )
    return history, model


def order_when_backed_up(engine: Engine, folder: Path) -> threading.Thread:
    """Gives the order to die, in a thread, once the only job of the engine keeps a backup."""

    def run() -> None:
        before = {job.id for job in tfmw.jobs(engine)}
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            for job in tfmw.jobs(engine):
                if job.id not in before and job.details().get("backup"):
                    (folder / "order").touch()
                    return
            time.sleep(0.1)

    thread = threading.Thread(target=run)
    thread.start()
    return thread
