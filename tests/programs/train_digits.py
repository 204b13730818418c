"""Trains on all 1,797 digits, batch 64, so that the last batch has 5; says what came out."""

from __future__ import annotations

import hashlib
import json
import sys

import tfmw

cluster = tfmw.init()

import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

import tfmw.datasets  # noqa: E402
from tests.programs._result import write  # noqa: E402

EXAMPLES = 1797
BATCH = 64


class Seen(keras.metrics.Metric):
    """Number of times that each example was trained on, one count per example."""

    def __init__(self) -> None:
        super().__init__(name="seen")
        self.counts = self.add_weight(shape=(EXAMPLES,), initializer="zeros", name="counts")

    def update_state(self, ids, *_, **__) -> None:
        self.counts.assign_add(tf.reduce_sum(tf.one_hot(ids, EXAMPLES), axis=0))

    def result(self):
        # One number for both faults: examples not seen once, over all replicas.
        return tf.reduce_sum(tf.cast(self.counts != 1.0, tf.float32))


def network() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(8, 3, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(10),
        ]
    )


def compiled(seed: int) -> keras.Model:
    keras.utils.set_random_seed(seed)
    model = network()
    model.compile(
        keras.optimizers.Adam(0.01),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


class Recorded(keras.Model):
    """Counts which examples each step was given; the label of example i is i."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()
        self.seen = Seen()

    def call(self, x):
        return self.inner(x)

    def train_step(self, data):
        x, ids = data
        self.seen.update_state(ids)
        return super().train_step((x, ids % 10)) | {"seen": self.seen.result()}


def dataset() -> tf.data.Dataset:
    rows = tfmw.datasets.load("tfmw_digits", "train+test", as_supervised=True, shuffle_files=False)
    return rows.map(lambda image, label: (tf.cast(image, tf.float32) / 16.0, label))


def sha(model: keras.Model) -> str:
    variables = [v.numpy() for v in [*model.weights, *model.optimizer.variables]]
    return hashlib.sha256(b"".join(v.tobytes() for v in variables)).hexdigest()


def main(devices: int) -> None:
    strategy: object = "auto"
    if devices > 1:
        tf.config.set_logical_device_configuration(
            tf.config.list_physical_devices("CPU")[0],
            [tf.config.LogicalDeviceConfiguration()] * devices,
        )
        strategy = tfmw.strategies.mirrored([f"CPU:{i}" for i in range(devices)])
    # Seeds differ between workers: the chief's weights must win.
    model = compiled(seed=1 + 10 * cluster.rank if cluster.num_workers else 1)
    history = tfmw.fit(model, dataset().batch(BATCH), epochs=2, verbose=2, strategy=strategy)

    unseeded = dataset().enumerate().map(lambda i, row: (row[0], i)).shuffle(EXAMPLES).batch(BATCH)
    recorded = Recorded()
    recorded.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    coverage = tfmw.fit(recorded, unseeded, epochs=2, verbose=0, strategy=strategy)
    write(
        {
            "history": history.history,
            "sha": sha(model),
            "weights": [np.asarray(w).ravel()[:5].tolist() for w in model.get_weights()],
            "not_once": coverage.history["seen"],
            "printed": cluster.is_chief,
        }
    )


if __name__ == "__main__":
    if sys.argv[1:] == ["reference"]:
        reference = compiled(seed=1)
        logs = reference.fit(dataset().batch(BATCH), epochs=2, verbose=0, shuffle=False).history
        weights = [w.ravel()[:5].tolist() for w in reference.get_weights()]
        print(json.dumps({"history": logs, "weights": weights}))
    else:
        main(int(sys.argv[1]))
