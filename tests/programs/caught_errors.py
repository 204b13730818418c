"""Calls fail, and the program catches the errors: caught_errors.py COLLECTIVES HOW BACKUPS.

HOW: alike, on all tasks; apart, on one; servers, on the coordinator of parameter servers.
"""

import os
import sys
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfmw
from tests.programs._result import write
from tfmw.cluster import group

collectives, how, backups = sys.argv[1:]
cluster = tfmw.init(collectives=collectives)
if how == "alike":
    group._ALIKE_S = 60.0  # a busy machine may run one task long after the other
x: Any = np.arange(24.0, dtype="float32").reshape(12, 2) / 24
y: Any = x.sum(axis=1, keepdims=True)


def model(*layers):
    made = keras.Sequential([*layers, keras.layers.Dense(1, kernel_initializer="zeros")])
    made.compile("sgd", "mse")
    return made


def fit(of=None, **arguments) -> list[float]:
    common = {"x": x, "y": y, "batch_size": 4, "shuffle": False, "verbose": 0}
    if how == "servers":
        common["steps_per_epoch"] = 3
    losses: list[float] = tfmw.fit(of or model(), **(common | arguments)).history["loss"]
    return losses


raises = True


class RaisesInStepTwo(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if raises and batch == 1 and (how != "apart" or not cluster.is_chief):
            raise LookupError(f"from a callback: {os.fsdecode(b'caf' + bytes([0xE9]))}")


class CannotBeBuilt(keras.layers.Layer):
    def build(self, input_shape):
        raise ValueError("from build")


class Positive(keras.layers.Layer):
    def call(self, inputs):
        with tf.control_dependencies([tf.debugging.assert_greater(tf.reduce_min(inputs), 1e9)]):
            return tf.identity(inputs)


def differs() -> keras.Model:
    """A model with another dropout rate on each task."""
    return model(keras.layers.Dropout(0.1 * (1 + cluster.index)))


WRONG = {
    "compile": lambda: fit(keras.Sequential([keras.layers.Dense(1)])),
    "arguments": lambda: fit(class_weight={0: 1.0}, sample_weight=np.ones(12)),
    "build": lambda: fit(model(CannotBeBuilt())),
    "step": lambda: fit(model(Positive())),
    "callback": lambda: fit(callbacks=[RaisesInStepTwo()], backup_dir=backups, backup_every=1),
    "evaluate": lambda: tfmw.evaluate(model(CannotBeBuilt()), x, y, verbose=0),
    "batch": lambda: tfmw.train_on_batch(model(CannotBeBuilt()), x, y),
    "settings": lambda: fit(differs()),
    "class weights": lambda: fit(class_weight={0: 1.0 + cluster.index}),
    "shuffle": lambda: fit(shuffle=bool(cluster.index)),
    "validation": lambda: fit(validation_data=(x, y) if cluster.index else None),
    "steps of evaluate": lambda: tfmw.evaluate(model(), x, y, steps=1 + cluster.index),
    "batches of predict": lambda: tfmw.predict(model(), x, batch_size=4 + 4 * cluster.index),
    "settings of a batch": lambda: tfmw.train_on_batch(differs(), x, y),
}
first = fit()
caught: dict[str, str] = {}
messages: dict[str, str] = {}
then: dict[str, Any] = {}
BY_KIND = {"alike": WRONG, "apart": ["callback"], "servers": ["compile", "build", "callback"]}
for name in BY_KIND[how]:
    try:
        WRONG[name]()
    except Exception as error:
        caught[name] = type(error).__name__
        messages[name] = str(error)
    try:
        then[name] = fit()
    except Exception as error:
        then[name] = f"{type(error).__name__}: {error}"
if how != "apart":
    raises = False
    then["resumed"] = fit(callbacks=[RaisesInStepTwo()], backup_dir=backups, backup_every=1)
write({"first": first, "caught": caught, "messages": messages, "then": then})
