"""Settings of a model that workers compare before they train it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, losses, optimizers

from tfmw.train.mirrored.settings import Settings


def model(*parts: Any, optimizer: Any = "sgd", loss: Any = "mse", **compiled: Any) -> keras.Model:
    made = keras.Sequential([keras.Input([4]), *parts, layers.Dense(1)])
    made.compile(optimizer, loss, **compiled)
    if compiled:
        made.test_on_batch(np.ones([2, 4]), np.ones([2, 1]))  # builds its metrics
    return made


class Scaled(layers.Layer):
    def __init__(self, factor: float, folder: str = "", **others: Any) -> None:
        super().__init__(**others)
        self.factor, self.folder = factor, folder

    def call(self, inputs: Any) -> Any:
        return inputs * self.factor

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "factor": self.factor, "folder": self.folder}


class Unsaved(layers.Layer):
    """A layer that cannot be saved: it has no configuration."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def call(self, inputs: Any) -> Any:
        return self.function(inputs)


@pytest.mark.parametrize(
    ("setting", "of"),
    [
        ("layer 2: Dropout, rate", lambda v: model(layers.Dropout(0.1 * v))),
        (
            "layer 2: Activation, activation",
            lambda v: model(layers.Activation(["elu", "gelu"][v])),
        ),
        (
            "layer 2: Dense, kernel_regularizer",
            lambda v: model(layers.Dense(4, kernel_regularizer=keras.regularizers.L2(0.1 * v))),
        ),
        (
            "layer 2: Dense, dtype",
            lambda v: model(layers.Dense(4, dtype=["float32", "mixed_bfloat16"][v])),
        ),
        ("layer 2: Scaled, factor", lambda v: model(Scaled(1.0 + v))),
        (
            "layer 2: StringLookup, vocabulary",
            lambda v: model(layers.StringLookup(vocabulary=["a", "b", "cd"[v]])),
        ),
        ("optimizer", lambda v: model(optimizer=["adam", "nadam"][v])),
        ("optimizer: SGD, momentum", lambda v: model(optimizer=optimizers.SGD(0.1, 0.1 * v))),
        (
            "learning_rate",
            lambda v: model(optimizer=optimizers.SGD(optimizers.schedules.CosineDecay(0.1 + v, 9))),
        ),
        ("loss", lambda v: model(loss=["mae", "mse"][v])),
        (
            "object: MeanSquaredError, reduction",
            lambda v: model(loss=losses.MeanSquaredError(["sum", "mean"][v])),
        ),
        ("arguments of losses", lambda v: model(loss=losses.Huber(1.0 + v))),
        ("loss_weights", lambda v: model(loss_weights=[1.0 + v])),
        (
            "metric binary_accuracy: BinaryAccuracy, threshold",
            lambda v: model(metrics=[keras.metrics.BinaryAccuracy(threshold=0.1 * v)]),
        ),
    ],
)
def test_settings_that_change_a_result_are_compared(
    setting: str, of: Callable[[int], keras.Model]
) -> None:
    first, other = of(0), of(1)
    assert Settings(first).digest == Settings(of(0)).digest
    assert Settings(first).digest != Settings(other).digest
    one, two = Settings(first).read(), Settings(other).read()
    assert setting in {name for name in one if one[name] != two.get(name)}


@pytest.mark.parametrize(
    "of",
    [
        lambda v: model(layers.Dense(4, name=f"dense_{v}"), layers.Dropout(0.1, seed=v)),
        lambda v: model(optimizer=optimizers.SGD(0.1 + v)),
        lambda v: model(layers.Dense(4, bias_initializer=keras.initializers.Constant(v))),
        lambda v: model(Scaled(1.0, folder=f"/scratch/host{v}")),
        lambda v: model(Unsaved(lambda inputs: inputs)),
        lambda v: model(layers.Dense(4, activation=[lambda x: x, lambda x: 1 * x][v])),
    ],
)
def test_what_may_differ_is_not_compared(of: Callable[[int], keras.Model]) -> None:
    assert Settings(of(0)).digest == Settings(of(1)).digest


def test_schedules_of_all_optimizers_are_compared() -> None:
    def of(rate: float) -> keras.Model:
        made = model(optimizer=optimizers.SGD(optimizers.schedules.CosineDecay(0.1, 9)))
        made.first = optimizers.SGD(optimizers.schedules.CosineDecay(rate, 9))
        made.last = optimizers.SGD(0.1)
        return made

    assert Settings(of(0.1)).digest == Settings(of(0.1)).digest
    assert Settings(of(0.1)).digest != Settings(of(0.2)).digest
