"""Examples per second of a recommender with 26 tables: tfmw's parameter servers and other ways.

    tfmw run --workers 2 --ps 2 bench/dlrm.py [--rounds=3] [--seconds=10] [--torch-python PYTHON]

The network follows Naumov et al., "Deep Learning Recommendation Model" (arXiv 1906.00091): 13
numbers and 26 ids per example, ids drawn by Zipf's law, dot products of their embeddings, Adagrad.
tfmw divides the tables over the servers, and sends rows and gradients as they are or as bfloat16.
The other contenders are: a loop over TensorFlow's ClusterCoordinator, as its tutorial has it, with
legacy Keras's layers and optimizer; the same loop with gathers and updates of rows written by hand;
Keras's own `fit` in one process; and, if --torch-python has torch, two processes of PyTorch with
sparse gradients over gloo. All of them run in turns in the same run; the last lines are ratios of
medians. Every contender has the same batches of 512 examples per worker.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

TABLES, DENSE, WIDTH, BATCH, BATCHES = 26, 13, 16, 512, 50
RATE = 0.05
PER_FUNCTION = 50  # steps that the loops by hand schedule at a time
Measure = Callable[[float], float]


def main() -> None:
    """Measures in turns, prints medians and ratios."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement")
    parser.add_argument("--rows", type=int, default=100_000, help="of each table")
    parser.add_argument("--only", nargs="*", help="contenders, such as tfmw")
    parser.add_argument("--torch-python", help="a Python with PyTorch")
    parser.add_argument("--torch-rank", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.torch_rank is not None:
        torch_worker(options.torch_rank, options.rows, options.seconds)
        return
    import tfmw
    from tfmw import strategies

    tfmw.init()
    servers = strategies.servers_of(strategies.current_strategy())
    assert servers is not None, "start it with --ps"
    workers = len(servers.cluster.workers)
    makers: dict[str, Callable[[], Measure]] = {
        # Before there are servers for tables, the model of this contender is an ordinary one.
        "Keras, one process": lambda: alone(options.rows),
        "loop by hand": lambda: by_hand(servers, options.rows),
        "plain loop": lambda: plain_loop(servers, options.rows),
        "tfmw": lambda: ours(options.rows),
        "tfmw, rows sent as bf16": lambda: ours(options.rows, row_compression="bf16"),
        "PyTorch": lambda: torch_processes(options.torch_python, workers, options.rows),
    }
    if not importlib.util.find_spec("tf_keras"):
        del makers["plain loop"]
    if not options.torch_python:
        del makers["PyTorch"]
    chosen = [name for name in makers if not options.only or name in options.only]
    measures = {name: makers[name]() for name in chosen}
    rates: dict[str, list[float]] = {name: [] for name in chosen}
    for _ in range(options.rounds):
        for name in chosen:
            rates[name].append(measures[name](options.seconds) * BATCH)
            print(f"{name}: {rates[name][-1]:,.0f} examples/s", flush=True)
    medians = {name: statistics.median(found) for name, found in rates.items()}
    for name, rate in medians.items():
        ratio = f" | tfmw is {medians['tfmw'] / rate:.2f} x that" if "tfmw" in medians else ""
        print(f"median | {name}: {rate:,.0f} examples/s{ratio}")


# ---------------------------------------------------------------- the data and the network


def examples(rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(numbers float32 [N, 13], ids int64 [N, 26], labels float32 [N, 1])."""
    rng = np.random.default_rng(0)
    count = BATCH * BATCHES
    popular = np.minimum(rng.zipf(1.2, (count, TABLES)) - 1, rows - 1)
    ids = popular * 7919 % rows  # spreads popular rows over the whole table
    dense = rng.normal(size=(count, DENSE)).astype(np.float32)
    return dense, ids, (ids.sum(axis=1, keepdims=True) % 2).astype(np.float32)


def dataset(rows: int) -> Any:
    """Endless batches ((numbers, ids), labels), cut in advance, as reading is not measured."""
    import tensorflow as tf

    dense, ids, labels = (a.reshape(BATCHES, BATCH, -1) for a in examples(rows))
    return tf.data.Dataset.from_tensor_slices(((dense, ids), labels)).repeat().prefetch(4)


def network(library: Any, rows: int) -> Any:
    """The network, compiled, of Keras 3 or of tf_keras."""
    layers, dense = library.layers, library.Input((DENSE,))
    ids = library.Input((TABLES,), dtype="int64")
    vectors = [layers.Dense(WIDTH, "relu")(layers.Dense(64, "relu")(dense))]
    for table in range(TABLES):
        vectors.append(layers.Embedding(rows, WIDTH)(ids[:, table]))
    stacked = layers.Concatenate(axis=1)([layers.Reshape((1, WIDTH))(v) for v in vectors])
    products = layers.Flatten()(layers.Dot(axes=2)([stacked, stacked]))
    hidden = layers.Dense(64, "relu")(layers.Concatenate()([vectors[0], products]))
    model = library.Model((dense, ids), layers.Dense(1)(hidden))
    model.compile(
        library.optimizers.Adagrad(RATE), library.losses.BinaryCrossentropy(from_logits=True)
    )
    return model


# ---------------------------------------------------------------- the contenders


def ours(rows: int, **travel: Any) -> Measure:
    """Trains by tfmw.fit's driver, as fit calls it, with metrics, logs and exact counts.

    Args:
        travel: how rows travel; see `tfmw.strategies.parameter_server`.
    """
    import keras

    import tfmw
    from tfmw import data, strategies
    from tfmw.compat import models
    from tfmw.train.parameter_server.coordinator import PsDriver

    strategy = tfmw.strategies.parameter_server(min_shard_bytes=rows * WIDTH, **travel)
    servers = strategies.servers_of(strategy)
    assert servers is not None
    model = network(keras, rows)
    models.build_all(model, dataset(rows).element_spec)
    driver = PsDriver(model, servers, data.Source(lambda context: dataset(rows)))

    def epoch(steps: int) -> float:
        begin = time.perf_counter()
        driver.train(steps, lambda done: bool(model.get_metrics_result()))
        return time.perf_counter() - begin

    return _measured(epoch)


def plain_loop(servers: Any, rows: int) -> Measure:
    """Trains as the tutorial does: model in the strategy's scope, steps scheduled on workers."""
    import tensorflow as tf
    import tf_keras

    with servers.strategy.scope():
        model = network(tf_keras, rows)
        model.optimizer.build(model.trainable_variables)

    def step(batch: Any) -> None:
        x, y = batch
        with tf.GradientTape() as tape:
            loss = model.compute_loss(x=x, y=y, y_pred=model(x, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        model.optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    return _scheduled(servers, rows, step)


def by_hand(servers: Any, rows: int) -> Measure:
    """Trains as the plain loop does, with row gathers and Adagrad written in TensorFlow's ops."""
    import tensorflow as tf

    rng = np.random.default_rng(1)

    def made(*shape: int) -> Any:
        variable = tf.Variable(rng.uniform(-0.05, 0.05, shape).astype(np.float32))
        with servers.strategy.extended.colocate_vars_with(variable):
            return variable, tf.Variable(np.full(shape, 0.1, np.float32), trainable=False)

    products = (TABLES + 1) ** 2
    sizes = [(DENSE, 64), (64, WIDTH), (WIDTH + products, 64), (64, 1)]
    with servers.strategy.scope():
        tables = [made(rows, WIDTH) for _ in range(TABLES)]
        kernels = [made(*size) for size in sizes]
        biases = [made(size[1]) for size in sizes]

    def step(batch: Any) -> None:
        (dense, ids), labels = batch
        weights = [*kernels, *biases]
        values = [tf.identity(variable) for variable, _ in weights]
        found = []
        for number, (variable, _) in enumerate(tables):
            with tf.device(variable.device):
                taken = tf.gather(variable, ids[:, number])
            found.append(tf.identity(taken))
        with tf.GradientTape() as tape:
            tape.watch([*values, *found])
            w, b = values[: len(kernels)], values[len(kernels) :]
            low = tf.nn.relu(tf.nn.relu(dense @ w[0] + b[0]) @ w[1] + b[1])
            stacked = tf.stack([low, *found], axis=1)
            dots = tf.reshape(tf.matmul(stacked, stacked, transpose_b=True), [-1, products])
            hidden = tf.nn.relu(tf.concat([low, dots], axis=1) @ w[2] + b[2])
            losses = tf.nn.sigmoid_cross_entropy_with_logits(labels, hidden @ w[3] + b[3])
            loss = tf.reduce_mean(losses)
        dense_grads, row_grads = tape.gradient(loss, [values, found])
        for (variable, total), grad in zip(weights, dense_grads, strict=True):
            with tf.device(variable.device):
                tf.raw_ops.ResourceApplyAdagradV2(
                    var=variable.handle,
                    accum=total.handle,
                    lr=RATE,
                    epsilon=1e-7,
                    grad=grad,
                )
        for number, ((variable, total), grad) in enumerate(zip(tables, row_grads, strict=True)):
            unique, places = tf.unique(ids[:, number])
            summed = tf.math.unsorted_segment_sum(grad, places, tf.size(unique))
            with tf.device(variable.device):
                tf.raw_ops.ResourceSparseApplyAdagradV2(
                    var=variable.handle,
                    accum=total.handle,
                    lr=RATE,
                    epsilon=1e-7,
                    grad=summed,
                    indices=unique,
                )

    return _scheduled(servers, rows, step)


def alone(rows: int) -> Measure:
    """Trains by Keras's fit, in this process."""
    import keras

    model = network(keras, rows)
    fit = getattr(keras.Model.fit, "__wrapped__", keras.Model.fit)

    def epoch(steps: int) -> float:
        begin = time.perf_counter()
        fit(model, dataset(rows), steps_per_epoch=steps, verbose=0)
        return time.perf_counter() - begin

    return _measured(epoch)


def _scheduled(servers: Any, rows: int, step: Callable[[Any], None]) -> Measure:
    import tensorflow as tf

    coordinator = servers.coordinator
    iterator = iter(coordinator.create_per_worker_dataset(lambda: dataset(rows)))

    @tf.function
    def many(iterator: Any) -> None:
        for _ in tf.range(PER_FUNCTION):
            servers.strategy.run(step, args=(next(iterator),))

    def epoch(steps: int) -> float:
        functions = -(-steps // PER_FUNCTION)
        begin = time.perf_counter()
        for _ in range(functions):
            coordinator.schedule(many, args=(iterator,))
        coordinator.join()
        return (time.perf_counter() - begin) * steps / (functions * PER_FUNCTION)

    return _measured(epoch)


def _measured(epoch: Callable[[int], float]) -> Measure:
    """(seconds) -> batches per second, after an epoch that traces and one that estimates."""
    epoch(100)
    estimate = [100 / epoch(100)]

    def measure(seconds: float) -> float:
        steps = max(100, int(estimate[0] * seconds))
        epoch(steps // 4)
        estimate[0] = steps / epoch(steps)
        return estimate[0]

    return measure


# ---------------------------------------------------------------- PyTorch


def torch_processes(python: str, workers: int, rows: int) -> Measure:
    """Starts PyTorch's processes for each measurement; rank 0 prints its batches per second."""

    def measure(seconds: float) -> float:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        environ = {
            **{k: v for k, v in os.environ.items() if not k.startswith("TFMW")},
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(workers),
            "OMP_NUM_THREADS": "1",
        }
        command = [python, str(Path(__file__).resolve()), f"--rows={rows}", f"--seconds={seconds}"]
        running = [
            subprocess.Popen(
                [*command, f"--torch-rank={rank}"], env=environ, stdout=subprocess.PIPE, text=True
            )
            for rank in range(workers)
        ]
        printed = [process.communicate()[0] for process in running]
        return float(printed[0].split()[-1])

    return measure


def torch_worker(rank: int, rows: int, seconds: float) -> None:
    """Trains in one process by DistributedDataParallel, with sparse gradients of the tables."""
    import torch
    from torch import nn

    world = int(os.environ["WORLD_SIZE"])
    torch.distributed.init_process_group("gloo", rank=rank, world_size=world)

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            low = [nn.Linear(DENSE, 64), nn.ReLU(), nn.Linear(64, WIDTH), nn.ReLU()]
            self.low = nn.Sequential(*low)
            tables = [nn.Embedding(rows, WIDTH, sparse=True) for _ in range(TABLES)]
            self.tables = nn.ModuleList(tables)
            inputs = WIDTH + (TABLES + 1) ** 2
            self.top = nn.Sequential(nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, 1))

        def forward(self, dense: Any, ids: Any) -> Any:
            low = self.low(dense)
            found = [table(ids[:, number]) for number, table in enumerate(self.tables)]
            stacked = torch.stack([low, *found], dim=1)
            dots = torch.bmm(stacked, stacked.transpose(1, 2)).flatten(1)
            return self.top(torch.cat([low, dots], dim=1))

    model = nn.parallel.DistributedDataParallel(Network())
    optimizer = torch.optim.Adagrad(model.parameters(), lr=RATE)
    loss = nn.BCEWithLogitsLoss()
    batches = [torch.from_numpy(a.reshape(BATCHES, BATCH, -1)) for a in examples(rows)]

    def epoch(steps: int) -> float:
        torch.distributed.barrier()
        begin = time.perf_counter()
        for step in range(steps):
            dense, ids, labels = (a[step % BATCHES] for a in batches)
            optimizer.zero_grad()
            loss(model(dense, ids), labels).backward()
            optimizer.step()
        torch.distributed.barrier()
        return time.perf_counter() - begin

    per_step = torch.tensor([epoch(10) / 10])
    torch.distributed.broadcast(per_step, 0)
    steps = max(10, int(seconds / float(per_step)))
    rate = steps * world / epoch(steps)
    if rank == 0:
        print(rate, file=sys.stdout, flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
