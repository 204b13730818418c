"""One of two workers that train in step meets a batch that its pipeline refuses."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfmw

tfmw.init()
strategy = tfmw.strategies.parameter_server(sync_replicas=True)
x: Any = np.ones((64, 8), np.float32)
y: Any = np.zeros(64, np.int64)


def read(context):
    data = tf.data.Dataset.from_tensors((x, y)).repeat()
    if context.input_pipeline_id == 0:
        return data

    def refuse(a, b):
        with tf.control_dependencies([tf.debugging.Assert(tf.reduce_sum(a) < 0, ["bad batch"])]):
            return tf.identity(a), b

    return data.take(1).concatenate(data.map(refuse))


model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(3)])
model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
tfmw.fit(model, read, steps_per_epoch=10, verbose=0, strategy=strategy)
