"""Variables of users' own, to which a batch is added once, or each of its examples."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from tests.matrix.row import Case, row
from tests.matrix.rows.common import adam, batches, compiled, numbers


class Adds(keras.metrics.Metric):
    """The quotient of two sums over batches."""

    def __init__(self, name: str, above: Any, below: Any) -> None:
        super().__init__(name=name)
        self.above, self.below = above, below
        self.total = self.add_weight(name="total", initializer="zeros")
        self.count = self.add_weight(name="count", initializer="zeros")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.total.assign_add(self.above(y_pred))
        self.count.assign_add(self.below(y_pred))

    def result(self) -> Any:
        return self.total / self.count


def examples(t: Any) -> Any:
    return ops.cast(ops.shape(t)[0], "float32")


def own_metrics() -> list[Adds]:
    return [
        Adds("mean_of_means", ops.mean, lambda t: 1.0),
        Adds("sum_of_batch", ops.sum, lambda t: 1.0),
        Adds("mean_of_examples", ops.sum, examples),
        Adds("batches", lambda t: 3.0, lambda t: 0.5),
        Adds("examples_per_batch", examples, lambda t: 1.0),
    ]


class Seen(layers.Layer):
    """Counts what it has seen, in variables that no loss depends on."""

    def build(self, shape: Any) -> None:
        def state(name: str) -> Any:
            return self.add_weight(
                name=name, shape=(shape[-1],), initializer="ones", trainable=False
            )

        self.sums, self.of_late, self.batches = state("sums"), state("of_late"), state("batches")
        self.examples, self.means = state("examples"), state("means")

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            self.sums.assign_add(ops.sum(x, axis=0))
            self.of_late.assign(0.9 * self.of_late + 0.1 * ops.sum(x * x, axis=0))
            self.batches.assign_add(ops.ones_like(self.batches))
            self.examples.assign_add(self.batches * 0 + examples(x))
            self.means.assign(0.9 * self.means + 0.1 * ops.mean(x, axis=0))
        return x


def counting(metrics: list[Any]) -> keras.Model:
    model = keras.Sequential([keras.Input([5]), Seen(), layers.Dense(3)])
    return compiled(model, adam(), metrics=metrics)


@row("metrics and layers of one's own that add up", nightly=True, only=("devices", "two"))
def adding_up() -> Case:
    data = tf.data.Dataset.from_tensor_slices(numbers()).batch(8)
    return Case(counting(own_metrics()), data, predict=None)


class Variables(keras.metrics.Metric):
    """Counts in variables that its result is."""

    def __init__(self) -> None:
        super().__init__(name="variables")
        self.count = self.add_weight(name="count", initializer="zeros", dtype="int32")
        self.sums = self.add_weight(name="sums", shape=(2,), initializer="zeros")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        above = ops.sum(ops.cast(y_pred[:, :2] > 0.4, "float32"), axis=0)
        self.sums.assign_add(above)
        self.count.assign_add(ops.cast(ops.sum(above), "int32"))

    def result(self) -> Any:
        gathered = {"second": tf.gather(self.sums, 1), "first": ops.take(self.sums, 0)}
        return {"count": self.count, "sums": ops.convert_to_tensor(self.sums), **gathered}


class Reporting(keras.Sequential):
    """A step whose logs are a metric's result, which is a variable, and a metric's variable."""

    def __init__(self, steps: list[Any]) -> None:
        super().__init__(steps)
        self.positives = keras.metrics.TruePositives(name="positives")

    def train_step(self, data: Any) -> Any:
        logs = super().train_step(data)
        x, y = data
        self.positives.update_state(y > 0, self(x))
        logs["positives"] = self.positives.result()
        return {**logs, "variable": self.positives.accumulator}


@row("metrics whose results are their variables", only=("devices", "two"))
def of_variables() -> Case:
    x, y = numbers()
    model = Reporting([keras.Input([5]), layers.Dense(3, activation="sigmoid")])
    metrics = [Variables(), keras.metrics.FalseNegatives([0.4, 0.6], name="negatives")]
    model.compile(adam(), "mse", metrics=metrics)
    return Case(model, batches(x, keras.utils.to_categorical(y)), predict=None)


class Scalars(layers.Layer):
    def call(self, x: Any) -> Any:
        self.add_loss(0.01 * ops.sum(ops.square(x)))
        self.add_loss(0.1 * ops.mean(ops.square(x)))
        return x


class Tracking(keras.Model):
    """Gives a sum and a mean of a batch to metrics."""

    def __init__(self) -> None:
        super().__init__()
        self.net = keras.Sequential([layers.Dense(4), Scalars(), layers.Dense(3)])
        self.sums, self.means = keras.metrics.Mean(name="sums"), keras.metrics.Sum(name="means")

    def call(self, x: Any) -> Any:
        return self.net(x)

    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        self.sums.update_state(ops.sum(y_pred))
        self.means.update_state(ops.mean(y_pred))
        return super().compute_metrics(x, y, y_pred, sample_weight)


@row("sums over batches of known size", nightly=True, only=("devices", "two"))
def of_known_size() -> Case:
    # Replicas have four examples each, as many as the hidden layer has units.
    data = tf.data.Dataset.from_tensor_slices(numbers()).batch(8, drop_remainder=True)
    return Case(compiled(Tracking(), adam(), metrics=own_metrics()[:2]), data, predict=None)


@row("BatchNormalization, synchronized, of masked sequences", nightly=True, only=("devices", "two"))
def masked_norm() -> Case:
    random = np.random.default_rng(5)
    tokens = random.integers(1, 9, (37, 6)) * (np.arange(6) < random.integers(1, 7, (37, 1)))
    y = random.integers(0, 3, (37, 6)).astype("int32")
    model = keras.Sequential(
        [
            keras.Input([6], dtype="int32"),
            layers.Embedding(9, 4, mask_zero=True),
            layers.BatchNormalization(synchronized=True, momentum=0.5),
            layers.Dense(3),
        ]
    )
    data = tf.data.Dataset.from_tensor_slices((tokens.astype("int32"), y)).batch(8)
    return Case(compiled(model, adam()), data, predict=None)
