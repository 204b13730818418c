"""A table divided over the servers: which rows each optimizer changes, and what they become.

ps_shards.py [--rows=20000] [--width=32]
"""

import argparse
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfmw
from tests.programs import _result

parser = argparse.ArgumentParser()
parser.add_argument("--rows", type=int, default=20000)
parser.add_argument("--width", type=int, default=32)
options = parser.parse_args()

tfmw.init()
strategy = tfmw.strategies.parameter_server(min_shard_bytes=options.rows * options.width)
rng = np.random.default_rng(0)
once = rng.permutation(options.rows)[: 256 * 3].reshape(256, 3)
twice = once.copy()
twice[:, 1] = twice[:, 0]  # rows that a batch names twice
y = (once[:, 0] % 2).astype(np.float32)


def make(optimizer):
    keras.utils.set_random_seed(1)
    inputs = keras.Input((3,), dtype="int64")
    rows = keras.layers.Embedding(options.rows, options.width, name="table")(inputs)
    hidden = keras.layers.Dense(8, activation="tanh", name="kernel")(keras.layers.Flatten()(rows))
    model = keras.Model(inputs, keras.layers.Dense(1)(hidden))
    model.compile(optimizer, keras.losses.BinaryCrossentropy(from_logits=True))
    return model


def dataset(ids):
    """The same batch for ever: one worker's steps are then those of one process."""
    return tf.data.Dataset.from_tensors((ids, y)).repeat()


results: dict[str, Any] = {}
# Where a batch names a row twice Keras squares its gradients one by one, instead of their sum: with
# duplicates its Adagrad and Adam are another algorithm.
for name, ids, make_optimizer in (
    ("SGD", twice, lambda: keras.optimizers.SGD(0.5)),
    ("Adagrad", once, lambda: keras.optimizers.Adagrad(0.1)),
    ("Adam", once, lambda: keras.optimizers.Adam(0.01)),
):
    used = np.unique(ids)
    model, alone = make(make_optimizer()), make(make_optimizer())
    before = model.get_layer("table").embeddings.numpy()
    tfmw.fit(model, dataset(ids), steps_per_epoch=5, verbose=0, strategy=strategy)
    keras.Model.fit.__wrapped__(alone, dataset(ids), steps_per_epoch=5, verbose=0)
    after = model.get_layer("table").embeddings.numpy()
    changed = np.flatnonzero((before != after).any(axis=1))
    results[name] = {
        "changed": len(changed),
        "only_used": bool(set(changed) <= set(used)),
        "used": len(used),
        "off_by": max(
            float(np.abs(v.numpy() - w.numpy()).max())
            for v, w in zip(model.weights, alone.weights, strict=True)
        ),
        "moved": float(np.abs(after - before).max()),
        "slots_off_by": max(
            float(np.abs(v.numpy() - w.numpy()).max())
            for v, w in zip(model.optimizer.variables, alone.optimizer.variables, strict=True)
        ),
    }

# Rows that a later batch leaves alone: Adam's moments of before must not move them.
model = make(keras.optimizers.Adam(0.01))
other = np.setdiff1d(np.arange(options.rows), once)[: 256 * 3].reshape(256, 3)
tfmw.fit(model, dataset(once), steps_per_epoch=5, verbose=0, strategy=strategy)
before = model.get_layer("table").embeddings.numpy()
tfmw.fit(model, dataset(other), steps_per_epoch=5, verbose=0, strategy=strategy)
after = model.get_layer("table").embeddings.numpy()
results["lazy"] = sorted(np.flatnonzero((before != after).any(axis=1))) == sorted(other.ravel())


class Changes(keras.callbacks.Callback):
    """Sets weights and the learning rate on the coordinator, where callbacks run."""

    def on_train_begin(self, logs=None):
        self.model.layers[-1].bias.assign([7.0])

    def on_epoch_begin(self, epoch, logs=None):
        self.model.optimizer.learning_rate = [0.0, 0.5][epoch]

    def on_epoch_end(self, epoch, logs=None):
        results["callbacks"].append(float(self.model.layers[-1].bias.numpy()[0]))


results["callbacks"] = []
model = make(keras.optimizers.SGD(0.5))
tfmw.fit(
    model,
    dataset(once),
    epochs=2,
    steps_per_epoch=5,
    verbose=0,
    strategy=strategy,
    callbacks=[Changes()],
)
from tfmw.parameter_server.driver import PsDriver  # noqa: E402
from tfmw.parameter_server.variables import ServerVariables  # noqa: E402

servers = tfmw.strategies.servers_of(strategy)
assert servers is not None
server_variables = ServerVariables(model, len(servers.cluster.ps), servers.settings.partition)
table = model.get_layer("table").embeddings
results["pieces"] = [[p.server, p.start, p.stop] for p in server_variables.shards(table)]

# Tickets that a lost worker took and did not use: none is made up for beyond the limit.
driver = PsDriver(model, servers, tfmw.data.Source(dataset(once)))
limit = tf.constant(3, tf.int64)
made = [int(driver._schedule(steps, limit).fetch()["steps"]) for steps in (2, 5, 5)]
results["limited"] = [made, int(driver.server_variables.applied.numpy())]
_result.write(results)
