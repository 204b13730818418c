"""Trains until the test ends it; one worker has a fault: `stands_still.py FOLDER`.

The file "fault" in FOLDER names it, and may change: "skips", worker 1 does not enter an exchange;
"slow", its steps take longer; "slow map", its input does; "slow core", its core has other work.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import tfmw

folder = Path(sys.argv[1])
STEP, SLOW_S = 40, 0.2  # much longer than a step, also on a busy machine
HIDDEN, BUSY = 1500, 3


def fault() -> str:
    return (folder / "fault").read_text() if cluster.index == 1 else ""


def take_a_core(index: int, busy: int) -> None:
    """Leaves this process one core, and other work on it; its processes end with its group."""
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[index]})
    for _ in range(busy):
        subprocess.Popen([sys.executable, "-c", "while True: pass"])


def sleeping_in_the_users_code() -> None:
    while True:
        time.sleep(0.05)


def slowly(value: tf.Tensor) -> tf.Tensor:
    def wait(value: np.ndarray) -> np.ndarray:
        seen.append(1)
        if len(seen) == STEP and fault() == "skips":
            sleeping_in_the_users_code()
        if fault() == "slow":
            time.sleep(SLOW_S)
        return value

    out = tf.numpy_function(wait, [value], tf.float32)
    return tf.ensure_shape(out, value.shape)


def slow_map(x: tf.Tensor, y: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    def wait(value: np.ndarray) -> np.ndarray:
        if fault() == "slow map":
            time.sleep(SLOW_S)
        return value

    return tf.ensure_shape(tf.numpy_function(wait, [x], tf.float32), x.shape), y


class Model(keras.Model):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.hidden = [keras.layers.Dense(hidden, trainable=False) for _ in range(hidden and 2)]
        self.dense = keras.layers.Dense(1)

    def call(self, x: tf.Tensor) -> tf.Tensor:
        for layer in self.hidden:
            x = layer(x)
        return self.dense(x) * tf.stop_gradient(slowly(tf.ones([])))


on_slow_core = (folder / "fault").read_text() == "slow core"
if on_slow_core:
    task = int(os.environ["TFMW_LOCAL_RANK"])
    take_a_core(task, busy=BUSY * task)
cluster = tfmw.init()
seen: list[int] = []
model = Model(HIDDEN if on_slow_core else 0)
model.compile(keras.optimizers.SGD(0.01), "mse")
rows = 256 if on_slow_core else 8
data = tf.data.Dataset.from_tensors((tf.ones([rows, 4]), tf.ones([rows, 1]))).repeat().map(slow_map)
# A callback between batches, so that each call of the driver runs one step and reports it.
each_step = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: None)
tfmw.fit(model, data, steps_per_epoch=1_000_000, verbose=0, callbacks=[each_step])
