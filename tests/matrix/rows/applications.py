"""Models from keras.applications, untrained, on small images, with synchronized statistics.

By default, each replica would normalize by its own shard of the batch: see the row
BatchNormalization. The rows use float64, because another order of summation causes differences of
1e-7. Dozens of normalizations over 8 examples of one pixel each raise them to 1e-1 within two
steps.
"""

from __future__ import annotations

import keras
import numpy as np

from tests.matrix.row import Case, row
from tests.matrix.rows.common import batches, compiled


def _images(model: keras.Model) -> Case:
    for layer in model.layers:
        if isinstance(layer, keras.layers.BatchNormalization):
            layer.synchronized = True
    random = np.random.default_rng(9)
    x = random.normal(size=(16, 32, 32, 3)).astype("float64")
    y = random.integers(0, 3, 16).astype("int32")
    loss = keras.losses.SparseCategoricalCrossentropy()
    trained = compiled(model, keras.optimizers.SGD(0.01, momentum=0.9), loss=loss)
    return Case(trained, batches(x, y), fit={"epochs": 1}, evaluate=None, predict=None)


def _mobile_net() -> keras.Model:
    return keras.applications.MobileNetV2((32, 32, 3), alpha=0.35, weights=None, classes=3)


def _res_net() -> keras.Model:
    return keras.applications.ResNet50(weights=None, input_shape=(32, 32, 3), classes=3)


@row(
    "MobileNetV2, synchronized statistics", nightly=True, floatx="float64", tol=1e-9, only=("two",)
)
def mobile_net_synchronized() -> Case:
    return _images(_mobile_net())


@row("ResNet50, synchronized statistics", floatx="float64", tol=1e-9, only=("two",), nightly=True)
def res_net_synchronized() -> Case:
    return _images(_res_net())
