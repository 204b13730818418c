"""A table divided over the servers: which rows each optimizer changes, and what they become.

ps_shards.py [--rows=20000] [--width=32] [--optimizers=SGD,Adagrad] [--only_optimizers]
"""

import argparse
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfmw
from tests.programs import _of_keras, _result
from tfmw.tables.table import refuse_tables

parser = argparse.ArgumentParser()
parser.add_argument("--rows", type=int, default=20000)
parser.add_argument("--width", type=int, default=32)
parser.add_argument("--optimizers", default="SGD,AdamW")
parser.add_argument("--only_optimizers", action="store_true")
options = parser.parse_args()

if options.only_optimizers:
    # Grappler's rewrites of a graph depend on what is around an op, and round otherwise.
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
tfmw.init()
rng = np.random.default_rng(0)
once = rng.permutation(options.rows)[: 256 * 3].reshape(256, 3)
twice = once.copy()
twice[:, 1] = twice[:, 0]  # rows that a batch names twice
y = (once[:, 0] % 2).astype(np.float32)


def make(optimizer, dtype=None):
    keras.utils.set_random_seed(1)
    inputs = keras.Input((3,), dtype="int64")
    rows = keras.layers.Embedding(options.rows, options.width, name="table", dtype=dtype)(inputs)
    hidden = keras.layers.Dense(8, activation="tanh", name="kernel")(keras.layers.Flatten()(rows))
    model = keras.Model(inputs, keras.layers.Dense(1)(hidden))
    model.compile(optimizer, keras.losses.BinaryCrossentropy(from_logits=True))
    return model


def dataset(ids):
    """The same batch for ever: one worker's steps are then those of one process."""
    return tf.data.Dataset.from_tensors((ids, y)).repeat()


of = keras.optimizers
# Where a batch names a row twice Keras squares its gradients one by one, instead of their sum: with
# duplicates all but SGD are another algorithm. Keras's weight decay and Ftrl move rows that no
# batch has: those of these are compared that batches have.
OPTIMIZERS: dict[str, tuple[Any, Any]] = {
    "SGD": (twice, lambda: of.SGD(0.5)),
    "Adagrad": (once, lambda: of.Adagrad(0.1)),
    "Adam": (once, lambda: of.Adam(0.01)),
    "momentum": (once, lambda: of.SGD(0.5, momentum=0.9, nesterov=True)),
    "AdamW": (once, lambda: of.AdamW(0.01, weight_decay=0.1)),
    "RMSprop": (once, lambda: of.RMSprop(0.01, momentum=0.5, centered=True)),
    "Ftrl": (once, lambda: of.Ftrl(0.1, l1_regularization_strength=1e-3)),
    "Lion": (once, lambda: of.Lion(0.001)),
    "amsgrad": (once, lambda: of.Adam(0.01, amsgrad=True, clipnorm=0.5)),
    # In bfloat16 0.999 is 1, with which Keras's Adam moves nothing.
    "bfloat16": (once, lambda: of.SGD(0.5, momentum=0.9)),
    "float16": (once, lambda: of.Adam(0.01)),
}
DTYPES = {"bfloat16": "bfloat16", "float16": "float16"}  # of the table; others are float32
chosen = {name: OPTIMIZERS[name] for name in options.optimizers.split(",")}
# Models that are made before the servers are known are ordinary ones.
ordinary = {name: make(optimizer(), DTYPES.get(name)) for name, (_, optimizer) in chosen.items()}
strategy = tfmw.strategies.parameter_server(
    min_shard_bytes=options.rows * options.width, max_whole_bytes=options.rows * options.width * 4
)


def off_by(ours, others, rows=None):
    """The largest difference between variables; of tables in these rows."""
    largest = 0.0
    for v, w in zip(ours, others, strict=True):
        a, b = (np.asarray(tf.cast(each, tf.float32)) for each in (v, w))
        if rows is not None and a.shape[:1] == (options.rows,):
            a, b = a[rows], b[rows]
        largest = max(largest, float(np.abs(a - b).max()))
    return largest


