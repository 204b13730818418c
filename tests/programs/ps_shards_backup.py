"""Trains a divided table, resumes from the backup, and compares with one process.

ps_shards_backup.py --backup=DIR --epochs=N [--export=DIR]

The model is exported to DIR, whole, and to DIR.sharded.
"""

import argparse
import logging
import os
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import tfmw
from tests.programs import _of_keras, _result
from tfmw.tables import creation, files, row_files
from tfmw.train.saved_model import verify_export as verify

parser = argparse.ArgumentParser()
parser.add_argument("--backup", required=True)
parser.add_argument("--epochs", type=int, required=True)
parser.add_argument("--export")
options = parser.parse_args()

tfmw.init()
backups = Path(options.backup)
os.chdir(backups.parent)  # of the coordinator: servers, in another directory, get whole paths
ids = np.random.default_rng(0).permutation(5000)[:256]
y = (ids % 2).astype(np.float32)
began_at: list[int] = []
warned: list[str] = []
handler = logging.Handler()
handler.emit = lambda record: warned.append(record.getMessage())  # type: ignore[method-assign]
logging.getLogger("tfmw").addHandler(handler)


class Begin(keras.callbacks.Callback):
    def on_train_begin(self, logs=None):
        began_at.append(int(self.model.optimizer.iterations))


def make():
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [keras.Input((), dtype="int64"), keras.layers.Embedding(5000, 16), keras.layers.Dense(1)]
    )
    model.compile(keras.optimizers.Adagrad(0.1), keras.losses.BinaryCrossentropy(from_logits=True))
    return model


def dataset():
    return tf.data.Dataset.from_tensors((ids, y)).repeat()


# Small enough that each server makes several blocks, and writes several slices and files.
creation._INITIAL_BYTES = files.SLICE_BYTES = row_files.FILE_BYTES = 1 << 16
files.FILE_BYTES = 1 << 17
alone = make()  # an ordinary model: the servers are not known yet
strategy = tfmw.strategies.parameter_server(min_shard_bytes=1 << 16)
model = make()
tfmw.fit(
    model,
    dataset(),
    epochs=options.epochs,
    steps_per_epoch=5,
    verbose=0,
    strategy=strategy,
    callbacks=[Begin(), tfmw.callbacks.BackupAndRestore(backups.name, delete_checkpoint=False)],
)
_of_keras.fit(alone, dataset(), epochs=options.epochs, steps_per_epoch=5, verbose=0)
from tfmw.train.parameter_server.variables import ServerVariables  # noqa: E402

servers = tfmw.strategies.servers_of(strategy)
assert servers is not None
server_variables = ServerVariables(model, len(servers.cluster.ps), servers.settings.partition)
whole = [text for text in warned if "has all of its rows" in text]
ServerVariables(alone, len(servers.cluster.ps), servers.settings.partition)
whole_alone = [text for text in warned if "has all of its rows" in text]


class AllRows(keras.layers.Layer):
    """Multiplies by all rows of the table, as a tied softmax does."""

    def call(self, x):
        return x @ tf.transpose(tf.convert_to_tensor(model.layers[0].embeddings))


def refused(path):
    """Reason why a model with a layer that reads all rows is not exported with sharded tables."""
    tied = keras.Sequential([keras.Input((), dtype="int64"), model.layers[0], AllRows()])
    try:
        tfmw.export(tied, path, tables="sharded")
    except tfmw.TfmwError as e:
        return str(e), os.path.exists(path)


exported = {}
if options.export:
    tfmw.export(model, options.export)
    sharded = Path(f"{options.export}.sharded")
    tfmw.export(model, sharded.with_suffix(".new"), tables="sharded")
    sharded.with_suffix(".new").rename(sharded)  # it works wherever it is
    by_rows = tf.saved_model.load(sharded)
    predicted = tfmw.predict(model, ids, verbose=0)
    loaded = tf.saved_model.load(options.export)
    exported = {
        "files": sorted(path.name for path in Path(options.export, "variables").iterdir()),
        "off_by": float(np.abs(loaded.serve(tf.constant(ids)) - predicted).max()),
        "all_off_by": float(
            max(
                np.abs(own.numpy() - other.numpy()).max()
                for own, other in zip(model.weights, loaded.variables, strict=True)
            )
        ),
        "problems": verify(options.export) + verify(sharded),
        "sharded": {
            "equal": bool(
                (by_rows.serve(tf.constant(ids)) == loaded.serve(tf.constant(ids))).numpy().all()
            ),
            "files": sorted(path.name for path in (sharded / "assets").iterdir()),
            "shapes": [variable.shape.as_list() for variable in by_rows.variables],
            "refused": refused(str(sharded.with_suffix(".refused"))),
        },
    }
_result.write(
    {
        "exported": exported,
        "whole": whole,
        "whole_alone": whole_alone,
        "servers": [p.server for p in server_variables.shards(model.layers[0].embeddings)],
        "began_at": began_at[0],
        "iterations": int(model.optimizer.iterations.numpy()),
        "off_by": max(
            float(np.abs(v.numpy() - w.numpy()).max())
            for v, w in zip(
                model.weights + model.optimizer.variables,
                alone.weights + alone.optimizer.variables,
                strict=True,
            )
        ),
    }
)
