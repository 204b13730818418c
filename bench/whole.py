"""A tiny training as a whole, from its command to its end: `tfmw run` beside plain Keras.

    python -m bench.whole [--workers 2 16] [--rounds 3]

The figures include the costs that a step's time excludes: imports, the start of processes, tracing
and the end. The model has 8,000 parameters and makes 40 steps; contenders take turns.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from bench.figures import Figure, markdown

ROOT = Path(__file__).resolve().parents[1]
STEPS, INPUTS, CLASSES, BATCH = 40, 64, 10, 64
WORKERS = (2, 16)
# number of workers -> multiple of plain Keras's time; -> seconds, on two cores
GOALS, GOALS_S = {2: 0.9}, {16: 12.0}


def train(with_tfmw: bool) -> None:
    """Runs the training itself, in each process."""
    import keras
    import numpy as np
    import tensorflow as tf

    random = np.random.default_rng(0)
    x = random.random((STEPS * BATCH, INPUTS), np.float32)
    y = random.integers(0, CLASSES, STEPS * BATCH)
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)
    layers = [keras.layers.Dense(108, activation="relu"), keras.layers.Dense(CLASSES)]
    model = keras.Sequential([keras.Input((INPUTS,)), *layers])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"])
    if with_tfmw:
        import tfmw

        tfmw.fit(model, data, verbose=0)
    else:
        model.fit(data, verbose=0)


def seconds(workers: int | None) -> float:
    """Seconds of the whole command.

    Args:
        workers: number of workers of `tfmw run`; None: plain Keras in one process.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    run = ["-m", "tfmw", "run", "--workers", str(workers), "-m"] if workers else ["-m"]
    command = [sys.executable, *run, "bench.whole", "--train", "tfmw" if workers else "keras"]
    began = time.perf_counter()
    environ = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    environ.pop("PYTHONDONTWRITEBYTECODE", None)  # otherwise each process compiles the checkout
    subprocess.run(command, cwd=ROOT, env=environ, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def measure(workers: Sequence[int], rounds: int) -> dict[int | None, float]:
    """Median seconds by the number of workers; under None those of plain Keras."""
    contenders: list[int | None] = [None, *workers]
    times = {number: [] for number in contenders}  # type: dict[int | None, list[float]]
    for _ in range(rounds):
        for number in contenders:
            times[number].append(seconds(number))
    return {number: statistics.median(found) for number, found in times.items()}


def figures(workers: Sequence[int] = WORKERS, rounds: int = 3) -> list[Figure]:
    """Figures of the whole training."""
    found = measure(workers, rounds)
    rows = []
    for number in workers:
        row = f"a tiny training, whole: `tfmw run --workers {number}`"
        rows.append(Figure(f"{row} / plain Keras", found[number] / found[None], GOALS.get(number)))
        rows.append(Figure(f"{row}, s", found[number], GOALS_S.get(number)))
    return rows


def main() -> None:
    """Measures, prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--workers", type=int, nargs="+", default=WORKERS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--train", choices=["keras", "tfmw"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        train(options.train == "tfmw")
        return
    print(markdown("a tiny training", figures(options.workers, options.rounds)))


if __name__ == "__main__":
    main()
