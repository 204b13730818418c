"""Seconds of a tuner's trial: Keras's `fit`, new workers, workers that stay; in turns.

The model is small, so the difference to Keras's trial is the start and the end of the workers.

    .venv/bin/python -m bench.tuning --trials 5

The first trial of tfmw starts the process that imports TensorFlow for the workers; later trials
fork theirs from it. Then one model is used again and again, by Keras and by workers that stay: the
seconds to the first step of `fit`, and of `evaluate` and `predict`.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from typing import Any

import keras
import numpy as np

import tfmw

EXAMPLES, FEATURES, EPOCHS, BATCH = 4096, 64, 3, 128


def trial(rate: float, **options: Any) -> float:
    """The seconds of one trial, from the model to its validation loss."""
    x: np.ndarray = np.random.default_rng(0).normal(size=(EXAMPLES, FEATURES)).astype("float32")
    y = x.sum(axis=1, keepdims=True)
    begin = time.perf_counter()
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [keras.Input([FEATURES]), keras.layers.Dense(128, "relu"), keras.layers.Dense(1)]
    )
    model.compile(keras.optimizers.SGD(rate), "mse")
    fit = tfmw.fit if options else keras.Model.fit
    given = {"epochs": EPOCHS, "batch_size": BATCH, "verbose": 0, **options}
    history = fit(model, x, y, validation_data=(x, y), **given)
    assert np.isfinite(history.history["val_loss"][-1])
    return time.perf_counter() - begin


class FirstStep(keras.callbacks.Callback):
    """Notes the time of the first step in a file, as it may run in another process."""

    def __init__(self, path: str):
        super().__init__()
        self.path = path

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch == 0:
            with open(self.path, "w") as file:
                file.write(str(time.time()))


def later_calls(repeats: int, **options: Any) -> list[float]:
    """Median seconds to the first step of `fit`, of `evaluate` and `predict`; later calls."""
    x: np.ndarray = np.random.default_rng(0).normal(size=(BATCH, FEATURES)).astype("float32")
    model = keras.Sequential(
        [keras.Input([FEATURES]), keras.layers.Dense(128, "relu"), keras.layers.Dense(1)]
    )
    model.compile("adam", "mse")
    of = tfmw if options else keras.Model
    given = {"batch_size": BATCH, "verbose": 0, **options}
    rows = []
    for _ in range(repeats + 1):
        with tempfile.NamedTemporaryFile("r") as file:
            times = [time.time()]
            of.fit(model, x, x[:, :1], callbacks=[FirstStep(file.name)], **given)
            first = float(file.read()) - times[0]
        times = [time.time()]
        of.evaluate(model, x, x[:, :1], **given)
        times.append(time.time())
        of.predict(model, x, **given)
        rows.append([first, times[1] - times[0], time.time() - times[1]])
    return [statistics.median(column) for column in zip(*rows[1:], strict=True)]


def main() -> None:
    """Prints the seconds of each kind of trial, and their ratio; then those of later calls."""
    flags = argparse.ArgumentParser()
    flags.add_argument("--trials", type=int, default=5)
    flags.add_argument("--workers", type=int, default=2)
    options = flags.parse_args()
    first_of_keras, first = trial(0.01), trial(0.01, workers=options.workers)
    with tfmw.Workers(options.workers) as stay:
        pairs = [
            (trial(r), trial(r, workers=options.workers), trial(r, workers=stay))
            for r in np.geomspace(1e-3, 1e-2, options.trials)
        ]
        calls = [later_calls(options.trials), later_calls(options.trials, workers=stay)]
    alone, several, kept = (statistics.median(seconds) for seconds in zip(*pairs, strict=True))
    ratio = statistics.median(several / alone for alone, several, _ in pairs)
    print(
        f"first trial: Keras {first_of_keras:.2f} s, tfmw on {options.workers} workers "
        f"{first:.2f} s, {first / first_of_keras:.1f} times as long"
    )
    print(
        f"median of {options.trials} more: Keras {alone:.2f} s, tfmw {several:.2f} s, "
        f"{ratio:.1f} times as long; {several - alone:.2f} s more; workers that stay {kept:.2f} s"
    )
    for name, seconds in zip(("Keras", "workers that stay"), calls, strict=True):
        found = ", ".join(f"{s:.3f} s" for s in seconds)
        print(f"{name}: fit to the first step, evaluate, predict: {found}")


if __name__ == "__main__":
    main()
