"""Synchronous training and `tfmw.DiLoCo` on slow links: bytes, time of a step, time to a loss.

    sudo python -m bench.slow_network [--work mlp] [--workers 2] [--mbit 100] [--batch 4] [--loss]
        [--only synchronous "every=25, int8"]

Each worker has a network namespace, whose link sends no faster than the rate (bench/machines.py).
Bytes are those that a worker's device has sent. Efficiency is the time of a step without any
communication divided by the time of the measured step. As many workers train at the same time in
both, so the cores and the memory that they share affect both alike. With `--loss` every contender
trains on the same examples, which a network can learn, until the validation loss that synchronous
training reaches; the table compares the times. `--batch` sets a worker's examples in a step:
workers share the cores of this machine, and compute longer than on machines of their own. Needs
root, and Linux with ip and tc (iproute2).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.machines import machines
from bench.network import MARK, chief_found
from bench.works import CLASSES, WORKS, batches, examples, keras_network

TIMEOUT_S = 900
SENT = Path("/sys/class/net/eth0/statistics/tx_bytes")

# Contender -> (steps per round, arguments of `fit`, arguments of `tfmw.DiLoCo`).
WAYS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "no exchange": (25, {"strategy": "default"}, {}),
    "synchronous": (1, {}, {}),
    "every=25, int8": (25, {}, {"compression": "int8"}),
    "every=100, int8": (100, {}, {"compression": "int8"}),
    "every=100, int8, 4 fragments, overlap of 20": (
        100,
        {},
        {"compression": "int8", "fragments": 4, "overlap": 20},
    ),
}


def _arguments(way: str) -> dict[str, Any]:
    """Arguments of `tfmw.fit` for a contender."""
    import tfmw

    every, arguments, settings = WAYS[way]
    return arguments | ({"sync": tfmw.DiLoCo(every, **settings)} if settings else {})


def steps(way: str, work: str) -> dict[str, float]:
    """Seconds of a step, and bytes that a step sends, in this worker."""
    import keras

    import tfmw

    cluster = tfmw.init()
    every, options, _ = WAYS[way]
    alone = options.get("strategy") == "default"
    model = keras_network(work, keras)
    data = batches(work, 1 if alone else cluster.num_workers)
    count = max(4, 2 * every)
    marks: list[tuple[float, int]] = []

    class Mark(keras.callbacks.Callback):
        """Records time and bytes at each end of an epoch, when all workers are synchronized."""

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            marks.append((time.perf_counter(), int(SENT.read_text()) if SENT.exists() else 0))

    length: dict[str, Any] = {"epochs": 2, "steps_per_epoch": count, "verbose": 0}
    tfmw.fit(model, data, callbacks=[Mark()], **length, **_arguments(way))
    (begin, sent), (end, more) = marks
    return {"seconds": (end - begin) / count, "bytes": (more - sent) / count}


def losses(way: str, work: str) -> dict[str, list[list[float]]]:
    """(seconds since the first epoch, validation loss) of each epoch."""
    import keras
    import numpy as np
    import tensorflow as tf

    import tfmw

    cluster = tfmw.init()
    keras.utils.set_random_seed(1)
    x, _ = examples(WORKS[work], 8192)
    # A network of its own knows the classes, so that there is something to learn.
    teacher = np.random.default_rng(5).normal(size=[int(np.prod(x.shape[1:])), CLASSES])
    flat: np.ndarray = x.reshape(len(x), -1).astype(np.float64)
    y = np.argmax((flat - flat.mean(0)) / (flat.std(0) + 1e-9) @ teacher, axis=1)
    model = keras_network(work, keras)
    model.optimizer.learning_rate = 0.05 if WORKS[work].optimizer == "sgd" else 0.001
    batch = WORKS[work].batch * cluster.num_workers
    train = tf.data.Dataset.from_tensor_slices((x[:7168], y[:7168])).shuffle(7168, seed=1)
    train = train.repeat().batch(batch, drop_remainder=True)
    found: list[list[float]] = []
    began: list[float] = []

    class Curve(keras.callbacks.Callback):
        """Records the validation loss and the time."""

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            began.append(time.perf_counter())

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            found.append([time.perf_counter() - began[0], float((logs or {})["val_loss"])])

    tfmw.fit(
        model,
        train,
        epochs=4,
        steps_per_epoch=100,
        validation_data=(x[7168:], y[7168:]),
        verbose=0,
        callbacks=[Curve()],
        **_arguments(way),
    )
    return {"curve": found}


def measured(child: str, way: str, options: argparse.Namespace) -> Any:
    """Result that the chief prints.

    Raises:
        RuntimeError: a worker failed; the message is its output.
    """
    command = ["-m", "bench.slow_network", "--child", child, way, "--work", options.work]
    command += ["--batch", str(options.batch)]
    with machines(options.workers, options.mbit / 1000) as hosts:
        return chief_found(hosts, command, lambda worker: {"OMP_NUM_THREADS": "1"}, TIMEOUT_S)


def _print_steps(options: argparse.Namespace) -> None:
    print("| way | ms per step | efficiency | MB sent per step | / synchronous |")
    print("| --- " * 5 + "|")
    alone, synchronous = 0.0, 0.0
    for way in options.only:
        found = measured("steps", way, options)
        alone = alone or found["seconds"]
        if way == "synchronous":
            synchronous = found["bytes"]
        fewer = f"1/{synchronous / found['bytes']:.0f}" if synchronous else ""
        print(
            f"| {way} | {1e3 * found['seconds']:.0f} | {alone / found['seconds']:.2f} | "
            f"{found['bytes'] / 1e6:.3f} | {fewer} |",
            flush=True,
        )


def _print_losses(options: argparse.Namespace) -> None:
    print("| way | last loss | s | s to the loss of synchronous training | sooner by |")
    print("| --- " * 5 + "|")
    goal, of_first = None, 0.0
    for way in [way for way in options.only if way != "no exchange"]:
        curve = measured("losses", way, options)["curve"]
        seconds, last = curve[-1]
        if goal is None:
            goal = 1.01 * last  # the goal is within 1 % of it
            of_first = next(at for at, loss in curve if loss <= goal)
        reached = next((at for at, loss in curve if loss <= goal), None)
        sooner = "" if reached is None else f"{of_first / reached:.1f}"
        at = "" if reached is None else f"{reached:.0f}"
        print(f"| {way} | {last:.4f} | {seconds:.0f} | {at} | {sooner} |", flush=True)


def main() -> None:
    """Prints a table, or measures one of its rows in this process."""
    flags = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    flags.add_argument("--work", default="mlp")
    flags.add_argument("--workers", type=int, default=2)
    flags.add_argument("--mbit", type=float, default=100)
    flags.add_argument("--batch", type=int, default=0, help="0: that of the work")
    flags.add_argument("--loss", action="store_true")
    flags.add_argument("--only", nargs="+", choices=list(WAYS), default=list(WAYS))
    flags.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = flags.parse_args()
    work = WORKS[options.work]
    WORKS[options.work] = dataclasses.replace(work, batch=options.batch or work.batch)
    children: dict[str, Callable[[str, str], Any]] = {"steps": steps, "losses": losses}
    if options.child:
        name, way = options.child
        found = children[name](way, options.work)
        print(MARK + json.dumps(found), flush=True)
        return
    table = _print_losses if options.loss else _print_steps
    table(options)


if __name__ == "__main__":
    main()
