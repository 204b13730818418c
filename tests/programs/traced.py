"""Trains with a trace, and is killed once: `traced.py FOLDER`. Keeps other accounts of its steps.

The accounts are those of `tfmw.callbacks.Log`, and those that `tfmw bench` takes from the ring.
"""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfmw
from bench.forecast import exchanges_of
from tests.programs import _result
from tfmw import strategies
from tfmw.train.mirrored.collectives.connection import ring_of

folder = Path(sys.argv[1])
EPOCHS, STEPS, BATCH, KILLED_AT, SLEEP_S, SIZE = 3, 8, 8, 11, 0.02, 700
cluster = tfmw.init()
splits: list[dict[str, float]] = []
ends: list[float] = []


class Killed(keras.callbacks.Callback):
    """Kills worker 1 in the second epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.steps += 1
        killed = folder / "killed"
        if self.steps == KILLED_AT and cluster.index and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        ends.append(time.monotonic())


class EndsLate(keras.callbacks.Callback):
    """Worker 1 is still busy when the chief has ended its steps."""

    def on_train_end(self, logs: Any = None) -> None:
        if cluster.index:
            time.sleep(2)


def asleep(x: tf.Tensor) -> tf.Tensor:
    def wait(value: np.ndarray) -> np.ndarray:
        time.sleep(SLEEP_S)
        return value

    return tf.ensure_shape(tf.numpy_function(wait, [x], tf.float32), x.shape)


x: np.ndarray = np.ones([STEPS * BATCH, SIZE], np.float32)
data = tf.data.Dataset.from_tensor_slices((x, x)).batch(BATCH).map(lambda x, y: (asleep(x), y))
model = keras.Sequential([keras.Input([SIZE]), keras.layers.Dense(SIZE)])
model.compile(keras.optimizers.SGD(0.01), "mse")
trace = tfmw.callbacks.Trace(folder / "traces", steps=(2, 1000))
log = tfmw.callbacks.Log(lambda logs, step: splits.append({k: float(v) for k, v in logs.items()}))
with exchanges_of(ring_of(strategies.current_strategy())) as spans:
    tfmw.fit(
        model,
        data,
        epochs=EPOCHS,
        verbose=0,
        callbacks=[EndsLate(), trace, log, Killed()],
        backup_dir=folder / "backup",
        backup_every=4,
    )
made = [(span.what, span.end - span.begin) for span in spans]
_result.write({"splits": splits, "ends": ends, "spans": made})
