"""Ids that take rows on parameter servers while several workers train at their own pace.

ps_hash_tables_async.py [--result=FILE]
"""

import json
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfmw
from tests.programs import _result

tfmw.init()
STEPS, BATCH, OFTEN, BOUND = 60, 4096, 40, 400_000
strategy = tfmw.strategies.parameter_server(min_shard_bytes=64, row_compression="bf16")


def batches(context: tf.distribute.InputContext) -> tf.data.Dataset:
    """Half of each batch are the ids that come often; the other half are new, on both workers."""
    worker = context.input_pipeline_id

    def batch(number: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        often = tf.random.stateless_uniform([BATCH // 2], [worker, number], 0, OFTEN, tf.int64)
        first = OFTEN + number * (BATCH // 2)
        ids = tf.concat([often, first + tf.range(BATCH // 2, dtype=tf.int64)], axis=0)
        return ids, tf.cast(ids % 2, tf.float32)[:, None]

    return tf.data.Dataset.range(1000).map(batch).repeat()


table = tfmw.layers.HashTableEmbedding(4, max_bytes=BOUND, min_count=1, name="table")
other = tfmw.layers.HashTableEmbedding(4, max_bytes=BOUND, min_count=3, name="other")
inputs = keras.Input((), dtype="int64")
model = keras.Model(inputs, keras.layers.Dense(1)(table(inputs) + other(inputs)))
model.compile(keras.optimizers.Adagrad(0.5), keras.losses.BinaryCrossentropy(from_logits=True))
say = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, _: print(f"epoch {epoch} ends"))
how: dict[str, Any] = {"epochs": 4, "steps_per_epoch": STEPS, "verbose": 0, "callbacks": [say]}
history = tfmw.fit(model, batches, strategy=strategy, **how)

found = {"loss": history.history["loss"], "bound": BOUND, "steps": 4 * STEPS}
for layer in (table, other):
    used, ids = layer.used.numpy(), layer.ids.numpy()
    known = layer.known_ids()
    found[layer.name] = {
        "steps": int(layer.step.numpy()),
        "last_used": int(used.max()),
        "shards": sorted({shard.server for shard in layer.embeddings._value.shards}),
        "bytes": sum(
            v.shape.num_elements() * v.dtype.size for v in (w._value for w in layer.weights)
        ),
        "places": len(ids),
        "known": len(known),
        "distinct": len(np.unique(ids[used > 0])),
        "rows": layer.rows_of(tf.constant(known)).numpy().tolist(),
        "often": layer.rows_of(tf.range(OFTEN, dtype=tf.int64)).numpy().tolist(),
    }
if len(sys.argv) > 1:
    Path(sys.argv[1].removeprefix("--result=")).write_text(json.dumps(found))
else:
    _result.write(found)
