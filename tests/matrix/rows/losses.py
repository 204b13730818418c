"""Losses, weights and metrics."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from tests.matrix.row import Case, row
from tests.matrix.rows.common import EXAMPLES, adam, batches, classes, compiled, mlp, numbers


@row("regularizers of kernel and bias", nightly=True, core=True)
def regularizers() -> Case:
    model = mlp(kernel_regularizer="l2", bias_regularizer="l1")
    return Case(compiled(model, adam()), classes(), predict=None)


# Not in the core: the oldest Keras does not divide it by the batch size, so it is a sum there.
@row("regularizer of the activity", nightly=True)
def activity_regularizer() -> Case:
    model = mlp(activity_regularizer="l2")
    return Case(compiled(model, adam()), classes(), predict=None)


def _weights() -> Any:
    return np.random.default_rng(4).uniform(0, 3, EXAMPLES).astype("float32")


@row("sample weights in the dataset", core=True, nightly=True)
def sample_weights() -> Case:
    model = compiled(mlp(), adam(), weighted_metrics=["accuracy"])
    return Case(model, batches(*numbers(), 8, _weights()), predict=None)


# As exactly as float64 sums: nothing on the way may be rounded to float32.
@row(
    "float64, sample weights and an uneven batch",
    nightly=True,
    floatx="float64",
    tol=1e-11,
    core=True,
)
def sample_weights_in_float64() -> Case:
    model = compiled(mlp(), keras.optimizers.SGD(0.1), weighted_metrics=["accuracy"])
    return Case(model, batches(*numbers(), 8, _weights().astype("float64")))


@row("sample weights of arrays", nightly=True)
def sample_weight_argument() -> Case:
    model = compiled(mlp(), adam(), weighted_metrics=["accuracy"])
    x, y = numbers()
    return Case(
        model, x, y, {"sample_weight": _weights(), "batch_size": 8, "shuffle": False}, predict=None
    )


@row("class weights", nightly=True)
def class_weights() -> Case:
    model = compiled(mlp(), adam(), weighted_metrics=["accuracy"])
    return Case(model, classes(), fit={"class_weight": {0: 1.0, 1: 2.0, 2: 0.5}}, predict=None)


@row("AUC, precision, recall, F1, MeanIoU, top-k", core=True, nightly=True, logs_tol=1e-4)
def metrics() -> Case:
    model = keras.Sequential([keras.Input([5]), layers.Dense(3, activation="softmax")])
    x, y = numbers()
    model.compile(
        adam(),
        loss="categorical_crossentropy",
        metrics=[
            keras.metrics.AUC(name="auc", num_thresholds=20),
            keras.metrics.Precision(name="precision"),
            keras.metrics.Recall(name="recall"),
            keras.metrics.F1Score(name="f1", average="macro"),
            keras.metrics.OneHotMeanIoU(3, name="iou"),
            keras.metrics.TopKCategoricalAccuracy(2, name="top2"),
            keras.metrics.R2Score(name="r2"),
            keras.metrics.RootMeanSquaredError(name="rmse"),
        ],
    )
    return Case(model, batches(x, np.eye(3, dtype="float32")[y]), predict=None)


class Confusions(keras.metrics.Metric):
    """A metric of the user's own: how often class 0 was taken for class 1 and the other way."""

    def __init__(self) -> None:
        super().__init__(name="confusions")
        self.counts = self.add_variable((2,), "zeros", name="counts")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        guess = ops.argmax(y_pred, axis=-1)
        a = ops.sum(ops.cast((y_true == 0) & (guess == 1), "float32"))
        b = ops.sum(ops.cast((y_true == 1) & (guess == 0), "float32"))
        self.counts.assign(self.counts + ops.stack([a, b]))

    def result(self) -> Any:
        return {"confused_0": self.counts[0], "confused_1": self.counts[1]}


def mean_margin(y_true: Any, y_pred: Any) -> Any:
    return ops.max(y_pred, axis=-1) - ops.mean(y_pred, axis=-1)


@row("custom metrics: a class with dict results, a function", nightly=True)
def custom_metrics() -> Case:
    return Case(
        compiled(mlp(), adam(), metrics=[Confusions(), mean_margin]), classes(), predict=None
    )


class Largest(keras.metrics.Metric):
    """A metric that is not a sum over examples, and whose state does not begin at zero."""

    def __init__(self) -> None:
        super().__init__(name="largest")
        self.most = self.add_variable((), keras.initializers.Constant(-9.0), name="most")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.most.assign(ops.maximum(self.most, ops.max(y_pred)))

    def result(self) -> Any:
        return self.most.value

    def reset_state(self) -> None:
        self.most.assign(-9.0)


@row("custom metric that is a maximum, not a sum", nightly=True)
def maximum() -> Case:
    return Case(compiled(mlp(), adam(), metrics=[Largest(), "accuracy"]), classes(), predict=None)


@row("loss with reduction sum", nightly=True, core=True)
def reduction_sum() -> Case:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")
    return Case(compiled(mlp(), adam(), loss=loss), classes(), predict=None)


