"""Variables that Keras does not track, on two virtual devices: replica_variables.py"""

import json
import random
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfmw
from tests.matrix.columns import virtual_devices
from tfmw.compat import models

virtual_devices(2)
strategy = tfmw.strategies.mirrored(["CPU:0", "CPU:1"])
x: Any = np.ones([8, 2], "float32")
y: Any = np.ones([8, 1], "float32")


class Noise(keras.layers.Layer):
    def call(self, x):
        return 0 * x + keras.random.uniform([1])


class Counts(keras.Model):
    """Assigns a tf.Variable, deep in an attribute, in each step or by a callback."""

    def __init__(self, in_step):
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.counts = [{"steps": tf.Variable(0.0)}]
        self.in_step = in_step

    def call(self, x):
        return self.dense(x) + self.counts[0]["steps"]

    def train_step(self, data):
        if self.in_step:
            self.counts[0]["steps"].assign_add(1.0)
        return super().train_step(data)


class OwnOptimizer(keras.Model):
    """Compiled without an optimizer, as a GAN."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.own = keras.optimizers.Adam()

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x))
        self.own.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return self.compute_metrics(x, y, self(x))


def draws(predict):
    """(predictions, Python's next number) of a model that draws without a seed."""
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input([2]), Noise()])
    keras.utils.set_random_seed(4)
    found = np.concatenate([predict(model), predict(model)])[:, 0].tolist()
    return found, random.random()


ours, python = draws(lambda m: tfmw.predict(m, x, batch_size=4, verbose=0, strategy=strategy))
theirs, expected = draws(lambda m: m.predict(x, batch_size=4, verbose=0))

counting = Counts(in_step=True)
counting.compile("sgd", "mse")
try:
    tfmw.fit(counting, x, y, verbose=0, strategy=strategy)
    refused = ""
except tfmw.UsageError as e:
    refused = str(e)
counted = Counts(in_step=False)
counted.compile("sgd", "mse")
count = keras.callbacks.LambdaCallback(
    on_epoch_end=lambda epoch, logs: counted.counts[0]["steps"].assign_add(1.0)
)
tfmw.fit(counted, x, y, epochs=2, verbose=0, strategy=strategy, callbacks=[count])

gan = OwnOptimizer()
gan.compile(loss="mse", metrics=["mae"])
rates = keras.callbacks.LearningRateScheduler(lambda epoch: 0.1 / (epoch + 1))
for _ in range(2):
    tfmw.fit(gan, x, y, epochs=2, verbose=0, strategy=strategy, callbacks=[rates])
tfmw.evaluate(gan, x, y, verbose=0, strategy=strategy)

print(
    json.dumps(
        {
            "draws": ours,
            "draws of Keras": theirs,
            "python": python,
            "python of Keras": expected,
            "refused": refused,
            "counted": float(counted.counts[0]["steps"].numpy()),
            "default optimizer": len(gan.optimizer.variables),
            "own optimizer": int(gan.own.iterations.numpy()),
            "needs build": models.needs_build(gan),
        }
    )
)
