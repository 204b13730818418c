"""Calls one after the other, as in a notebook or a search: seconds of each.

    python -m bench.calls [--times 5]
    python -m bench.figures      # writes the table into Benchmarks

A small CNN and 1,024 images, on two workers that stay (`tfmw.Workers`), on two new ones in each
call, and with Keras in this process. The first two calls of each kind are not counted: they trace,
and start what later calls share. A trial of Optuna trains a new model for two epochs.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import keras
import numpy as np
import optuna

import tfmw
from bench.figures import commit, keep, span, table

ROWS, WARM_UP = 1024, 2
RANDOM = np.random.default_rng(0)
X, Y = RANDOM.random((ROWS, 28, 28, 1), np.float32), RANDOM.integers(0, 10, ROWS)
HEADING = ["seconds of a call", "Keras, one process", "workers that stay", "new workers"]

Call = Callable[[str, keras.Model], Any]
"""Calls the method of a name with the arguments of its row."""


def model(rate: float = 0.001) -> keras.Model:
    """A small CNN."""
    layers = [keras.layers.Conv2D(16, 3, activation="relu"), keras.layers.Flatten()]
    made = keras.Sequential([keras.Input(X.shape[1:]), *layers, keras.layers.Dense(10)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    made.compile(keras.optimizers.Adam(rate), loss, metrics=["accuracy"])
    return made


ARGUMENTS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "fit": ((X, Y), {"batch_size": ROWS}),
    "evaluate": ((X, Y), {}),
    "predict": ((X,), {}),
}
ABOUT = {"fit": "`fit`, one step", "evaluate": "`evaluate`", "predict": "`predict`"}


def _seconds(call: Callable[[], Any], times: int) -> list[float]:
    found = []
    for _ in range(WARM_UP + times):
        began = time.perf_counter()
        call()
        found.append(time.perf_counter() - began)
    return found[WARM_UP:]


def _trials(train: Callable[[keras.Model], Any], times: int) -> list[float]:
    ends = [time.perf_counter()]

    def objective(trial: optuna.Trial) -> float:
        train(model(trial.suggest_float("rate", 1e-4, 1e-1, log=True)))
        ends.append(time.perf_counter())
        return 0.0

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    optuna.create_study().optimize(objective, n_trials=WARM_UP + times)
    return [end - begin for begin, end in pairwise(ends)][WARM_UP:]


def measured(call: Call, times: int) -> list[list[float]]:
    """Seconds of each call, for each row."""
    trained = model()
    rows = [_seconds(partial(call, name, trained), times) for name in ARGUMENTS]
    return [*rows, _trials(lambda made: [call("fit", made) for _ in range(2)], times)]


def main() -> None:
    """Measures, prints a table, and keeps it for the page."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--times", type=int, default=5)
    times = parser.parse_args().times

    def of_keras(name: str, of: keras.Model) -> Any:
        positional, known = ARGUMENTS[name]
        return getattr(of, name)(*positional, **known, verbose=0)

    def through(owner: Any, **options: Any) -> Call:
        def call(name: str, of: keras.Model) -> Any:
            positional, known = ARGUMENTS[name]
            return getattr(owner, name)(of, *positional, **known, **options, verbose=0)

        return call

    columns = [measured(of_keras, times)]
    with tfmw.Workers(2) as workers:
        columns.append(measured(through(workers), times))
    columns.append(measured(through(tfmw, workers=2), times))
    about = [*ABOUT.values(), "a trial of Optuna: a new model, two calls of `fit`"]
    cells = zip(about, *[[span(row) for row in column] for column in columns], strict=True)
    rows = [HEADING, *map(list, cells)]
    print(table(rows))
    keep({"calls": rows}, commit())


if __name__ == "__main__":
    main()
