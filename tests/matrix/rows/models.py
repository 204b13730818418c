"""Ways to write a model."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import layers, ops

from tests.matrix.row import Case, row
from tests.matrix.rows.common import EXAMPLES, adam, batches, classes, compiled, mlp, numbers
from tests.programs import _of_keras


@row("sequential", nightly=True, core=True)
def sequential() -> Case:
    return Case(compiled(mlp(), adam()), classes())


@row("functional, several inputs and outputs as dicts", core=True, nightly=True)
def functional() -> Case:
    a, b = keras.Input([5], name="a"), keras.Input([2], name="b")
    hidden = layers.Dense(4, activation="tanh")(layers.Concatenate()([a, b]))
    outputs = {
        "kind": layers.Dense(3, name="kind")(hidden),
        "size": layers.Dense(1, name="size")(hidden),
    }
    model = keras.Model({"a": a, "b": b}, outputs)
    model.compile(
        adam(),
        loss={
            "kind": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            "size": "mse",
        },
        loss_weights={"kind": 0.3, "size": 2.0},
        metrics={"kind": ["accuracy"], "size": ["mae"]},
    )
    x, y = numbers()
    size = x.sum(-1, keepdims=True)
    data = batches({"a": x, "b": x[:, :2] ** 2}, {"kind": y, "size": size})
    return Case(model, data)


class Subclassed(keras.Model):
    """Takes an argument and has no get_config: it cannot be cloned."""

    def __init__(self, width: int):
        super().__init__()
        self.blocks = [layers.Dense(width, activation="relu") for _ in range(2)]
        self.head = layers.Dense(3)

    def call(self, x: Any, training: bool = False) -> Any:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@row("subclassed without get_config, unbuilt", nightly=True, core=True)
def subclassed() -> Case:
    return Case(compiled(Subclassed(4), adam()), classes())


class Scale(layers.Layer):
    """A custom layer that was never registered, with a weight that no optimizer touches."""

    def build(self, shape: Any) -> None:
        self.factor = self.add_weight(shape=(shape[-1],), initializer="ones")
        self.seen = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, x: Any) -> Any:
        return x * self.factor


@row("custom layer, never registered", nightly=True)
def custom_layer() -> Case:
    model = keras.Sequential([keras.Input([5]), Scale(), layers.Dense(3)])
    return Case(compiled(model, adam()), classes())


@row("shared layer", nightly=True)
def shared_layer() -> Case:
    a = keras.Input([5])
    shared = layers.Dense(5, activation="tanh")
    model = keras.Model(a, layers.Dense(3)(shared(shared(a)) + shared(-a)))
    return Case(compiled(model, adam()), classes())


@row("nested models, partly frozen", nightly=True)
def nested() -> Case:
    inner = keras.Sequential([keras.Input([5]), layers.Dense(4, activation="tanh")])
    frozen = keras.Sequential([keras.Input([4]), layers.Dense(4)])
    frozen.trainable = False
    outer = keras.Sequential([keras.Input([5]), inner, frozen, layers.Dense(3)])
    return Case(compiled(outer, adam()), classes())


@row("unbuilt Sequential", nightly=True)
def unbuilt() -> Case:
    model = keras.Sequential([layers.Dense(4, activation="tanh"), layers.Dense(3)])
    return Case(compiled(model, adam()), classes())


@row("training goes on, with the optimizer's state", core=True)
def continued() -> Case:
    model = compiled(mlp(), adam())
    _of_keras.fit(model, classes(), verbose=0)
    fit = {"initial_epoch": 1, "epochs": 3}
    return Case(model, classes(), fit=fit, evaluate=None, predict=None)


@row("small CNN", nightly=True)
def cnn() -> Case:
    model = keras.Sequential(
        [
            keras.Input([6, 6, 1]),
            layers.Conv2D(3, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(3),
        ]
    )
    random = np.random.default_rng(3)
    x = random.normal(size=(EXAMPLES, 6, 6, 1)).astype("float32")
    return Case(compiled(model, adam()), batches(x, numbers()[1]))


# The gradient of a key's bias is zero but for rounding, and Adam makes a step of that.
@row("small transformer", nightly=True, tol=5e-5)
def transformer() -> Case:
    words = keras.Input([7], dtype="int32")
    positions = layers.Embedding(7, 8)(ops.arange(7))
    x = layers.Embedding(20, 8)(words) + positions
    for _ in range(2):
        y = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(2, 4)(y, y, use_causal_mask=True)
        x = x + layers.Dense(8)(layers.Dense(16, activation="gelu")(layers.LayerNormalization()(x)))
    model = keras.Model(words, layers.Dense(20)(x))
    text = np.random.default_rng(5).integers(0, 20, (EXAMPLES, 8)).astype("int32")
    return Case(compiled(model, adam()), batches(text[:, :-1], text[:, 1:]))
