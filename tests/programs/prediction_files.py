"""Predictions in files, of some rows in shuffled order: `prediction_files.py FOLDER [KILLED]`.

With KILLED, worker 1 is killed once, at the begin of that batch.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfmw
from tests.programs import _result
from tfmw.train.mirrored import prediction_parts

ROWS = 101
BATCH = 6


class Repeated(keras.Model):
    """Outputs of three kinds: dense, ragged, and strings."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(3)
        self.dense.build((None, 2))
        self.built = True

    def call(self, x: Any) -> Any:
        row = tf.cast(x[:, 0], tf.int64)
        ragged = tf.RaggedTensor.from_row_lengths(
            tf.repeat(x[:, 0], row % 4), row % 4, validate=False
        )
        return {"dense": self.dense(x), "ragged": ragged, "text": tf.strings.as_string(row)}


def network() -> Any:
    keras.utils.set_random_seed(1)
    return Repeated()


def dataset() -> tf.data.Dataset:
    x: Any = np.arange(2 * ROWS, dtype="float32").reshape(ROWS, 2)
    names = np.array([f"number {row}" for row in range(ROWS)])
    rows = tf.data.Dataset.from_tensor_slices((x, {"name": names}))
    return rows.shuffle(ROWS, seed=3).batch(BATCH)


class KilledAtBatch(keras.callbacks.Callback):
    def __init__(self, note: Path, batch: int) -> None:
        super().__init__()
        self.note, self.batch = note, batch
        self.begun: list[int] = []

    def on_predict_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.begun.append(batch)
        if os.environ["TFMW_TASK"] == "worker 1" and batch >= self.batch:
            if not self.note.exists():
                self.note.touch()
                os.kill(os.getpid(), signal.SIGKILL)


def main(folder: Path, killed: int) -> None:
    prediction_parts.PART_BYTES = 200
    callback = KilledAtBatch(folder / "killed", killed)
    callback.chief_only = False
    index = tfmw.predict(
        network(), dataset(), output_dir=folder / "out", keys=["name"], callbacks=[callback]
    )
    _result.write({"index": index, "begun": callback.begun})


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
