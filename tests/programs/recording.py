"""A model that records which examples it is trained on, epoch by epoch.

An example is a number of its own, recorded inside of the traced `train_step` by each replica. A
replica without an example steps on a copy of one, which does not count.
"""

from typing import Any

import keras
import tensorflow as tf

from tfmw.compat import losses

seen: list[list[int]] = [[]]


class Recorder(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.head = keras.layers.Dense(1)

    def call(self, x: Any) -> Any:
        return self.head(tf.cast(x, tf.float32)[:, None])

    def train_step(self, data: Any) -> Any:
        x, y = data
        weight = losses.current_weight()
        mine = x if weight is None else x[: weight.examples]
        tf.py_function(lambda v: seen[-1].extend(v.numpy().tolist()), [mine], [])
        return super().train_step((x, tf.cast(y, tf.float32)))


class NewEpoch(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        seen.append([])
