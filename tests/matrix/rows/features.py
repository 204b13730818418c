"""Newer features of Keras: adapters, quantization, distillation, rematerialization.

Variables and optimizers in layers, in plain objects, and outside of Keras are tested, too.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from tests.matrix.row import Case, row
from tests.matrix.rows.common import EXAMPLES, adam, batches, classes, compiled, mlp, numbers


class Noise(layers.Layer):
    """Draws without a seed. Replicas draw different numbers: here they count for nothing."""

    def call(self, x: Any) -> Any:
        return x + 0 * keras.random.normal(ops.shape(x))


@row("draws without a seed", nightly=True, core=True)
def unseeded() -> Case:
    model = keras.Sequential([keras.Input([5]), layers.Dense(4), Noise(), layers.Dense(3)])
    return Case(compiled(model, adam()), classes())


class Local(layers.Dense):
    """A layer with an optimizer of its own."""

    def __init__(self, units: int):
        super().__init__(units, activation="tanh")
        self.optimizer = adam()

    def train(self, x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = ops.mean(ops.square(self(x) - 0.5))
        gradients = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply(gradients, self.trainable_weights)
        return loss


class Held:
    """A plain object with an optimizer."""

    def __init__(self) -> None:
        self.of_head = {"optimizer": adam(0.02)}


class Layerwise(keras.Model):
    """A model that trains each layer alone, as keras.io's forward-forward algorithm does."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = [Local(4), Local(3)]
        self.head = layers.Dense(2)
        self.held = Held()
        self.mean = keras.metrics.Mean(name="mean")

    def call(self, x: Any) -> Any:
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def train_step(self, data: Any) -> Any:
        x, _ = data
        for block in self.blocks:
            self.mean.update_state(block.train(x))
            x = block(x)
        with tf.GradientTape() as tape:
            loss = ops.mean(ops.square(self.head(x) - 1.0))
        gradients = tape.gradient(loss, self.head.trainable_weights)
        self.held.of_head["optimizer"].apply(gradients, self.head.trainable_weights)
        return {"mean": self.mean.result()}


@row("optimizers in layers and in a plain object", nightly=True)
def optimizers_of_layers() -> Case:
    model = Layerwise()
    model.compile()
    optimizers = [block.optimizer for block in model.blocks]
    optimizers += [model.held.of_head["optimizer"], model.optimizer]
    data = batches(*numbers(32))
    return Case(model, data, evaluate=None, predict=None, optimizers=optimizers)


class Shifted(layers.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.steps = {"shift": tf.Variable(0.5)}

    def call(self, x: Any) -> Any:
        return x + self.steps["shift"]


@row("a tf.Variable that no step assigns", nightly=True)
def raw_variable() -> Case:
    model = keras.Sequential([keras.Input([5]), Shifted(), layers.Dense(3)])
    return Case(compiled(model, adam()), classes())


class Pairs(keras.Model):
    """`call` takes and returns lists; Keras would take a batch (a, b, c) for x, y and weights."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = keras.Sequential([layers.Dense(4, activation="tanh"), layers.Dense(2)])
        self.mean = keras.metrics.Mean(name="mean")

    def call(self, inputs: Any) -> Any:
        return [self.encoder(inputs[0]), self.encoder(inputs[1])]

    def train_step(self, data: Any) -> Any:
        a, b, _ = data
        with tf.GradientTape() as tape:
            first, second = self([a, b], training=True)
            loss = ops.mean(ops.square(first - second + 1.0))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        self.mean.update_state(loss)
        return {"mean": self.mean.result()}


@row("unbuilt, call takes and returns lists, batches of three", nightly=True)
def lists_and_triples() -> Case:
    model = Pairs()
    model.compile(adam())
    x, y = numbers(32)
    return Case(model, batches(x, x * x, 8, y), evaluate=None, predict=None)


def _with_lora(quantized: bool) -> keras.Model:
    model = mlp()
    if quantized:
        model.quantize("int8")
    for layer in model.layers:
        layer.enable_lora(2)
    return compiled(model, adam())


@row("LoRA", nightly=True)
def lora() -> Case:
    return Case(_with_lora(quantized=False), classes())


@row("LoRA on int8", nightly=True, tol=5e-3)
def lora_on_int8() -> Case:
    return Case(_with_lora(quantized=True), classes())


@row("float8", tol=5e-3)
def float8() -> Case:
    """The scales and largest values that Keras computes as gradients are those of all replicas."""
    model = keras.Sequential(
        [keras.Input([5]), layers.Dense(4, activation="relu"), layers.Dense(3)]
    )
    model.quantize("float8")
    return Case(compiled(model, adam()), classes())


@row("distillation", nightly=True)
def distillation() -> Case:
    losses = [
        keras.distillation.LogitsDistillation(temperature=2.0),
        keras.distillation.FeatureDistillation(
            loss="mse", teacher_layer_name="hidden", student_layer_name="hidden"
        ),
    ]
    teacher, student = (
        keras.Sequential(
            [keras.Input([5]), layers.Dense(4, name="hidden"), layers.Dense(3, name="logits")]
        )
        for _ in range(2)
    )
    model = keras.distillation.Distiller(teacher, student, losses)
    return Case(compiled(model, adam()), classes())


@row("ScheduleFreeAdamW", nightly=True)
def schedule_free() -> Case:
    optimizer = keras.optimizers.ScheduleFreeAdamW(0.02, epsilon=1e-3, warmup_steps=3)
    model = compiled(mlp(), optimizer)
    # Keras's fit would build it in a trace, where its slots lose their initial values.
    optimizer.build(model.trainable_variables)
    return Case(model, classes())


class Rematerialized(layers.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.inner = layers.Dense(4, activation="tanh")

    def build(self, shape: Any) -> None:
        self.inner.build(shape)

    def call(self, x: Any) -> Any:
        return keras.remat(self.inner)(x)


@row("remat", nightly=True)
def remat() -> Case:
    model = keras.Sequential([keras.Input([5]), Rematerialized(), layers.Dense(3)])
    return Case(compiled(model, adam()), classes())


class Reversed(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.table = layers.ReversibleEmbedding(12, 4)
        self.middle = layers.Dense(4)

    def call(self, ids: Any) -> Any:
        return self.table(self.middle(self.table(ids)), reverse=True)


@row("ReversibleEmbedding", nightly=True)
def reversible() -> Case:
    ids = np.random.default_rng(8).integers(0, 12, (EXAMPLES, 6)).astype("int32")
    return Case(compiled(Reversed(), adam()), batches(ids, (ids + 1) % 12))
