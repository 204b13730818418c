"""Trains on parameter servers, is preempted inside the second epoch, and resumes.

ps_resume.py --backup=DIR [--leave]
"""

import argparse
import os
import signal
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfmw
from tests.programs import _result
from tests.programs._extremes import Extremes

STEPS, BATCH = 100, 20

parser = argparse.ArgumentParser()
parser.add_argument("--backup", required=True)
parser.add_argument("--leave", action="store_true")
options = parser.parse_args()
tfmw.init()


class Seen(keras.metrics.Metric):
    """Counts examples."""

    def __init__(self) -> None:
        super().__init__(name="seen")
        self.total = self.add_weight(initializer="zeros", name="total")

    def update_state(self, y: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.total.assign_add(tf.cast(tf.shape(y_pred)[0], self.dtype))

    def result(self) -> Any:
        return self.total


begins_at: list[int] = []  # not the callback's: a backup would restore it


class Leave(keras.callbacks.Callback):
    """Asks once, early in the second epoch."""

    def on_train_begin(self, logs: Any = None) -> None:
        begins_at.append(int(self.model.optimizer.iterations))

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if options.leave and logs["seen"] < STEPS * BATCH and self.epoch == 1:
            options.leave = False
            os.kill(os.getpid(), signal.SIGTERM)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch


x: Any = np.random.default_rng(0).normal(size=(400, 3)).astype("float32")
model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
model.compile("sgd", "mse", metrics=[Seen(), Extremes()], steps_per_execution=5)
history = tfmw.fit(
    model,
    tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(BATCH),
    epochs=3,
    steps_per_epoch=STEPS,
    callbacks=[Leave()],
    backup_dir=options.backup,
    verbose=0,
)
_result.write(
    {
        "seen": history.history["seen"],
        "examples": history.history["examples"],
        "began_at": begins_at[0],
        "iterations": int(model.optimizer.iterations),
    }
)
