"""Trains on parameter servers and records, on the workers' disk, what each step really saw.

ps_train.py --records=DIR [--steps=60] [--epochs=2]
"""

import argparse
import os
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfmw
from tests.programs import _result
from tests.programs._extremes import Extremes
from tfmw import strategies
from tfmw.compat import parameter_servers

parser = argparse.ArgumentParser()
parser.add_argument("--records", required=True)
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--epochs", type=int, default=2)
options = parser.parse_args()

cluster = tfmw.init()  # servers end here
assert cluster.task == "chief"
Path(options.records).mkdir(parents=True, exist_ok=True)


class Recorded(keras.Sequential):
    """Writes the labels and outputs of each training step to a file of their own."""

    recording = False
    calls: list[str]

    def fit(self, *args, **kwargs):
        self.calls = ["fit"]
        return super().fit(*args, **kwargs)

    def evaluate(self, *args, **kwargs):
        self.calls.append("evaluate")
        return super().evaluate(*args, **kwargs)

    @tf.function
    def train_step(self, data):
        self.recording = True
        logs = super().train_step(data)
        self.recording = False
        return logs

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        logs = super().compute_metrics(x, y, y_pred, sample_weight)
        if not self.recording:
            return logs
        when = tf.strings.as_string(tf.timestamp(), precision=9)
        name = tf.strings.join([when, "-", tf.strings.as_string(tf.reduce_sum(x), precision=9)])
        seen = tf.concat([tf.cast(y, tf.float32)[:, None], y_pred], axis=1)
        path = tf.strings.join([options.records, "/", name])
        tf.io.write_file(path, tf.io.serialize_tensor(seen))
        return logs


local_variable = parameter_servers.local_variable
local_variables: list[Any] = []


def recorded_variable(*arguments):
    local_variables.append(arguments)
    return local_variable(*arguments)


parameter_servers.local_variable = recorded_variable
rng = np.random.default_rng(0)
x = rng.normal(size=(1000, 20)).astype(np.float32)
y = x[:, :3].argmax(axis=1).astype(np.int64)
keras.utils.set_random_seed(1)
model = Recorded(
    [
        keras.Input((20,)),
        keras.layers.Dense(64, activation="relu"),
        keras.layers.BatchNormalization(),
        keras.layers.Dropout(0.1),
        keras.layers.Dense(3),
    ]
)
model.compile(
    keras.optimizers.Adam(0.01),
    keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy", Extremes()],
)
seed = model.layers[2].seed_generator.state
before = seed.numpy()
history = tfmw.fit(
    model,
    tf.data.Dataset.from_tensor_slices((x[:960], y[:960])).shuffle(1000).batch(48),
    epochs=options.epochs,
    steps_per_epoch=options.steps,
    validation_data=(x, y),
)
records = [
    tf.io.parse_tensor(f.read_bytes(), tf.float32).numpy() for f in Path(options.records).iterdir()
]
seen = np.concatenate(records)
losses = keras.losses.sparse_categorical_crossentropy(seen[:, 0], seen[:, 1:], from_logits=True)
evaluated = tfmw.evaluate(model, x, y, verbose=0, return_dict=True)
predicted = tfmw.predict(model, x, verbose=0)
norm = model.layers[1]


@tf.function(autograph=False)
def bytes_on_worker():
    """Bytes of all variables that steps have made in the process that runs this."""
    count = tf.constant(0, tf.int64)
    for name, shape, dtype, _ in local_variables:
        size = tf.TensorShape(shape).num_elements() * dtype.size
        variable = local_variable(name, shape, dtype, False)
        exists = tf.raw_ops.VarIsInitializedOp(resource=variable.handle)
        count += tf.where(exists, tf.constant(size, tf.int64), tf.constant(0, tf.int64))
    return count


class Scaled(keras.losses.Loss):
    """A loss with a state of its own."""

    def __init__(self, scale):
        super().__init__()
        self.scale = scale

    def call(self, y_true, y_pred):
        error = tf.reduce_mean((tf.cast(y_true, tf.float32) - y_pred) ** 2, axis=1)
        self.scale.assign(0.9 * self.scale + 0.1 * tf.reduce_mean(error))
        return error / self.scale


def refusal(scale):
    """The message of the tfmw.TfmwError for a step that assigns `scale`."""
    other = keras.Sequential([keras.Input((20,)), keras.layers.Dense(3)])
    other.compile("sgd", Scaled(scale))
    try:
        tfmw.fit(other, x, y[:, None], batch_size=48, steps_per_epoch=2, verbose=0)
    except tfmw.TfmwError as e:
        return str(e)


scales = [tf.Variable(1.0, name="scale"), keras.Variable(1.0, name="scale")]
servers = strategies.servers_of(strategies.choose("auto"))
assert servers is not None
coordinator = servers.coordinator
kept = [coordinator.schedule(bytes_on_worker).fetch() for _ in range(4)]  # both have their turn
_result.write(
    {
        "history": history.history,
        "own methods": model.calls,
        "iterations": int(model.optimizer.iterations.numpy()),
        "recorded_steps": len(records),
        "recorded_examples": len(seen),
        "recorded_accuracy": float((seen[:, 1:].argmax(axis=1) == seen[:, 0]).mean()),
        "recorded_extremes": [float(seen[:, 1:].max()), float(seen[:, 1:].min())],
        "recorded_sum": float(seen[:, 1:].sum()),
        "recorded_loss": float(np.mean(losses)),
        "batch_sizes": sorted({len(r) for r in records}),
        "evaluated": evaluated,
        "predicted_accuracy": float((predicted.argmax(axis=1) == y).mean()),
        "moving_variance": norm.moving_variance.numpy().tolist(),
        "draws": (seed.numpy() - before).tolist(),
        "devices": sorted({str(v.value.device) for v in model.variables}),
        "pid": os.getpid(),
        "refused": [refusal(scale) for scale in scales],
        "local_variables": len(local_variables),
        "bytes_kept_by_workers": [int(each) for each in kept],
    }
)
