"""Ids that take rows on parameter servers: one worker's training beside that of one process."""

import argparse
import resource
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfmw
from tests.programs import _of_keras, _result
from tfmw.tables import hashing
from tfmw.train.parameter_server.coordinator import PsDriver

parser = argparse.ArgumentParser()
parser.add_argument("--cases", default="")
parser.add_argument("--export")
parser.add_argument("--bytes", type=int, default=0, help="of a layer that is only measured")
options = parser.parse_args()

# Grappler's rewrites of a graph depend on what is around an op, and round otherwise.
tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
tfmw.init()
WIDTH, BUCKETS, SEED, STEPS, EPOCHS = 4, 3, 5, 20, 2
CAPACITY = 16 * BUCKETS
rng = np.random.default_rng(0)


def drifting() -> np.ndarray:
    """int64 [steps, 40]: more ids than rows; some come often, some are gone after a while."""
    steps = EPOCHS * STEPS
    ids = rng.zipf(1.4, (steps, 40)).clip(max=90) + np.arange(steps)[:, None]
    ids[2::4] = ids[2::4, :1]  # some batches have ids of one server only
    return ids


def full_buckets(times: int) -> np.ndarray:
    """int64 [steps, rows * times]: ids of all rows, of which in each step some lose theirs.

    So each row has a gradient in each step: Keras's optimizers move rows without one, too.
    """
    of_bucket = hashing.buckets(tf.range(4000, dtype=tf.int64), BUCKETS, SEED).numpy()
    members = [np.flatnonzero(of_bucket == bucket) for bucket in range(BUCKETS)]
    batches = [
        np.concatenate([np.repeat(of[3 * step : 3 * step + 16], times) for of in members])
        for step in range(EPOCHS * STEPS)
    ]
    return np.stack([rng.permutation(ids) for ids in batches])


def make(optimizer, ids, **described):
    keras.utils.set_random_seed(1)
    kind = "string" if ids.dtype == object else "int64"
    layer = tfmw.layers.HashTableEmbedding(
        WIDTH, capacity=CAPACITY, seed=SEED, name="table", **described
    )
    model = keras.Sequential([keras.Input((), dtype=kind), layer, keras.layers.Dense(3)])
    model.compile(optimizer, "mse", steps_per_execution=STEPS)
    return model


def once(ids, **described):
    """float32, of the shape of `ids`: 1 for one example of each row of a batch, else 0.

    Keras's optimizers take the gradients of a row that a batch has twice one by one.
    """
    layer = tfmw.layers.HashTableEmbedding(1, capacity=CAPACITY, seed=SEED, **described)
    weights = np.zeros(ids.shape, np.float32)
    for batch, weight in zip(ids, weights, strict=True):
        layer(tf.constant(batch), training=True)
        weight[np.unique(layer.rows_of(batch).numpy(), return_index=True)[1]] = 1
    return weights


of, stream = keras.optimizers, drifting()
named = np.array([[f"id {i}".encode() for i in batch] for batch in stream], dtype=object)
rare: dict[str, Any] = {"min_count": 3, "max_age": 4}
# name: (optimizer, ids, are rows used once, options of the layer)
CASES: dict[str, tuple[Any, np.ndarray, bool, dict[str, Any]]] = {
    "SGD": (lambda: of.SGD(0.5), named, False, {"min_count": 2}),
    "Adagrad": (lambda: of.Adagrad(0.1), stream, True, rare),
    "momentum": (lambda: of.SGD(0.1, momentum=0.9), full_buckets(1), False, {}),
    "Adam": (lambda: of.Adam(0.01), full_buckets(3), True, rare),
    "whole": (lambda: of.Adagrad(0.1), stream, True, rare),
    "one server": (lambda: of.Adagrad(0.1), stream, True, rare),
}
chosen = options.cases.split(",") if options.cases else list(CASES)


def made(name):
    make_optimizer, ids, _, described = CASES[name]
    return make(make_optimizer(), ids, **described)


# Models that are made before the servers are known are ordinary ones, and so are layers.
weights = {
    name: once(ids, **described) if is_once else np.ones(ids.shape, np.float32)
    for name, (_, ids, is_once, described) in CASES.items()
    if name in chosen
}
alone = {name: made(name) for name in chosen}
before = {name: made(name) for name in ("whole", "one server")}


def off_by(ours, others):
    return max(
        float(np.abs(v.numpy().astype(np.float64) - w.numpy().astype(np.float64)).max())
        for v, w in zip(ours, others, strict=True)
    )


