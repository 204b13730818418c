"""Rows that are fetched ahead, or sent as bfloat16, compared with the same arithmetic in NumPy.

Also counts the messages of a step, with variables of other layers, and the traces of a step.
"""

import re
from collections import Counter
from typing import Any
from unittest import mock

import keras
import ml_dtypes
import numpy as np
import tensorflow as tf

import tfmw
from tests.programs import _result
from tfmw.train.parameter_server.steps import WorkerSteps

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


class Drawn(keras.layers.Embedding):
    """Looks up the same rows, but nobody knows before: 0 is drawn and added."""

    def call(self, inputs):
        return super().call(inputs + tf.random.uniform([BATCH], 0, 1, tf.int64))


class Counted(keras.Model):
    """Counts traces of its step, and has the number of updates before each as a metric."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.traces = 0
        self.updates = keras.metrics.Mean(name="updates")

    def train_step(self, data):
        self.traces += 1
        self.updates.update_state(self.optimizer.iterations)
        return super().train_step(data)


results: dict[str, Any] = {}
CASES: list[tuple[str, dict[str, Any], Any]] = [
    ("drawn", {}, lambda rows: rows),
    ("plain", {}, lambda rows: rows),
    ("ahead", {"prefetch_rows": 1}, lambda rows: rows),
    ("bf16", {"row_compression": "bf16"}, rounded),
]
for name, settings, send in CASES:
    strategy = tfmw.strategies.parameter_server(min_shard_bytes=ROWS * WIDTH, **settings)
    inputs = keras.Input((), dtype="int64")
    layer = Drawn if name == "drawn" else keras.layers.Embedding
    embedding = layer(ROWS, WIDTH, keras.initializers.RandomNormal(seed=1))
    model = Counted(inputs, embedding(inputs))
    # RATE in each step, by a condition: servers have one thread, which must not wait for another.
    rate = keras.optimizers.schedules.CosineDecay(
        RATE, 100, alpha=1.0, warmup_target=RATE, warmup_steps=5
    )
    model.compile(keras.optimizers.SGD(rate), "mse", steps_per_execution=STEPS)
    first = embedding.embeddings.numpy()
    data = tf.data.Dataset.from_tensor_slices((ids, labels))
    history = tfmw.fit(
        model, data, steps_per_epoch=STEPS, verbose=0, strategy=strategy, shuffle=False
    )
    trained = embedding.embeddings.numpy()
    others = {
        "off_by": expected(first, bool(settings.get("prefetch_rows")), send),
        "off_by_plain": expected(first, False, lambda rows: rows),
    }
    results[name] = {key: float(np.abs(trained - value).max()) for key, value in others.items()}
    results[name] |= {"traces": model.traces, "updates": history.history["updates"]}


def messages_of(graph):
    """Tensors sent between tasks in the loop of traced steps, by (from, to)."""
    parts = graph.as_graph_def()
    loops = {node.attr["body"].func.name for node in parts.node if "While" in node.op}
    bodies = [f for f in parts.library.function if f.signature.name in loops]
    nodes = {node.name: node for node in max(bodies, key=lambda body: len(body.node_def)).node_def}

    def task(name):
        found = re.search("job:ps.*task:(.)", nodes[name].device)
        return f"server {found[1]}" if found else "worker"

    crossing = set()
    for name, node in nodes.items():
        for tensor in node.input:
            source = tensor.split(":")[0]  # those with "^" are no tensors, and no names of nodes
            if source in nodes and task(source) != task(name):
                crossing.add((task(source), task(name), tensor))
    return {f"{a} to {b}": n for (a, b), n in Counter((a, b) for a, b, _ in crossing).items()}


graphs: list[Any] = []
many = WorkerSteps._many


def recorded(*arguments):
    graphs.append(tf.compat.v1.get_default_graph())
    return many(*arguments)


strategy = tfmw.strategies.parameter_server(min_shard_bytes=ROWS * WIDTH)
inputs = keras.Input((2,), dtype="int64")
found = [keras.layers.Embedding(ROWS, WIDTH)(inputs[:, number]) for number in range(2)]
tables = [keras.layers.Reshape((WIDTH,))(rows) for rows in found]  # calls the last one first
hidden = keras.layers.BatchNormalization()(keras.layers.Dense(WIDTH)(keras.ops.add(*tables)))
model = keras.Model(inputs, keras.layers.Dense(WIDTH)(hidden))
model.compile(keras.optimizers.Adagrad(0.1), "mse", steps_per_execution=STEPS)
data = tf.data.Dataset.from_tensor_slices((np.stack([ids, ids[::-1]], axis=-1), labels))
with mock.patch.object(WorkerSteps, "_many", recorded):
    tfmw.fit(model, data, steps_per_epoch=STEPS, verbose=0, strategy=strategy, shuffle=False)
results["messages"] = messages_of(graphs[0])
functions = graphs[0].as_graph_def().library.function
results["distinct"] = [n.op for f in functions for n in f.node_def if n.op.startswith("Unique")]


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
