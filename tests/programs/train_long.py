"""Trains for ever with backups: train_long.py BACKUPS CUT [eagerly].

After epoch 3 the chief waits for the file CUT, and the others for the chief's word. If there is a
file `break` beside it, the others raise an error.
"""

import sys
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np

import tfmw

cluster = tfmw.init()


class Say(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        print(f"epoch {epoch}", flush=True)
        while epoch == 3 and cluster.is_chief and not Path(sys.argv[2]).exists():
            time.sleep(0.05)
        if not cluster.is_chief and Path(sys.argv[2]).with_name("break").exists():
            raise ValueError("told to break")


x: Any = np.ones((8, 3), np.float32)
model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
model.compile("sgd", "mse", run_eagerly="eagerly" in sys.argv)
tfmw.fit(
    model,
    x,
    x[:, :1],
    batch_size=4,
    epochs=1_000_000,
    verbose=0,
    callbacks=[Say()],
    backup_dir=sys.argv[1],
)