def train(name, strategy):
    ids = CASES[name][1]
    model = before[name] if name == "whole" else made(name)
    labels = np.random.default_rng(1).normal(size=(*ids.shape, 3)).astype(np.float32)
    data = tf.data.Dataset.from_tensor_slices((ids, labels, weights[name]))
    how: dict[str, Any] = {"epochs": EPOCHS, "steps_per_epoch": STEPS, "verbose": 0}
    history = tfmw.fit(model, data, strategy=strategy, shuffle=False, **how)
    stock = _of_keras.fit(alone[name], data, **how)
    ours, other = (each.get_layer("table") for each in (model, alone[name]))
    ids = ids[-1]
    return model, {
        "table": type(ours.embeddings._value).__name__,
        "off_by": off_by(model.weights, alone[name].weights),
        "slots_off_by": off_by(model.optimizer.variables, alone[name].optimizer.variables),
        "loss": [history.history["loss"], stock.history["loss"]],
        "rows": [layer.rows_of(tf.constant(ids)).numpy().tolist() for layer in (ours, other)],
        "known": [layer.known_ids().tolist() for layer in (ours, other)],
        "steps": int(ours.step.numpy()),
    }


def lookups(model, stock, ids):
    """Results of lookups on the coordinator and in one process; also writes exports."""
    before = [variable.numpy().tobytes() for variable in model.variables]
    labels = np.ones((*ids.shape, 3), np.float32)
    batch = tf.data.Dataset.from_tensors((ids, labels))
    found = {
        "predicted": tfmw.predict(model, ids, verbose=0).tolist(),
        "off_by": float(
            np.abs(model.predict(ids, verbose=0) - _of_keras.predict(stock, ids, verbose=0)).max()
        ),
        "evaluated": [
            tfmw.evaluate(model, batch, verbose=0),
            _of_keras.evaluate(stock, batch, verbose=0),
        ],
        "ids": ids.tolist(),
    }
    if options.export:
        tfmw.export(model, f"{options.export}/whole")
        tfmw.export(model, f"{options.export}/sharded", tables="sharded")
    after = [variable.numpy().tobytes() for variable in model.variables]
    return {**found, "changed_nothing": before == after}


def refusal(call):
    """The message of the tfmw.TfmwError that a call raises."""
    try:
        call()
    except tfmw.TfmwError as e:
        return str(e)
    return None


def bytes_on_servers():
    """Bytes of a layer's variables by server."""
    layer = tfmw.layers.HashTableEmbedding(WIDTH, max_bytes=100_000, min_count=2)
    layer.build(())
    of_servers: dict[int, int] = {}
    for variable in layer.weights:
        for shard in getattr(variable._value, "shards", []):
            size = shard.variable.shape.num_elements() * shard.variable.dtype.size
            of_servers[shard.server] = of_servers.get(shard.server, 0) + size
    assert layer.step.shape == ()
    return list(of_servers.values())


def peak() -> int:
    """The most bytes that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def measured(max_bytes, folder):
    """Memory that the coordinator needs to train, back up, evaluate and export a layer."""
    begun = peak()
    layer = tfmw.layers.HashTableEmbedding(WIDTH, max_bytes=max_bytes, min_count=2)
    model = keras.Sequential([keras.Input((), dtype="int64"), layer, keras.layers.Dense(3)])
    model.compile("adagrad", "mse")
    batch = tf.data.Dataset.from_tensors((stream[0], np.ones((*stream[0].shape, 3)))).repeat()
    how = {"steps_per_epoch": 5, "verbose": 0, "strategy": strategy}
    tfmw.fit(model, batch, epochs=3, backup_dir=f"{folder}/{max_bytes}", **how)
    tfmw.evaluate(model, batch.take(1), verbose=0)
    tfmw.export(model, f"{folder}/{max_bytes}.whole")
    held = sum(v.shape.num_elements() * v.dtype.size for v in (w._value for w in layer.weights))
    return {
        "bytes": held,
        "taken": peak() - begun,
        "rows": int(layer.rows_of(stream[0]).numpy().max()),
    }


results: dict[str, Any] = {}
if options.bytes:
    strategy = tfmw.strategies.parameter_server(min_shard_bytes=64)
    results = {str(size): measured(size, options.export) for size in (10_000, options.bytes)}
    _result.write(results)
    raise SystemExit(0)
for name in chosen:
    size = 1 << 20 if name == "one server" else 64
    # 1 if ids that take a row see no effect of the step: they are looked up in their own step.
    ahead = int(name == "momentum")
    strategy = tfmw.strategies.parameter_server(min_shard_bytes=size, prefetch_rows=ahead)
    model, results[name] = train(name, strategy)
    if name == "Adagrad":
        results["lookups"] = lookups(model, alone[name], stream[-1])
        results["bytes"] = bytes_on_servers()
        table = model.get_layer("table")
if "Adagrad" in chosen:
    results["called"] = refusal(lambda: table.look_up(tf.constant([1], tf.int64), True))
    strategy = tfmw.strategies.parameter_server(sync_replicas=True)
    servers = tfmw.strategies.servers_of(strategy)
    assert servers is not None
    source = tfmw.data.Source(tf.data.Dataset.from_tensors((stream, stream)))
    results["sync_replicas"] = refusal(lambda: PsDriver(before["one server"], servers, source))
_result.write(results)
