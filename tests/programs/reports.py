"""Trains until the test has seen its reports: `reports.py FOLDER`."""

import sys
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfmw
from tests.programs import _result

folder = Path(sys.argv[1])
cluster = tfmw.init()
logged: list[tuple[int, dict[str, Any]]] = []


class UntilSeen(keras.callbacks.Callback):
    """Stops when the test has seen enough, at the end of an epoch after the traced steps."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        traced = epoch >= 3  # steps 10 to 20
        self.model.stop_training = traced and (folder / "seen").exists()


def slow(x: tf.Tensor) -> tf.Tensor:
    def wait(value: np.ndarray) -> np.ndarray:
        time.sleep(0.004)
        return value

    return tf.ensure_shape(tf.numpy_function(wait, [x], tf.float32), x.shape)


model = keras.Sequential([keras.Input([4]), keras.layers.Dense(1)])
model.compile(keras.optimizers.SGD(0.01), "mse")
x: np.ndarray = np.ones([16 * 8, 4], np.float32)
# The slow map is behind the batches: it runs once for each of them.
data = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(16).map(lambda x, y: (slow(x), y))
log = tfmw.callbacks.Log(lambda logs, step: logged.append((step, logs)))
tfmw.fit(
    model,
    data,
    epochs=1000,
    verbose=0,
    callbacks=[log, UntilSeen()],
    backup_dir=folder / "backup",
)
_result.write({"logged": [(step, {k: float(v) for k, v in logs.items()}) for step, logs in logged]})
