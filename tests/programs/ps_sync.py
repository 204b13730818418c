"""Synchronous updates on parameter servers, with all workers or with spare ones.

ps_sync.py [--aggregate=2] [--steps=20]
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
options = parser.parse_args()

cluster = tfmw.init()
strategy = tfmw.strategies.parameter_server(
    sync_replicas=True, replicas_to_aggregate=options.aggregate
)
rng = np.random.default_rng(0)
x = rng.normal(size=(64, 8)).astype(np.float32)
y = x[:, :3].argmax(axis=1).astype(np.int64)
workers = cluster.num_workers


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
    """Each worker has a batch of its own, always the same; the last one is slow."""
    mine = slice(context.input_pipeline_id, None, workers)
    data = tf.data.Dataset.from_tensors((x[mine], y[mine])).repeat()
    if context.input_pipeline_id == workers - 1 and options.aggregate:
        # A straggler: much to compute for each batch.
        data = data.map(
            lambda a, b: (
                a
                + 0 * tf.reduce_sum(tf.linalg.svd(tf.random.normal([300, 300]), compute_uv=False)),
                b,
            )
        )
    return data


model, alone = make(), make()
history = tfmw.fit(
    model, read, epochs=2, steps_per_epoch=options.steps, verbose=0, strategy=strategy
)
whole = tf.data.Dataset.from_tensors((x, y)).repeat()
alone.fit(whole, epochs=2, steps_per_epoch=options.steps, verbose=0)
_result.write(
    {
        "loss": history.history["loss"],
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
