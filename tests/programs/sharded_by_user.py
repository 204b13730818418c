"""Fit on a callable that shards its data, then on data that each worker has sharded itself."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfmw

cluster = tfmw.init()

from tests.programs import _result  # noqa: E402

steps = 0


class Steps(keras.callbacks.Callback):
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        global steps
        steps += 1


class Count(keras.metrics.Sum):
    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        return super().update_state(tf.ones_like(y_true))


model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
model.compile("sgd", "mse", metrics=[Count(name="count")])
x: Any = np.arange(10, dtype=np.float32).reshape(-1, 1)
pairs = tf.data.Dataset.from_tensor_slices((x, x / 10))


history = tfmw.fit(
    model,
    lambda c: pairs.shard(c.num_input_pipelines, c.input_pipeline_id).batch(2),
    verbose=0,
    callbacks=[Steps()],
)
_result.write({"examples": history.history["count"][0]})
steps = 0
rank, workers = cluster.index, cluster.num_workers
try:
    tfmw.fit(model, pairs.shard(workers, rank).batch(4), verbose=0, callbacks=[Steps()])
finally:
    print(f"{steps} steps", flush=True)