results: dict[str, Any] = {}
trained: dict[str, keras.Model] = {}
for name, (ids, make_optimizer) in chosen.items():
    used = np.unique(ids)
    model, alone = make(make_optimizer(), DTYPES.get(name)), ordinary[name]
    trained[name] = model
    before = model.get_layer("table").embeddings.numpy()
    begun = bool((before == alone.get_layer("table").embeddings.numpy()).all())
    tfmw.fit(model, dataset(ids), steps_per_epoch=5, verbose=0, strategy=strategy)
    _of_keras.fit(alone, dataset(ids), steps_per_epoch=5, verbose=0)
    after = model.get_layer("table").embeddings.numpy()
    changed = np.flatnonzero((before != after).any(axis=1))
    results[name] = {
        "equal_at_first": begun,
        "changed": len(changed),
        "only_used": bool(set(changed) <= set(used)),
        "used": len(used),
        "off_by": off_by(model.weights, alone.weights, used),
        "moved": float(np.abs(after - before).max()),
        "slots_off_by": off_by(model.optimizer.variables, alone.optimizer.variables, used),
    }

# The last model, on the coordinator: its lookups fetch rows.
results["coordinator"] = {
    "evaluated": tfmw.evaluate(model, dataset(ids).take(2), verbose=0),
    "evaluated_alone": _of_keras.evaluate(alone, dataset(ids).take(2), verbose=0),
    "predicted_off_by": float(
        np.abs(tfmw.predict(model, ids, verbose=0) - _of_keras.predict(alone, ids, verbose=0)).max()
    ),
}

if options.only_optimizers:
    _result.write(results)
    raise SystemExit(0)


def refusal(call):
    """The message of the tfmw.TfmwError that a call raises."""
    try:
        call()
    except tfmw.TfmwError as e:
        return str(e)
    return None


class TiedSoftmax(keras.layers.Layer):
    """Scores every row of an embedding."""

    def __init__(self, embedding):
        super().__init__()
        self.embedding = embedding

    def call(self, x):
        return keras.ops.matmul(x, keras.ops.transpose(self.embedding.embeddings))


# Operations that a table refuses, as it has no rows in this process.
inputs = keras.Input((), dtype="int64")
large = keras.layers.Embedding(2 * options.rows, options.width, name="large")
model = keras.Model(inputs, large(inputs))
results["handle"] = {
    "repr": repr(large.embeddings),
    "numpy": refusal(large.embeddings.numpy),
    "assign": refusal(lambda: large.embeddings.assign(np.zeros(large.embeddings.shape))),
    "softmax": refusal(lambda: TiedSoftmax(large)(model.output)),
    "softmax_called": refusal(lambda: TiedSoftmax(large)(large(np.arange(2)))),
    # As tfmw.fit(strategy="default"), whose error would end the servers as well.
    "default": refusal(lambda: refuse_tables(model.variables)),
    "add": refusal(lambda: large.embeddings._value.assign_add(1.0)),
    "looked_up": large(np.array([[0, -1], [5, 2 * options.rows - 1]])).numpy().tolist(),
    "gathered": tf.gather(large.embeddings, [5, 0]).numpy().tolist(),
}

# Rows that a later batch leaves alone: neither AdamW's moments of before nor its decay move them.
model = trained["AdamW"]
other = np.setdiff1d(np.arange(options.rows), once)[: 256 * 3].reshape(256, 3)
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
from tfmw.train.parameter_server.coordinator import PsDriver  # noqa: E402
from tfmw.train.parameter_server.variables import ServerVariables  # noqa: E402

servers = tfmw.strategies.servers_of(strategy)
assert servers is not None
server_variables = ServerVariables(model, len(servers.cluster.ps), servers.settings.partition)
table = model.get_layer("table").embeddings
results["pieces"] = [[p.server, p.start, p.stop] for p in server_variables.shards(table)]

# Tickets that a lost worker took and did not use: none is made up for beyond the limit.
driver = PsDriver(model, servers, tfmw.data.Source(dataset(once)))
counts = [tf.constant(steps, tf.int64) for steps in (2, 5, 5)]
made = [int(driver._schedule(steps, 3).fetch()["steps"]) for steps in counts]
results["limited"] = [made, int(driver.server_variables.applied.numpy())]
_result.write(results)
