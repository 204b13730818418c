"""Trains a convolutional network on handwritten digits, on one process or many.

    python recipes/digits.py                                            # one process
    tfmw run --workers 2 recipes/digits.py --export_dir=build/digits    # two
    python recipes/digits.py --worker_hosts=localhost:2222,localhost:2223 --task_index=0  # by hand

The 1,797 images ship with tfmw (`tfmw.data.datasets.digits`); recipes/predict.py loads the export.
"""

from __future__ import annotations

import common
import keras
import tensorflow as tf
from common import FLAGS

import tfmw
from tfmw import datasets


def main() -> None:
    """Trains, reports and exports by the flags."""
    cluster = common.init()  # before any TensorFlow op, reading data included
    train, test = make_data(FLAGS.batch_size)
    model = make_model()
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


def make_data(batch_size: int) -> tuple[tf.data.Dataset, tf.data.Dataset]:
    """Training and test data: (image uint8 [batch, 8, 8, 1], label int64 [batch])."""
    train = datasets.load("tfmw_digits", "train", as_supervised=True)
    test = datasets.load("tfmw_digits", "test", as_supervised=True)
    return train.shuffle(2048).batch(batch_size), test.batch(batch_size)


def make_model() -> keras.Model:
    """Two convolutions and a classifier: 29,066 weights. Its input is the raw pixels."""
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1), dtype="uint8", name="image"),
            keras.layers.Rescaling(1 / 16),
            keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
            keras.layers.Conv2D(64, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(10, activation="softmax", name="probabilities"),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.Adam(4e-3),
        loss="sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )
    return model


if __name__ == "__main__":
    common.run(main)
