"""Short calls and small steps: tfmw on one and two workers beside Keras in one process, as ratios.

    python -m bench.short [--rounds 3] [--only "an epoch"]

Contenders take turns, each in fresh processes of one thread. A row's figure is the median over the
rounds' ratios. Costs that occur once, such as tracing, are over before a measurement begins.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from bench.figures import Figure, markdown, span
from bench.steps import start

STEPS, EPOCHS, BATCH = 10, 12, 32
LONG = 1000  # batches in the longer epoch

# Measure -> (number of tfmw's workers -> goal: its time divided by that of Keras in one process).
BESIDE_KERAS: dict[str, dict[int, float]] = {
    "an epoch of 10 steps": {1: 1.15, 2: 1.8},
    "an epoch of 10 steps, with validation": {1: 1.2, 2: 1.8},
    "evaluate, 1,000 small batches": {2: 0.7},
    "predict, 1,000 small batches": {2: 0.7},
}
# (measure, against) of two workers -> goal.
BESIDE_ITSELF = {
    ("a step with a callback on every batch", "a step"): 1.1,
    ("a step by train_on_batch", "a step"): 1.3,
}


def _network(small: bool) -> Any:
    import keras

    keras.utils.set_random_seed(1)
    layers = [keras.Input((784,)), keras.layers.Dense(64, activation="relu")]
    if not small:
        image = [keras.layers.Reshape((28, 28, 1)), keras.layers.Conv2D(32, 3, activation="relu")]
        layers = [keras.Input((784,)), *image, keras.layers.MaxPooling2D(), keras.layers.Flatten()]
    model = keras.Sequential([*layers, keras.layers.Dense(10)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"])
    return model


def _dataset(batches: int, batch: int) -> Any:
    import numpy as np
    import tensorflow as tf

    random = np.random.default_rng(0)
    x = random.random((batches * batch, 784), np.float32)
    return tf.data.Dataset.from_tensor_slices((x, random.integers(0, 10, len(x)))).batch(batch)


def _epoch(fit: Callable[..., Any], **options: Any) -> float:
    """Seconds of an epoch: the median of all epochs but the first two."""
    import keras

    times: list[float] = []

    class Clock(keras.callbacks.Callback):
        """Notes when each epoch begins."""

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            times.append(time.perf_counter())

    data = _dataset(STEPS, BATCH).shuffle(STEPS * BATCH)
    fit(_network(True), data, epochs=EPOCHS, verbose=0, callbacks=[Clock()], **options)
    spans = [end - begin for begin, end in itertools.pairwise(times)]
    return statistics.median(spans[2:])


def _step(fit: Callable[..., Any], callbacks: Callable[[], list[Any]]) -> float:
    """Seconds of a step of the small CNN, from two epochs of different length."""
    model, data = _network(False), _dataset(1, 128).repeat()
    fit(model, data, steps_per_epoch=3, verbose=0, callbacks=callbacks())
    times = []
    for count in (50, 200):
        begin = time.perf_counter()
        fit(model, data, steps_per_epoch=count, verbose=0, callbacks=callbacks())
        times.append(time.perf_counter() - begin)
    return (times[1] - times[0]) / 150


def _by_batches() -> float:
    import tfmw

    model = _network(False)
    ((x, y),) = _dataset(1, 128).as_numpy_iterator()
    for _ in range(3):
        tfmw.train_on_batch(model, x, y)
    begin = time.perf_counter()
    for _ in range(200):
        tfmw.train_on_batch(model, x, y)
    return (time.perf_counter() - begin) / 200


def _whole_call(function: Callable[..., Any], repeat: int = 3) -> float:
    model, data = _network(True), _dataset(LONG, BATCH)
    times = []
    for _ in range(1 + repeat):
        begin = time.perf_counter()
        function(model, data, verbose=0)
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])


def _callback() -> list[Any]:
    import keras

    class OnBatch(keras.callbacks.Callback):
        """Reads the loss of every batch."""

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.last = float(logs["loss"])

    return [OnBatch()]


def measures(of_tfmw: bool) -> dict[str, Callable[[], float]]:
    """Measure -> the function that gives its seconds, in this process."""
    import keras

    import tfmw

    by: Any = tfmw if of_tfmw else keras.Model
    beside: dict[str, Callable[[], float]] = {
        "an epoch of 10 steps": functools.partial(_epoch, by.fit),
        "an epoch of 10 steps, with validation": lambda: _epoch(
            by.fit, validation_data=_dataset(STEPS, BATCH)
        ),
        "evaluate, 1,000 small batches": functools.partial(_whole_call, by.evaluate),
        "predict, 1,000 small batches": lambda: _whole_call(
            lambda model, data, verbose: by.predict(
                model, data.map(lambda x, y: x), verbose=verbose
            )
        ),
    }
    itself: dict[str, Callable[[], float]] = {
        "a step": lambda: _step(by.fit, list),
        "a step with a callback on every batch": lambda: _step(by.fit, _callback),
        "a step by train_on_batch": _by_batches,
    }
    return {**beside, **itself} if of_tfmw else beside


def seconds(workers: int | None, only: str, cores: int = 1) -> dict[str, float]:
    """Measure -> its seconds, in fresh processes.

    Args:
        workers: number of tfmw's workers; None: Keras in one process.
        only: substring of the measures' names.
        cores: number of threads of an operation.
    """
    command = ["bench.short", "--only", only, "--in", "keras" if workers is None else "tfmw"]
    outputs = start(command, workers or 1, workers is not None, cores)
    line = next(text for text in outputs[0].splitlines() if text.startswith("{"))
    found: dict[str, float] = json.loads(line)
    return found


# Columns of the page: (tfmw's workers, cores of Keras in one process).
COLUMNS = {
    (1, 1): "one worker / Keras, both with one core",
    (2, 1): "two workers with one core each / Keras with one",
    (2, 2): "two workers / Keras with both cores",
}
Ratios = dict[tuple[str, tuple[int, int] | str], list[float]]
"""(measure, the column or what it is divided by) -> the ratios of the rounds."""


def measured(rounds: int = 3, only: str = "") -> Ratios:
    """Ratios of all measures."""
    ratios: Ratios = {}
    for _ in range(rounds):
        keras = {cores: seconds(None, only, cores) for cores in (1, 2)}
        ours = {workers: seconds(workers, only) for workers in (1, 2)}
        for name, (workers, cores) in itertools.product(BESIDE_KERAS, COLUMNS):
            if name in keras[cores] and workers in BESIDE_KERAS[name]:
                ratio = ours[workers][name] / keras[cores][name]
                ratios.setdefault((name, (workers, cores)), []).append(ratio)
        for name, against in BESIDE_ITSELF:
            if name in ours[2]:
                ratio = ours[2][name] / ours[2][against]
                ratios.setdefault((name, against), []).append(ratio)
    return ratios


def figures(ratios: Ratios) -> list[Figure]:
    """Each ratio, with its goal."""
    rows = []
    for (name, against), values in ratios.items():
        if isinstance(against, str):
            rows.append(Figure(f"{name} / {against}", values, BESIDE_ITSELF[name, against]))
        else:
            goal = BESIDE_KERAS[name][against[0]] if against[1] == 1 else None
            rows.append(Figure(f"{name}: {COLUMNS[against]}", values, goal))
    return rows


def page_table(ratios: Ratios) -> list[list[str]]:
    """The table of Benchmarks."""
    rows = [["", *COLUMNS.values()]]
    for name in BESIDE_KERAS:
        rows.append([name, *(span(ratios.get((name, column), [])) for column in COLUMNS)])
    return rows


def main() -> None:
    """Measures, prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="a part of the names")
    parser.add_argument("--in", dest="contender", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.contender is None:
        print(markdown(figures(measured(options.rounds, options.only))))
        return
    todo = measures(options.contender == "tfmw")
    needed = {
        *(name for name in todo if options.only in name),
        *(against for name, against in BESIDE_ITSELF if options.only in name and against in todo),
    }
    found = {name: todo[name]() for name in todo if name in needed}
    if os.environ.get("RANK", "0") == "0":
        json.dump(found, sys.stdout)
        print()


if __name__ == "__main__":
    main()
