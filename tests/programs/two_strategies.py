"""Trains two models on two virtual devices, each with a strategy of its own."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

import tfmw
from tests.programs import _result

(cpu,) = tf.config.list_physical_devices("CPU")
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)

x = np.ones([8, 4], np.float32)
losses = []
for metrics in ([], ["mae", "mape"]):  # so that they sum arrays of other shapes
    model = keras.Sequential([keras.Input([4]), keras.layers.Dense(2 + len(metrics))])
    model.compile("sgd", "mse", metrics=metrics)
    history = tfmw.fit(
        model,
        x,
        x[:, : 2 + len(metrics)],
        verbose=0,
        strategy=tfmw.strategies.mirrored(["CPU:0", "CPU:1"]),
    )
    losses += history.history["loss"]
_result.write({"losses": losses})
