"""Trains with backups while an evaluator watches them; the chief waits for it after each epoch.

evaluated.py DIRECTORY [--wait]
"""

import json
import logging
import os
import sys
import time
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import tfmw

EPOCHS, STEPS = 3, 20
logging.basicConfig(level=logging.INFO, format="%(message)s")
folder = Path(sys.argv[1])
backups = folder / "backups"
cluster = tfmw.init()
if cluster.task == "evaluator":
    print("evaluator watches", flush=True)
# The coordinator of parameter servers makes no steps of its own.
PROFILED = 0 if cluster.has_ps else (STEPS + 2, STEPS + 4)

rng = np.random.default_rng(0)
x = rng.normal(size=(640, 10)).astype(np.float32)
y = x[:, :3].argmax(axis=1).astype(np.int64)


class WaitForEvaluator(keras.callbacks.Callback):
    """Begins an epoch once the backup before it is scored, so that none is overtaken."""

    chief_only = True

    def on_epoch_begin(self, epoch, logs=None):
        done = backups / "evaluation" / "done.json"
        while epoch and str(epoch * STEPS) not in (
            json.loads(done.read_text()) if done.exists() else {}
        ):
            time.sleep(0.05)
        if epoch == 1 and "--wait" in sys.argv:
            sys.stdin.readline()


keras.utils.set_random_seed(1)
model = keras.Sequential(
    [keras.Input((10,)), keras.layers.Dense(16, activation="relu"), keras.layers.Dense(3)]
)
model.compile(
    keras.optimizers.Adam(0.01),
    keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)
history = tfmw.fit(
    model,
    tf.data.Dataset.from_tensor_slices((x, y)).batch(32),
    epochs=EPOCHS,
    steps_per_epoch=STEPS,
    validation_data=(x[:200], y[:200]),
    callbacks=[
        tfmw.callbacks.BackupAndRestore(backups, delete_checkpoint=True),
        keras.callbacks.TensorBoard(folder / "board", profile_batch=PROFILED),
        WaitForEvaluator(),
    ],
    verbose=0,
)
result = {name: history.history.get(name) for name in ("loss", "val_loss")}
if cluster.task == "evaluator":
    best = tf.saved_model.load(str(backups / "best"))
    outputs = best.serve(tf.constant(x[:200]))
    losses = keras.losses.sparse_categorical_crossentropy(y[:200], outputs, from_logits=True)
    result["best_loss"] = float(np.mean(losses))
if "TFMW_RESULT" in os.environ:
    from tests.programs import _result

    _result.write(result)
