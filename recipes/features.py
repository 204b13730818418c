"""Trains on a table of features (numbers and categories), on one process or many.

    python recipes/features.py
    tfmw run --workers 2 recipes/features.py --export_dir=build/features
    tfmw run --workers 2 recipes/features.py --rows=s3://bucket/train-*.parquet --test_rows=...

`keras.utils.FeatureSpace` normalizes numbers, encodes categories and crosses them. It is adapted
before the training, on every worker from the same rows. The model, and so its export, takes the raw
columns. Without --rows they are synthetic: does a customer answer an offer?
"""

from __future__ import annotations

import common
import keras
import numpy as np
import tensorflow as tf
from absl import flags

import tfmw

FLAGS = flags.FLAGS
flags.DEFINE_list("rows", None, "Parquet files of training rows; synthetic rows by default.")
flags.DEFINE_list("test_rows", None, "Parquet files of test rows, with --rows.")
flags.DEFINE_string("cache_dir", None, "Local directory for columns of files in a bucket.")

JOBS = ["teacher", "nurse", "farmer", "clerk", "driver"]
CHANNELS = ["mail", "phone", "web"]


def main() -> None:
    """Trains, reports and exports by the flags."""
    cluster = common.init()  # before any TensorFlow op
    rows, test = read_rows(FLAGS.rows, 1, 8192), read_rows(FLAGS.test_rows, 2, 1024)
    model = make_model(rows.map(lambda features, label: features))
    train, test = rows.shuffle(8192).batch(FLAGS.batch_size), test.batch(FLAGS.batch_size)
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


def read_rows(files: list[str] | None, seed: int, count: int) -> tf.data.Dataset:
    """The rows of parquet files, or `count` synthetic ones: ({column: [1]}, label int64)."""
    if not files:
        return tf.data.Dataset.from_tensor_slices(make_rows(seed, count))
    names = ["age", "channel", "income", "job"]
    rows = tfmw.data.from_parquet(files, [*names, "label"], cache_dir=FLAGS.cache_dir)
    return rows.map(lambda row: ({name: row[name][None] for name in names}, row["label"]))


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


def make_model(features: tf.data.Dataset) -> keras.Model:
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
    space.adapt(features.batch(256))
    hidden = keras.layers.Dense(32, "relu")(space.get_encoded_features())
    output = keras.layers.Dense(1, "sigmoid", name="answers")(hidden)
    model = keras.Model(space.get_inputs(), output)
    model.compile(keras.optimizers.Adam(5e-3), "binary_crossentropy", metrics=["accuracy"])
    return model


if __name__ == "__main__":
    common.run(main)
