"""Small data sets and models that many rows share."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

EXAMPLES = 37  # batches of 8: five steps, the last of 5, which 2, 3 and 4 replicas share unevenly
BATCH = 8


def numbers(examples: int = EXAMPLES, features: int = 5, classes: int = 3) -> tuple[Any, Any]:
    """Arrays x float32 [examples, features] and y int32 [examples]."""
    random = np.random.default_rng(7)
    x = random.normal(size=(examples, features)).astype("float32")
    y = (x @ random.normal(size=(features, classes))).argmax(-1).astype("int32")
    return x, y


def batches(x: Any, y: Any, batch: int = BATCH, *more: Any) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((x, y, *more)).batch(batch)


def classes(examples: int = EXAMPLES, batch: int = BATCH) -> tf.data.Dataset:
    return batches(*numbers(examples), batch)


def mlp(classes: int = 3, **options: Any) -> keras.Model:
    return keras.Sequential(
        [
            keras.layers.Input([5]),
            keras.layers.Dense(6, activation="tanh", **options),
            keras.layers.Dense(classes),
        ]
    )


def compiled(model: keras.Model, optimizer: Any = "adam", **options: Any) -> keras.Model:
    """Compiled for sparse integer labels and logits."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    options = {"loss": loss, "metrics": ["accuracy"], **options}
    model.compile(optimizer=optimizer, **options)
    return model


def adam(rate: float = 0.01, **options: Any) -> keras.optimizers.Optimizer:
    # The epsilon is large. With Keras's 1e-7, Adam's first step on a gradient of mere rounding
    # errors is as large as on any other. Two orders of summation would never agree then.
    return keras.optimizers.Adam(rate, epsilon=1e-3, **options)
