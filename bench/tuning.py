"""Seconds of a tuner's trial: `tfmw.fit(workers=2)` beside Keras's `fit`, in one process, in turns.

The model is small, so the difference to Keras's trial is the start and the end of the workers.

    .venv/bin/python -m bench.tuning --trials 5

The first trial of tfmw starts the process that imports TensorFlow for the workers; later trials
fork theirs from it.
"""

from __future__ import annotations

import argparse
import statistics
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


def main() -> None:
    """Prints the seconds of each kind of trial, and their ratio."""
    flags = argparse.ArgumentParser()
    flags.add_argument("--trials", type=int, default=5)
    flags.add_argument("--workers", type=int, default=2)
    options = flags.parse_args()
    first_of_keras, first = trial(0.01), trial(0.01, workers=options.workers)
    pairs = [
        (trial(rate), trial(rate, workers=options.workers))
        for rate in np.geomspace(1e-3, 1e-2, options.trials)
    ]
    alone, several = (statistics.median(seconds) for seconds in zip(*pairs, strict=True))
    ratio = statistics.median(several / alone for alone, several in pairs)
    print(
        f"first trial: Keras {first_of_keras:.2f} s, tfmw on {options.workers} workers "
        f"{first:.2f} s, {first / first_of_keras:.1f} times as long"
    )
    print(
        f"median of {options.trials} more: Keras {alone:.2f} s, tfmw {several:.2f} s, "
        f"{ratio:.1f} times as long; {several - alone:.2f} s more"
    )


if __name__ == "__main__":
    main()
