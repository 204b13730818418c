"""Trains until the test ends it; one worker has a fault: `stands_still.py FAULT FOLDER`.

FAULT: "none"; "skips", worker 1 does not enter an exchange; "slow", its steps take longer.
"""

import sys
import time
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import tfmw

fault, folder = sys.argv[1], Path(sys.argv[2])
cluster = tfmw.init()
STEP, SLOW_S = 40, 0.03


def sleeping_in_the_users_code() -> None:
    while True:
        time.sleep(0.05)


def slowly(loss: tf.Tensor) -> tf.Tensor:
    def wait(value: np.ndarray) -> np.ndarray:
        seen.append(1)
        if fault == "skips" and cluster.index == 1 and len(seen) == STEP:
            sleeping_in_the_users_code()
        if fault == "slow" and cluster.index == 1:
            time.sleep(SLOW_S)
        return value

    out = tf.numpy_function(wait, [loss], tf.float32)
    return tf.ensure_shape(out, loss.shape)


class Model(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return self.dense(x) * tf.stop_gradient(slowly(tf.ones([])))


class Begun(keras.callbacks.Callback):
    """Tells the test that the training is under way."""

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        if batch >= 20:
            (folder / f"begun {cluster.index}").touch()


seen: list[int] = []
model = Model()
model.compile(keras.optimizers.SGD(0.01), "mse")
data = tf.data.Dataset.from_tensors((tf.ones([8, 4]), tf.ones([8, 1]))).repeat()
tfmw.fit(model, data, steps_per_epoch=1_000_000, verbose=0, callbacks=[Begun()])