def not_reduced(**options: Any) -> Case:
    """Keras differentiates the sum of the values, and reports their mean."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)
    return Case(compiled(mlp(), adam(), loss=loss, **options), classes(), predict=None)


row("loss without a reduction", nightly=True)(not_reduced)


@row("loss without a reduction, run_eagerly", nightly=True, only=("devices",))
def not_reduced_eagerly() -> Case:
    return not_reduced(run_eagerly=True)


@row("loss with reduction mean_with_sample_weight", nightly=True)
def reduction_weighted() -> Case:
    loss = keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction="mean_with_sample_weight"
    )
    return Case(
        compiled(mlp(), adam(), loss=loss), batches(*numbers(), 8, _weights()), predict=None
    )


@row("custom loss function that returns one number", nightly=True, core=True)
def scalar() -> Case:
    def loss(y_true: Any, y_pred: Any) -> Any:
        return ops.mean(ops.square(y_pred - y_true))

    x, y = numbers()
    return Case(
        compiled(mlp(), adam(), loss=loss), batches(x, np.eye(3, dtype="float32")[y]), predict=None
    )


class OwnCall(keras.losses.Loss):
    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        return ops.mean(ops.abs(y_pred - y_true))


@row("custom loss class with a __call__ of its own", nightly=True)
def own_call() -> Case:
    x, y = numbers()
    model = compiled(mlp(), adam(), loss=OwnCall())
    return Case(model, batches(x, np.eye(3, dtype="float32")[y]), predict=None)


class PerExample(layers.Layer):
    def call(self, x: Any) -> Any:
        self.add_loss(0.1 * ops.sum(ops.square(x)))
        return x


@row("add_loss of a sum over examples", nightly=True)
def add_loss_sum() -> Case:
    model = keras.Sequential([keras.Input([5]), layers.Dense(3), PerExample()])
    return Case(compiled(model, adam()), classes(), predict=None)


class Endpoint(layers.Layer):
    """The endpoint layer of Keras's guides: a layer that computes the loss."""

    def __init__(self, reduction: str = "sum_over_batch_size") -> None:
        super().__init__()
        self.loss_fn = keras.losses.SparseCategoricalCrossentropy(
            from_logits=True, reduction=reduction
        )

    def call(self, labels: Any, logits: Any, weights: Any = None) -> Any:
        self.add_loss(self.loss_fn(labels, logits, weights))
        return ops.softmax(logits)


def _endpoint(weighted: bool, reduction: str = "sum_over_batch_size") -> Case:
    x, y = numbers()
    arrays = {"x": x, "labels": y, **({"weights": _weights()} if weighted else {})}
    inputs = {k: keras.Input(v.shape[1:], dtype=v.dtype.name, name=k) for k, v in arrays.items()}
    logits = layers.Dense(3, kernel_regularizer="l2")(inputs["x"])
    outputs = Endpoint(reduction)(inputs["labels"], logits, inputs.get("weights"))
    model = keras.Model(inputs, outputs)
    model.compile(adam())
    return Case(model, tf.data.Dataset.from_tensor_slices(arrays).batch(8), predict=None)


@row("endpoint layer: add_loss of a keras.losses object", nightly=True, core=True)
def endpoint() -> Case:
    return _endpoint(weighted=False)


@row("endpoint layer with sample weights", nightly=True)
def weighted_endpoint() -> Case:
    return _endpoint(weighted=True)


@row("endpoint layer, reduction sum", nightly=True)
def summed_endpoint() -> Case:
    return _endpoint(weighted=True, reduction="sum")


@row("endpoint layer, reduction mean_with_sample_weight", nightly=True)
def mean_weighted_endpoint() -> Case:
    return _endpoint(weighted=True, reduction="mean_with_sample_weight")


class WeightPenalty(layers.Dense):
    """add_loss of values that belong to weights, not to examples."""

    def call(self, x: Any) -> Any:
        self.add_loss(0.1 * ops.square(self.kernel))
        return super().call(x)


@row("add_loss of one value per weight", nightly=True)
def penalty_per_weight() -> Case:
    model = keras.Sequential([keras.Input([5]), WeightPenalty(3)])
    return Case(compiled(model, adam()), classes(), predict=None)


class Penalized(layers.Layer):
    def call(self, x: Any) -> Any:
        self.add_loss(0.1 * ops.mean(ops.square(x)))
        return x


@row("add_loss before replicas exchange values in the middle of the step", nightly=True)
def add_loss_before_exchange() -> Case:
    model = keras.Sequential(
        [
            keras.Input([5]),
            layers.Dense(6),
            Penalized(),
            layers.BatchNormalization(synchronized=True),
            Penalized(),
            layers.Dense(3),
        ]
    )
    return Case(compiled(model, adam()), classes(), predict=None)


def in_batch_negatives(y_true: Any, y_pred: Any) -> Any:
    scores = ops.matmul(y_pred, ops.transpose(y_pred))
    targets = ops.arange(ops.shape(y_pred)[0])
    return keras.losses.sparse_categorical_crossentropy(targets, scores, from_logits=True)


@row(
    "loss that compares the examples of a batch",
    nightly=True,
    but="a replica compares the examples of its own part of the batch",
    equal=(),
    warns="compares the examples of a batch",
)
def coupled() -> Case:
    return Case(compiled(mlp(), adam(), loss=in_batch_negatives, metrics=[]), classes())
