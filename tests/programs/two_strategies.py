"""Trains two models on two virtual devices, each call by a strategy of its own."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfmw
from tests.programs import _result

(cpu,) = tf.config.list_physical_devices("CPU")
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)

x: np.ndarray = np.ones([8, 4], np.float32)


def compiled(width: int, metrics: list[str]) -> keras.Model:
    model = keras.Sequential([keras.Input([4]), keras.layers.Dense(width)])
    model.compile("sgd", "mse", metrics=metrics)
    return model


def loss(model: keras.Model, strategy: Any) -> float:
    y = x[:, : model.output_shape[-1]]
    return float(tfmw.fit(model, x, y, verbose=0, strategy=strategy).history["loss"][0])


# They sum arrays of different shapes.
models = [compiled(2, []), compiled(4, ["mae", "mape"])]
losses = [loss(model, tfmw.strategies.mirrored(["CPU:0", "CPU:1"])) for model in models]
losses += [loss(model, "mirrored") for model in models]
_result.write({"losses": losses})
