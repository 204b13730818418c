"""Trains a divided table with backups, and prints a checksum of all values in the end.

ps_tables.py --backup=DIR [--epochs=4] [--pause=2] [--killed_in_write=4] [--result=FILE]

After epoch --pause it waits for a line on its standard input. In the backup --killed_in_write of a
process, the coordinator kills itself once the servers have written their parts.
"""

import argparse
import hashlib
import itertools
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfmw

parser = argparse.ArgumentParser()
parser.add_argument("--backup", required=True)
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--pause", type=int, default=0)
parser.add_argument("--killed_in_write", type=int, default=0)
parser.add_argument("--result")
options = parser.parse_args()

tfmw.init()
strategy = tfmw.strategies.parameter_server(min_shard_bytes=1 << 11)
ids = np.random.default_rng(0).permutation(5000)[:256]
y = (ids % 2).astype(np.float32)
keras.utils.set_random_seed(1)
inputs = keras.Input((), dtype="int64")
rows = keras.layers.Embedding(5000, 32, name="table")(inputs)
# A batch has these ids several times each: they get rows between the first step and the last.
hash_table = tfmw.layers.HashTableEmbedding(32, capacity=64, min_count=34, name="hash_table")
model = keras.Model(inputs, keras.layers.Dense(1)(rows + hash_table(inputs % 101)))
model.compile(keras.optimizers.Adam(0.01), keras.losses.BinaryCrossentropy(from_logits=True))


merge = tf.raw_ops.MergeV2Checkpoints
writes = itertools.count(1)


def merge_or_die(**arguments: Any) -> Any:
    if next(writes) == options.killed_in_write:
        os.kill(os.getpid(), signal.SIGKILL)
    return merge(**arguments)


tf.raw_ops.MergeV2Checkpoints = merge_or_die


def checksum() -> str:
    digest = hashlib.sha256()
    for variable in [*model.weights, *model.optimizer.variables]:
        digest.update(np.ascontiguousarray(variable.numpy()).tobytes())
    return digest.hexdigest()


class Say(keras.callbacks.Callback):
    def on_train_begin(self, logs=None):
        print(f"training begins at {int(self.model.optimizer.iterations)}", flush=True)

    def on_epoch_end(self, epoch, logs=None):
        print(f"epoch {epoch + 1} ends", flush=True)
        if epoch + 1 == options.pause:
            sys.stdin.readline()


dataset = tf.data.Dataset.from_tensors((ids, y)).repeat()
tfmw.fit(
    model,
    dataset,
    epochs=options.epochs,
    steps_per_epoch=5,
    verbose=0,
    strategy=strategy,
    callbacks=[Say(), tfmw.callbacks.BackupAndRestore(options.backup, delete_checkpoint=False)],
)
table = model.get_layer("table").embeddings
result = {
    "checksum": checksum(),
    "iterations": int(model.optimizer.iterations.numpy()),
    "held": type(table._value).__name__,
    "known": hash_table.known_ids().tolist(),
    "rows": hash_table.rows_of(np.arange(101)).numpy().tolist(),
    "evaluated": tfmw.evaluate(model, dataset.take(1), verbose=0),
}
print(f"result {json.dumps(result)}", flush=True)
if options.result:
    Path(options.result).write_text(json.dumps(result))
