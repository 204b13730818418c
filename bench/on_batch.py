"""The step of `tfmw.train_on_batch` beside that of `tfmw.fit`, on two workers.

    python -m bench.on_batch [--rounds 5] [--steps 200]

A small convolutional network, batches of 128, `steps_per_execution=1`. Rounds of both take turns in
one run; the ratio is the median of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import tfmw


def measured(rounds: int, steps: int) -> list[tuple[float, float]]:
    """Seconds per step of each round: (`train_on_batch`, `fit`)."""
    import keras
    import numpy as np
    import tensorflow as tf

    keras.utils.set_random_seed(1)

    def made() -> Any:
        layers = keras.layers
        model = keras.Sequential(
            [
                keras.Input((28, 28, 1)),
                layers.Conv2D(32, 3, activation="relu"),
                layers.MaxPooling2D(),
                layers.Flatten(),
                layers.Dense(64, activation="relu"),
                layers.Dense(10),
            ]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss, metrics=["accuracy"])
        return model

    x = np.random.default_rng(1).normal(size=[128, 28, 28, 1]).astype("float32")
    y: Any = np.arange(128) % 10
    dataset = tf.data.Dataset.from_tensors((x, y)).repeat()
    by_batch, by_fit = made(), made()

    def loop(count: int) -> None:
        for _ in range(count):
            tfmw.train_on_batch(by_batch, x, y)

    def fit(count: int) -> None:
        tfmw.fit(by_fit, dataset, steps_per_epoch=count, verbose=0)

    def seconds(run: Any) -> float:
        """Of one step: a longer run less a shorter one, without what each call costs once."""
        times = []
        for count in (steps // 4, steps):
            begin = time.perf_counter()
            run(count)
            times.append(time.perf_counter() - begin)
        return (times[1] - times[0]) / (steps - steps // 4)

    loop(3)
    fit(3)
    return [(seconds(loop), seconds(fit)) for _ in range(rounds)]


def main() -> None:
    """Prints the ratio."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    times = tfmw.launch(measured, (options.rounds, options.steps), workers=2)[0]
    ratios = [batch / fit for batch, fit in times]
    loop, fit = (1e3 * statistics.median(each) for each in zip(*times, strict=True))
    print(f"train_on_batch {loop:.2f} ms, fit {fit:.2f} ms, medians of {len(times)} rounds")
    print(f"ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")


if __name__ == "__main__":
    main()
