"""Synchronous updates on parameter servers, with all workers or with spare ones.

ps_sync.py [--aggregate=2] [--steps=20] [--late_from=FILE]

With --late_from the last worker's first gradient comes when the others are ten steps further: FILE
tells. It alone has a feature that is zero everywhere else.
"""

import argparse

import keras
import numpy as np
import tensorflow as tf

import tfmw
from tests.programs import _result

parser = argparse.ArgumentParser()
parser.add_argument("--aggregate", type=int)
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--late_from", default="")
options = parser.parse_args()

cluster = tfmw.init()
strategy = tfmw.strategies.parameter_server(
    sync_replicas=True, replicas_to_aggregate=options.aggregate
)
rng = np.random.default_rng(0)
x = rng.normal(size=(64, 8)).astype(np.float32)
y = x[:, :3].argmax(axis=1).astype(np.int64)
workers = cluster.num_workers
LATE = 7  # the feature
if options.late_from:
    x[:, LATE] = 0.0


def make():
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [keras.Input((8,)), keras.layers.Dense(16, activation="tanh"), keras.layers.Dense(3)]
    )
    model.compile(
        keras.optimizers.Adam(0.01), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    return model


def read(context):
    """Each worker has a batch of its own, always the same; the last one's first comes late."""
    mine = slice(context.input_pipeline_id, None, workers)
    data = tf.data.Dataset.from_tensors((x[mine], y[mine])).repeat()
    if not options.late_from:
        return data
    if context.input_pipeline_id == 0:
        return data.enumerate().map(when_it_is_late)
    if context.input_pipeline_id == workers - 1:
        marked = x[mine].copy()
        marked[:, LATE] = 1.0
        late = tf.data.Dataset.from_tensors((marked, y[mine])).map(once_it_is_late)
        return late.concatenate(data)
    return data


def when_it_is_late(number, batch):
    """Another worker is at its tenth step: time for the late one to begin its first."""

    def say():
        with tf.control_dependencies([tf.io.write_file(options.late_from, "")]):
            return tf.constant(0)

    with tf.control_dependencies([tf.cond(number == 10, say, lambda: tf.constant(0))]):
        return tf.nest.map_structure(tf.identity, batch)


def once_it_is_late(*batch):
    def yet():
        return tf.size(tf.io.matching_files(options.late_from)) == 0

    (waited,) = tf.while_loop(lambda _: yet(), lambda _: (tf.constant(0),), [tf.constant(0)])
    with tf.control_dependencies([waited]):
        return tf.nest.map_structure(tf.identity, batch)


model, alone = make(), make()
history = tfmw.fit(
    model, read, epochs=2, steps_per_epoch=options.steps, verbose=0, strategy=strategy
)
whole = tf.data.Dataset.from_tensors((x, y)).repeat()
alone.fit(whole, epochs=2, steps_per_epoch=options.steps, verbose=0)
_result.write(
    {
        "loss": history.history["loss"],
        "late": float(np.abs(model.weights[0].numpy() - make().weights[0].numpy())[LATE].max()),
        "iterations": int(model.optimizer.iterations.numpy()),
        "dropped": sum(history.history["dropped_gradients"]),
        "off_by": max(
            float(np.abs(v.numpy() - w.numpy()).max())
            for v, w in zip(model.weights, alone.weights, strict=True)
        ),
        "moved": max(
            float(np.abs(v.numpy() - w.numpy()).max())
            for v, w in zip(model.weights, make().weights, strict=True)
        ),
    }
)
