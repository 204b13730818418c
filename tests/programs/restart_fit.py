"""Trains a small model with backups and says each step: `restart_fit.py --backup_dir DIR`.

Each step prints "made step <n> <pid>", so that the parent can choose its moment; each result
carries the weights, bit for bit, and how often the model was trained on each example.
"""

import argparse
import hashlib
import os
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfmw
from tests.programs import _result

EXAMPLES, BATCH, REPLICAS = 96, 8, 2


class SayStep(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        print(f"made step {int(self.model.optimizer.iterations)} {os.getpid()}", flush=True)


class Count(keras.layers.Layer):
    """Passes its input on, and counts each example in a variable that is backed up with the rest.

    Each replica counts its own examples, and what is read is the mean over the replicas.
    """

    def build(self, shape):
        self.seen = self.add_weight(
            shape=(EXAMPLES,), initializer="zeros", trainable=False, aggregation="mean", name="seen"
        )

    def call(self, x, training=False):
        if training:
            self.seen.assign_add(keras.ops.sum(x[:, 4:], axis=0))
        return x[:, :4]


def main() -> None:
    flags = argparse.ArgumentParser()
    flags.add_argument("--backup_dir")
    flags.add_argument("--epochs", type=int, default=3)
    options = flags.parse_args()
    keras.utils.set_random_seed(3)
    x = np.random.default_rng(0).normal(size=(EXAMPLES, 4)).astype("float32")
    y = x @ np.array([[1.0], [-2.0], [0.5], [3.0]], "float32")
    one_hot: np.ndarray[Any, Any] = np.eye(EXAMPLES, dtype="float32")
    inputs = keras.Input((4 + EXAMPLES,))
    hidden = keras.layers.Dense(8, activation="tanh")(Count()(inputs))
    hidden = keras.layers.Dropout(0.1)(hidden)
    model = keras.Model(inputs, keras.layers.Dense(1)(hidden))
    model.compile(keras.optimizers.Adam(0.02), "mse")
    dataset = tf.data.Dataset.from_tensor_slices((np.hstack([x, one_hot]), y))
    dataset = dataset.shuffle(EXAMPLES).batch(BATCH)
    history = tfmw.fit(
        model,
        dataset,
        epochs=options.epochs,
        verbose=0,
        callbacks=[SayStep()],
        backup_dir=options.backup_dir,
        backup_every=4,
        seed=11,
    )
    digest = hashlib.sha256(b"".join(w.tobytes() for w in model.get_weights())).hexdigest()
    _result.write(
        {
            "weights": digest,
            "seen": [REPLICAS * float(n) for n in model.layers[1].seen.numpy()],
            "iterations": int(model.optimizer.iterations),
            "history": history.history,
            "attempt": int(os.environ.get("TFMW_ATTEMPT", 0)),
        }
    )


if __name__ == "__main__":
    main()
