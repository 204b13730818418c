"""Trains on a table of features (numbers and categories), on one process or many.

    python recipes/features.py
    tfmw run --workers 2 recipes/features.py --export_dir=build/features

`keras.utils.FeatureSpace` normalizes numbers, encodes categories and crosses them. It is adapted
before the training, on every worker from the same rows. The model, and so its export, takes the raw
columns. The rows are synthetic: does a customer answer an offer?
"""

from __future__ import annotations

import common
import keras
import numpy as np
import tensorflow as tf
from common import FLAGS

import tfmw

JOBS = ["teacher", "nurse", "farmer", "clerk", "driver"]
CHANNELS = ["mail", "phone", "web"]


def main() -> None:
    """Trains, reports and exports by the flags."""
    cluster = common.init()  # before any TensorFlow op
    features, labels = make_rows(1, 8192)
    train = batches(features, labels, FLAGS.batch_size)
    test = batches(*make_rows(2, 1024), FLAGS.batch_size)
    model = make_model(features)
    train, epochs, steps = common.limits(train, cluster)
    history = tfmw.fit(
        model,
        train,
        epochs=epochs,
        steps_per_epoch=steps,
        validation_data=test,
        strategy=FLAGS.strategy,
        backup_dir=FLAGS.backup_dir,
        export_dir=FLAGS.export_dir,
    )
    common.report(history, cluster)


def make_rows(seed: int, count: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """({column: [count, 1]}, label int64 [count]), the same on every worker."""
    random = np.random.default_rng(seed)
    age = random.uniform(18, 80, [count, 1]).astype("float32")
    income = random.lognormal(10, 0.5, [count, 1]).astype("float32")
    job = random.choice(JOBS, [count, 1])
    channel = random.choice(CHANNELS, [count, 1])
    # Some jobs answer by one channel, others by another; older customers answer more.
    fits = (job == "farmer") & (channel == "mail") | (job == "clerk") & (channel == "web")
    score = (age - 45) / 10 + 4 * fits - (income > 30_000) - 0.5
    label = (score[:, 0] > random.normal(0, 0.3, count)).astype("int64")
    features = {"age": age, "channel": channel, "income": income, "job": job}
    return features, label


def batches(
    features: dict[str, np.ndarray], labels: np.ndarray, batch_size: int
) -> tf.data.Dataset:
    """Shuffled batches of the global batch size."""
    data = tf.data.Dataset.from_tensor_slices((features, labels))
    return data.shuffle(len(labels)).batch(batch_size)


def make_model(features: dict[str, np.ndarray]) -> keras.Model:
    """An encoder of the columns, adapted to these rows, and two dense layers."""
    space = keras.utils.FeatureSpace(
        features={
            "age": keras.utils.FeatureSpace.float_normalized(),
            "income": keras.utils.FeatureSpace.float_discretized(num_bins=10),
            "job": keras.utils.FeatureSpace.string_categorical(num_oov_indices=1),
            "channel": keras.utils.FeatureSpace.string_categorical(num_oov_indices=1),
        },
        crosses=[keras.utils.FeatureSpace.cross(("job", "channel"), crossing_dim=32)],
        output_mode="concat",
    )
    space.adapt(tf.data.Dataset.from_tensor_slices(features).batch(256))
    hidden = keras.layers.Dense(32, "relu")(space.get_encoded_features())
    output = keras.layers.Dense(1, "sigmoid", name="answers")(hidden)
    model = keras.Model(space.get_inputs(), output)
    model.compile(keras.optimizers.Adam(5e-3), "binary_crossentropy", metrics=["accuracy"])
    return model


if __name__ == "__main__":
    common.run(main)
