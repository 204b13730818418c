"""One task ends, or is busy, while the other waits for it: leaves.py evaluate|exit|step|busy."""

import os
import sys
import time
from pathlib import Path

import keras
import numpy as np

import tfmw
from tests.programs._result import write
from tfmw.cluster import leaving
from tfmw.compat import runtime

what, collectives = sys.argv[1:3]
cluster = tfmw.init(collectives=collectives)
model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
x: np.ndarray = np.zeros((8, 3), "float32")
y: np.ndarray = np.zeros((8, 1), "float32")


class LeavesInTheSecondEpoch(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 1 and not cluster.is_chief:
            sys.exit(0)


def others_wait() -> None:
    """Returns once the other task has looked several times for this one, at its end."""
    while len(Path(os.environ["TFMW_RESULT"], "looks").read_bytes()) < 3:
        time.sleep(0.05)


if what == "busy":
    leaving._SLICE_S, probe = 0.2, runtime.require_task
    looks = Path(os.environ["TFMW_RESULT"], "looks")
    looks.touch()

    def noted(task: str, timeout_s: float) -> None:
        with looks.open("ab") as file:
            file.write(b".")
        probe(task, timeout_s)

    runtime.require_task = noted

callbacks = [LeavesInTheSecondEpoch()] if what == "exit" else []
tfmw.fit(model, x, y, batch_size=4, epochs=2, verbose=0, callbacks=callbacks)
if cluster.is_chief:
    if what == "evaluate":
        tfmw.evaluate(model, x, y, batch_size=4, verbose=0)  # only here
    if what == "busy":
        others_wait()
write({"done": True})
