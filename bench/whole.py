"""A tiny training as a whole, from its command to its end: `tfmw run` beside plain Keras.

    python -m bench.whole [--workers 2 16] [--rounds 3]

The figures include the costs that a step's time excludes: imports, the start of processes, tracing
and the end. The model has 8,000 parameters and makes 40 steps; contenders take turns.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from bench.figures import Figure, markdown, span

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
    quiet = subprocess.DEVNULL
    subprocess.run(command, cwd=ROOT, env=environ, check=True, stdout=quiet, timeout=300)
    return time.perf_counter() - began


def figures(workers: Sequence[int] = WORKERS, rounds: int = 3) -> list[Figure]:
    """Figures of the whole training, for each number of workers a ratio and seconds."""
    times: dict[int | None, list[float]] = {number: [] for number in (None, *workers)}
    for _ in range(rounds):
        for number, found in times.items():
            found.append(seconds(number))
    rows = []
    for number in workers:
        row = f"a tiny training, whole: `tfmw run --workers {number}`"
        ratios = [a / b for a, b in zip(times[number], times[None], strict=True)]
        rows.append(Figure(f"{row} / plain Keras", ratios, GOALS.get(number)))
        rows.append(Figure(f"{row}, s", times[number], GOALS_S.get(number)))
    return rows


def page_table(found: Sequence[Figure]) -> list[list[str]]:
    """README's table of whole programs."""
    ratio, s, *_ = found
    heading = ["", "seconds", "divided by plain Keras in one process with all cores"]
    return [
        heading,
        ["`tfmw run --workers 2`, a training of a second", span(s.values), span(ratio.values)],
    ]


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
    print(markdown(figures(options.workers, options.rounds)))


if __name__ == "__main__":
    main()
