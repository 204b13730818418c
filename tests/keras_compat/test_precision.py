"""fit(precision=...): which type layers compute in, and which one everything else keeps."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import tfmw
from tfmw import UsageError

X = np.random.default_rng(0).normal(size=(40, 5)).astype("float32")
Y = X.sum(axis=1, keepdims=True)


class Noting(keras.layers.Layer):
    """Notes in which type it is called."""

    def __init__(self):
        super().__init__()
        self.seen: list[tuple[bool, str]] = []

    def call(self, x, training=False):
        self.seen.append((bool(training), x.dtype.name))
        return x


def model(optimizer):
    """(model, its noting layer); its last layer is float64 by the user's own choice."""
    keras.utils.set_random_seed(1)
    noting = Noting()
    layers = [keras.Input([5]), keras.layers.Dense(8), noting, keras.layers.Dense(1)]
    network = keras.Sequential([*layers, keras.layers.Activation("linear", dtype="float64")])
    network.compile(optimizer, "mse")
    return network, noting


@pytest.mark.process
@pytest.mark.parametrize(
    ("precision", "optimizer"),
    [
        ("mixed_bfloat16", keras.optimizers.SGD(0.1)),
        ("mixed_float16", keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))),
    ],
)
def test_layers_compute_in_16_bits_while_they_train(precision, optimizer):
    network, noting = model(optimizer)
    network.predict(X, verbose=0)
    noting.seen.clear()
    history = tfmw.fit(network, X, Y, epochs=8, precision=precision, verbose=0)
    in_training = {kind for training, kind in noting.seen if training}
    assert in_training == {precision.removeprefix("mixed_")}
    assert history.history["loss"][-1] < 0.1 * history.history["loss"][0]
    assert {v.dtype for v in network.trainable_weights} == {"float32"}
    assert network.layers[-1].dtype_policy.name == "float64"
    noting.seen.clear()
    tfmw.evaluate(network, X, Y, verbose=0)
    assert {kind for _, kind in noting.seen} == {"float32"}


def test_a_step_that_fails_leaves_a_float32_model():
    network, _ = model("sgd")
    with pytest.raises(ValueError, match=r"ncompatible|shape"):
        tfmw.fit(network, X[:, :3], Y, precision="mixed_bfloat16", verbose=0)
    assert {layer.dtype_policy.name for layer in network.layers[:-1]} == {"float32"}


def test_float16_without_a_loss_scale_is_refused():
    network, _ = model("sgd")
    with pytest.raises(UsageError, match=r"LossScaleOptimizer\(optimizer\), or use"):
        tfmw.fit(network, X, Y, precision="mixed_float16", verbose=0)


def test_an_unknown_precision_is_refused_before_anything_starts():
    network, _ = model("sgd")
    with pytest.raises(UsageError, match="unknown precision 'half'"):
        tfmw.fit(network, X, Y, precision="half", workers=2)
