"""A model whose class prepares the data in methods of its own, as KerasHub's tasks do."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

BATCH = 3
X = 100 * np.random.default_rng(2).normal(size=(22, 4)).astype("float32")
Y = X.sum(axis=1, keepdims=True) / 100


class Prepared(keras.Sequential):
    """Divides its inputs by 100, and has a number of epochs of its own.

    Attributes:
        prepares_in_fit: whether `fit` prepares the validation data, too, and `evaluate` takes what
            Keras's `fit` has kept of them; otherwise `evaluate` prepares them for each validation.
        in_python: whether Python prepares the batches.
    """

    prepares_in_fit = False
    in_python = True

    def batches(self, x: Any, y: Any) -> tf.data.Dataset:
        def divided(x: Any, y: Any) -> Any:
            if not self.in_python:
                return x / 100, y
            prepared = tf.numpy_function(lambda x: x / np.float32(100), [x], tf.float32)
            return tf.ensure_shape(prepared, x.shape), y

        return tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH).map(divided)

    def fit(
        self, features: Any, labels: Any, epochs: int = 2, validation_data: Any = None, **rest: Any
    ) -> Any:
        if self.prepares_in_fit and validation_data is not None:
            validation_data = self.batches(*validation_data)
        data = self.batches(features, labels)
        history = super().fit(data, epochs=epochs, validation_data=validation_data, **rest)
        history.history["after"] = self.evaluate(features, labels, verbose=0)
        return history

    def evaluate(self, x: Any = None, y: Any = None, **rest: Any) -> Any:
        if self.prepares_in_fit and rest.get("_use_cached_eval_dataset"):
            return super().evaluate(x, y, **rest)
        rest.pop("_use_cached_eval_dataset", None)
        result = super().evaluate(self.batches(x, y), **rest)
        if isinstance(result, dict):
            result["largest weight"] = max(float(np.abs(w).max()) for w in self.get_weights())
        return result

    def predict(self, x: Any, **rest: Any) -> Any:
        return 10 * super().predict(x / 100, **rest)

    def train_on_batch(self, x: Any, y: Any, **rest: Any) -> Any:
        return super().train_on_batch(x / 100, y, **rest)

    def test_on_batch(self, x: Any, y: Any, **rest: Any) -> Any:
        return super().test_on_batch(x / 100, y, **rest)


def prepared(prepares_in_fit: bool = False, in_python: bool = True) -> Prepared:
    """A compiled model with the same weights each time."""
    keras.utils.set_random_seed(1)
    model = Prepared([keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(1)])
    model.prepares_in_fit, model.in_python = prepares_in_fit, in_python
    model.compile(keras.optimizers.SGD(0.01), "mse", metrics=["mae"])
    return model
