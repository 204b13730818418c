"""Makes a step less in each call on the second task: as where its shard is too short by mistake."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfmw
from tfmw.mirrored.sync_driver import SyncDriver

cluster = tfmw.init()
train = SyncDriver.train


def train_less(self, iterator, max_steps, *sizes):
    return train(self, iterator, max(1, max_steps - 1), *sizes)


if cluster.index == 1:
    SyncDriver.train = train_less  # type: ignore[method-assign]
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile("sgd", "mse", steps_per_execution=8)
x: Any = np.ones((64, 4), "float32")
tfmw.fit(model, tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(4), verbose=0)
