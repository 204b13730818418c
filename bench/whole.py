"""A tiny training as a whole, from its command to its end: `tfmw run` beside plain Keras.

    python -m bench.whole [--workers 2 8] [--rounds 3]

What counts here is what a step's time leaves out: imports, the start of processes, tracing and the
end. The model has 8,000 parameters and makes 40 steps; contenders take turns.
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

ROOT = Path(__file__).resolve().parents[1]
STEPS, INPUTS, CLASSES, BATCH = 40, 64, 10, 64
WORKERS = (2, 8)
GOALS = {2: "0.92 of plain Keras", 8: "15 s on two cores"}  # by the number of workers


def train(with_tfmw: bool) -> None:
    """The training itself, in each process."""
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
    """Of the whole command.

    Args:
        workers: of `tfmw run`; None: plain Keras in one process.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    run = ["-m", "tfmw", "run", "--workers", str(workers), "-m"] if workers else ["-m"]
    command = [sys.executable, *run, "bench.whole", "--train", "tfmw" if workers else "keras"]
    began = time.perf_counter()
    environ = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
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


def table(workers: Sequence[int] = WORKERS, rounds: int = 3) -> str:
    """Measures; Markdown."""
    found = measure(workers, rounds)
    plain = found[None]
    lines = ["| a tiny training, whole | s | / plain Keras | goal |", "| --- " * 4 + "|"]
    lines.append(f"| plain Keras, one process | {plain:.1f} | 1 | |")
    for number in workers:
        times = f"{found[number]:.1f} | {found[number] / plain:.2f}"
        lines.append(f"| `tfmw run --workers {number}` | {times} | {GOALS.get(number, '')} |")
    return "\n".join(lines)


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
    print(table(options.workers, options.rounds))


if __name__ == "__main__":
    main()
