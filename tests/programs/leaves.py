"""Ends of tasks: leaves.py evaluate|exit|step|busy|paused COLLECTIVES.

One task ends, or is busy, while the other waits for it; or all processes are paused meanwhile.
"""

import os
import sys
import time
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import tfmw
from tests.programs._result import write
from tfmw.cluster import joining, leaving
from tfmw.compat import runtime

what, collectives = sys.argv[1:3]
if what == "paused":
    joining.HEARTBEAT_S = 2
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


class WaitsForThePause(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        folder = Path(os.environ["TFMW_RESULT"])
        if epoch == 1:
            (folder / f"waits_{cluster.index}").touch()
            while not (folder / "was_paused").exists():
                time.sleep(0.05)


if what == "paused":

    def refused(name: str, timeout_s: float) -> None:
        """Simulates the end of a pause: the service takes tasks for lost that reply slowly."""
        raise tf.errors.UnavailableError(None, None, "Agent must be in CONNECTED state.")

    runtime.coordination_barrier = refused
    waits = [WaitsForThePause()]
    backups = sys.argv[3]
    tfmw.fit(model, x, y, batch_size=4, epochs=3, verbose=0, callbacks=waits, backup_dir=backups)
    write({"done": True})
    sys.exit()
callbacks = [LeavesInTheSecondEpoch()] if what == "exit" else []
tfmw.fit(model, x, y, batch_size=4, epochs=2, verbose=0, callbacks=callbacks)
if cluster.is_chief:
    if what == "evaluate":
        tfmw.evaluate(model, x, y, batch_size=4, verbose=0)  # only here
    if what == "busy":
        others_wait()
write({"done": True})
