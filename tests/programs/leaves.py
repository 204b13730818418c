"""Ends of tasks: leaves.py evaluate|exit|step|busy|paused COLLECTIVES.

One task ends, or is busy, while the other waits for it; or all processes are paused meanwhile.
"""

import os
import sys
import time
from pathlib import Path

import keras
import numpy as np

import tfmw
from tests.programs._result import write
from tfmw.cluster import coordination

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


class WaitsForThePause(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        folder = Path(os.environ["TFMW_RESULT"])
        if epoch == 1:
            (folder / f"waits_{cluster.index}").touch()
            while not (folder / "was_paused").exists():
                time.sleep(0.05)


if what == "paused":
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
        while not coordination.current().ended:  # the other task waits at its end
            time.sleep(0.05)
write({"done": True})
