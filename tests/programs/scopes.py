"""Trains a model on strategies of a user's own, made in their scope and outside of it.

Beside each, with "stock", what Keras has without a strategy.
"""

from __future__ import annotations

import contextlib
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfmw
from tests.programs import _result

(cpu,) = tf.config.list_physical_devices("CPU")
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 3)

x: np.ndarray = np.random.default_rng(0).random((60, 3), np.float32)


class Batches(keras.callbacks.Callback):
    """Sets the learning rate before each batch, and keeps the logs after it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.model.optimizer.learning_rate.assign(0.01 * (batch + 1))

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen.append(float(logs["mae"]))


def trained(strategy: Any, scope: bool, every_batch: bool) -> dict[str, Any]:
    """Logs of epochs and batches, and weights."""
    keras.utils.set_random_seed(1)
    with strategy.scope() if scope else contextlib.nullcontext():
        model = keras.Sequential([keras.layers.Dense(4, activation="relu"), keras.layers.Dense(1)])
        model.build([None, 3])
        model.compile("adam", "mse", metrics=["mae", keras.metrics.MeanSquaredError()])
    batches = Batches()
    arguments: dict[str, Any] = {"batch_size": 12, "epochs": 2, "shuffle": False, "verbose": 0}
    arguments["callbacks"] = [batches] * every_batch
    if strategy is None:
        history = model.fit(x, x.sum(1), **arguments)
    else:
        history = tfmw.fit(model, x, x.sum(1), strategy=strategy, **arguments)
    weights = [weight.tolist() for weight in model.get_weights()]
    return {"epochs": history.history, "batches": batches.seen, "weights": weights}


strategies = {
    "stock": None,
    "one device": tfmw.strategies.mirrored(["CPU:0"]),
    "two devices": tfmw.strategies.mirrored(["CPU:0", "CPU:1"]),
    "three devices": tfmw.strategies.mirrored(["CPU:0", "CPU:1", "CPU:2"]),
    "OneDeviceStrategy": tf.distribute.OneDeviceStrategy("CPU:0"),
}
_result.write(
    {
        f"{name}, {scope}, {every_batch}": trained(strategy, scope, every_batch)
        for name, strategy in strategies.items()
        for scope in (False, True)
        for every_batch in (False, True)
        if not (strategy is None and scope)
    }
)
