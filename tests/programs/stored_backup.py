"""Trains on from each backup, and compares with one process: `stored_backup.py EPOCHS DIR...`."""

import sys

import keras
import numpy as np
import tensorflow as tf

import tfmw
from tests.programs import _result

epochs, *directories = sys.argv[1:]

cluster = tfmw.init()
ids = np.random.default_rng(0).permutation(64)[:32]
y = (ids % 2).astype(np.float32)
began_at: list[int] = []


class Begin(keras.callbacks.Callback):
    def on_train_begin(self, logs=None):
        began_at.append(int(self.model.optimizer.iterations))


def make():
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [keras.Input((), dtype="int64"), keras.layers.Embedding(64, 4), keras.layers.Dense(1)]
    )
    model.compile(keras.optimizers.Adagrad(0.1), keras.losses.BinaryCrossentropy(from_logits=True))
    return model


def dataset():
    return tf.data.Dataset.from_tensors((ids, y)).repeat()


alone = make()
tfmw.fit(alone, dataset(), epochs=int(epochs), steps_per_epoch=5, verbose=0, strategy="default")
off_by = []
on_servers = bool(cluster.ps)
strategy = tfmw.strategies.parameter_server(min_shard_bytes=512) if on_servers else "auto"
for directory in directories:
    model = make()
    tfmw.fit(
        model,
        dataset(),
        epochs=int(epochs),
        steps_per_epoch=5,
        verbose=0,
        strategy=strategy,
        callbacks=[Begin(), tfmw.callbacks.BackupAndRestore(directory, delete_checkpoint=False)],
    )
    pairs = zip(
        model.weights + model.optimizer.variables,
        alone.weights + alone.optimizer.variables,
        strict=True,
    )
    off_by.append(max(float(np.abs(v.numpy() - w.numpy()).max()) for v, w in pairs))
_result.write({"began_at": began_at, "off_by": off_by})
