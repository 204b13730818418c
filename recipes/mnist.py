"""TensorFlow's multi-worker tutorial network on MNIST, read with TensorFlow Datasets.

    tfmw run --workers 2 recipes/mnist.py --epochs=3

TFDS downloads MNIST (11 MB) the first time; see recipes/common.py for the flags.
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
    """Training and test data: (image uint8 [batch, 28, 28, 1], label int64 [batch])."""
    train = datasets.load("mnist", "train", as_supervised=True)
    test = datasets.load("mnist", "test", as_supervised=True)
    return train.shuffle(10_000).batch(batch_size), test.batch(batch_size)


def make_model() -> keras.Model:
    """The network of tensorflow.org/tutorials/distribute/multi_worker_with_keras."""
    model = keras.Sequential(
        [
            keras.Input((28, 28, 1), dtype="uint8", name="image"),
            keras.layers.Rescaling(1 / 255),
            keras.layers.Conv2D(32, 3, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dense(10, name="logits"),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.SGD(1e-3),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


if __name__ == "__main__":
    common.run(main)
