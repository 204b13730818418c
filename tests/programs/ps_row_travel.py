"""How rows travel: fetched ahead, and as bfloat16; each beside the same arithmetic in NumPy."""

from typing import Any

import keras
import ml_dtypes
import numpy as np
import tensorflow as tf

import tfmw
from tests.programs import _result

ROWS, WIDTH, BATCH, STEPS, TURN, RATE = 4000, 8, 32, 20, 10, 3.0
tfmw.init()
rng = np.random.default_rng(0)
ids = rng.integers(0, 40, (STEPS, BATCH)) * 97 % ROWS  # the next batch has rows of this one
labels = rng.normal(size=(STEPS, BATCH, WIDTH)).astype(np.float32)


def rounded(values):
    return values.astype(ml_dtypes.bfloat16).astype(np.float32)


def expected(table, prefetch, send):
    """SGD; the rows of a batch are those before the last update where they were fetched ahead."""
    table = table.copy()
    before = table.copy()
    for step in range(STEPS):
        is_ahead = prefetch and step % TURN
        rows = send((before if is_ahead else table)[ids[step]])
        before = table.copy()
        grads = 2 * (rows - labels[step]) / (BATCH * WIDTH)
        summed = np.zeros_like(table)
        np.add.at(summed, ids[step], grads)
        table -= RATE * send(summed)
    return table


results: dict[str, Any] = {}
CASES: list[tuple[str, dict[str, Any], Any]] = [
    ("plain", {}, lambda rows: rows),
    ("ahead", {"prefetch_rows": 1}, lambda rows: rows),
    ("bf16", {"row_compression": "bf16"}, rounded),
]
for name, settings, send in CASES:
    strategy = tfmw.strategies.parameter_server(min_shard_bytes=ROWS * WIDTH, **settings)
    inputs = keras.Input((), dtype="int64")
    embedding = keras.layers.Embedding(ROWS, WIDTH, keras.initializers.RandomNormal(seed=1))
    model = keras.Model(inputs, embedding(inputs))
    # RATE in each step, by a condition: servers have one thread, which must not wait for another.
    rate = keras.optimizers.schedules.CosineDecay(
        RATE, 100, alpha=1.0, warmup_target=RATE, warmup_steps=5
    )
    model.compile(keras.optimizers.SGD(rate), "mse", steps_per_execution=STEPS)
    first = embedding.embeddings.numpy()
    data = tf.data.Dataset.from_tensor_slices((ids, labels))
    tfmw.fit(model, data, steps_per_epoch=STEPS, verbose=0, strategy=strategy, shuffle=False)
    trained = embedding.embeddings.numpy()
    others = {
        "off_by": expected(first, bool(settings.get("prefetch_rows")), send),
        "off_by_plain": expected(first, False, lambda rows: rows),
    }
    results[name] = {key: float(np.abs(trained - value).max()) for key, value in others.items()}


def refusal(**settings):
    try:
        tfmw.strategies.parameter_server(**settings)
    except tfmw.UsageError as e:
        return str(e)
    return None


results["refused"] = [
    refusal(prefetch_rows=2),
    refusal(row_compression="fp16"),
    refusal(prefetch_rows=1, sync_replicas=True),
]
_result.write(results)
