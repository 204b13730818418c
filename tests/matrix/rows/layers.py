"""Layers with masks, state, noise or sparse gradients."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from tests.matrix.row import Case, row
from tests.matrix.rows.common import EXAMPLES, adam, batches, classes, compiled, numbers

WORDS = 20


def _sentences() -> tuple[Any, Any]:
    random = np.random.default_rng(6)
    words = random.integers(1, WORDS, (EXAMPLES, 6)).astype("int32")
    for sentence, length in zip(words, random.integers(1, 7, EXAMPLES), strict=True):
        sentence[length:] = 0
    return words, numbers()[1]


def _text(*middle: Any) -> keras.Model:
    return keras.Sequential(
        [keras.Input([6], dtype="int32"), layers.Embedding(WORDS, 4), *middle, layers.Dense(3)]
    )


@row("embedding: sparse gradients", nightly=True, core=True)
def embedding() -> Case:
    return Case(compiled(_text(layers.Flatten()), adam()), batches(*_sentences()), predict=None)


@row("embedding and SGD with clipping", nightly=True)
def embedding_clipped() -> Case:
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.5)
    return Case(compiled(_text(layers.Flatten()), optimizer), batches(*_sentences()), predict=None)


def _masked(*middle: Any) -> keras.Model:
    words = keras.Input([6], dtype="int32")
    x = layers.Embedding(WORDS, 4, mask_zero=True)(words)
    for layer in middle:
        x = layer(x)
    return keras.Model(words, layers.Dense(3)(x))


@row("LSTM with masks", nightly=True)
def lstm() -> Case:
    return Case(compiled(_masked(layers.LSTM(4)), adam()), batches(*_sentences()), predict=None)


@row("GRU with masks", nightly=True)
def gru() -> Case:
    return Case(compiled(_masked(layers.GRU(4)), adam()), batches(*_sentences()), predict=None)


@row("masked loss, one output per word", nightly=True)
def masked_loss() -> Case:
    # The loss is a mean over the words that are not padding, of which replicas hold different
    # numbers.
    model = _masked(layers.LSTM(4, return_sequences=True))
    words, _ = _sentences()
    weighted = compiled(model, adam(), weighted_metrics=["accuracy"])
    return Case(weighted, batches(words, (words * 7 % 3).astype("int32")), predict=None)


@row("masked loss, a batch of one example", nightly=True, core=True)
def masked_loss_of_one_example() -> Case:
    # All replicas but one compute on a placeholder, whose entries must not be counted.
    model = _masked(layers.Masking(9.0))
    words, _ = (part[:9] for part in _sentences())
    labels = (words * 7 % 3).astype("int32")
    return Case(compiled(model, adam()), batches(words, labels), predict=None)


@row("attention with padding", nightly=True)
def attention() -> Case:
    words = keras.Input([6], dtype="int32")
    x = layers.Embedding(WORDS, 4, mask_zero=True)(words)
    x = layers.MultiHeadAttention(2, 3)(x, x)
    model = keras.Model(words, layers.Dense(3)(layers.GlobalAveragePooling1D()(x)))
    return Case(compiled(model, adam()), batches(*_sentences()), predict=None)


def _normalized(**options: Any) -> keras.Model:
    return keras.Sequential(
        [
            keras.Input([5]),
            layers.BatchNormalization(name="first", momentum=0.8, **options),
            layers.Dense(4, activation="relu"),
            layers.BatchNormalization(momentum=0.8, **options),
            layers.Dense(3),
        ]
    )


@row(
    "BatchNormalization",
    nightly=True,
    core=True,
    but="each replica normalizes by the statistics of its own part of the batch; the moving mean "
    "of what does not depend on them is that of one process",
    equal=("weight/2 first/moving_mean",),
)
def batch_norm() -> Case:
    return Case(compiled(_normalized(), adam()), classes())


@row("BatchNormalization, synchronized", core=True, nightly=True, tol=2e-5)
def batch_norm_synchronized() -> Case:
    return Case(compiled(_normalized(synchronized=True), adam()), classes(), predict=None)


def _convolved(cls: Any = keras.Sequential) -> keras.Model:
    """Kernels of oneDNN compute wrong shapes of a batch without examples."""
    return cls(
        [
            keras.Input([5]),
            layers.Reshape([5, 1]),
            layers.Conv1D(4, 2, activation="relu"),
            layers.BatchNormalization(momentum=0.8, synchronized=True),
            layers.Conv1DTranspose(3, 2, use_bias=False),
            layers.BatchNormalization(momentum=0.8, synchronized=True),
            layers.GlobalAveragePooling1D(),
        ]
    )


@row("BatchNormalization, synchronized, one example left", nightly=True, tol=2e-5)
def batch_norm_synchronized_tail() -> Case:
    return Case(compiled(_convolved(), adam()), classes(17), predict=None)


class AddsUp(keras.Sequential):
    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(self(x, training=True) - keras.ops.one_hot(y, 3)))
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"total": loss}


@row(
    "BatchNormalization, synchronized, one example left, a sum over examples",
    nightly=True,
    floatx="float64",
    tol=1e-9,
    logs_tol=1e-6,
)
def batch_norm_synchronized_sum() -> Case:
    model = _convolved(AddsUp)
    model.compile(adam())
    return Case(model, classes(17), evaluate=None, predict=None)


@row("BatchNormalization, frozen", nightly=True)
def batch_norm_frozen() -> Case:
    model = _normalized()
    for layer in model.layers:
        if isinstance(layer, layers.BatchNormalization):
            layer.trainable = False
    return Case(compiled(model, adam()), classes(), predict=None)


@row(
    "Dropout",
    nightly=True,
    but="each replica draws masks of its own",
    equal=(),
)
def dropout() -> Case:
    model = keras.Sequential(
        [keras.Input([5]), layers.Dense(8, activation="relu"), layers.Dropout(0.5), layers.Dense(3)]
    )
    return Case(compiled(model, adam()), classes(), predict=None)


@row("group, unit and spectral normalization", nightly=True, tol=2e-5)
def other_norms() -> Case:
    model = keras.Sequential(
        [
            keras.Input([5]),
            layers.SpectralNormalization(layers.Dense(4)),
            layers.GroupNormalization(2),
            layers.UnitNormalization(),
            layers.Dense(3),
        ]
    )
    return Case(compiled(model, adam()), classes(), predict=None)


def _padded(examples: int = EXAMPLES) -> tf.data.Dataset:
    """Sentences of many lengths, so that batches differ in shape from step to step."""
    random = np.random.default_rng(8)
    lengths = random.integers(1, 9, examples)
    words = [random.integers(1, WORDS, n).astype("int32") for n in lengths]
    data = tf.data.Dataset.from_generator(
        lambda: zip(words, numbers(examples)[1], strict=True),
        output_signature=(tf.TensorSpec([None], tf.int32), tf.TensorSpec([], tf.int32)),
    )
    data = data.padded_batch(8)
    return data.apply(tf.data.experimental.assert_cardinality(-(-examples // 8)))


@row("batches padded to different lengths: sparse gradients of any size", nightly=True, core=True)
def padded_batches() -> Case:
    words = keras.Input([None], dtype="int32")
    x = layers.Embedding(WORDS, 4, mask_zero=True)(words)
    model = keras.Model(words, layers.Dense(3)(layers.GlobalAveragePooling1D()(x)))
    # Many steps in one call: there, shapes may not change.
    return Case(compiled(model, adam(), steps_per_execution=4), _padded(), predict=None)
