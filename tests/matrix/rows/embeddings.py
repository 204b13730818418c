"""Rows of embeddings that no example asks for: of positions, lengths, segments, constants."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops, optimizers

from tests.matrix.row import Case, row
from tests.matrix.rows.common import EXAMPLES, batches, compiled

LENGTH, WORDS, SIZE = 6, 12, 4
TABLES = ["words", "positions", "lengths", "segments", "shared", "repeated", "constants"]
TABLES += ["distances", "tied"]


class Constants(layers.Layer):
    """Looks up rows by other indices than the words of the batch, and the words, too."""

    def __init__(self, **options: Any):
        super().__init__(**options)
        self.tables = {name: layers.Embedding(WORDS, SIZE, name=name) for name in TABLES}
        self.tables["constants"].build()
        self.kept = ops.arange(LENGTH)

    def call(self, words: Any) -> Any:
        def of(name: str, ids: Any) -> Any:
            return self.tables[name](ids)

        rows, length = ops.shape(words)[0], ops.shape(words)[1]
        distances = ops.abs(ops.arange(LENGTH)[:, None] - ops.arange(LENGTH)[None])
        x = of("words", words) + of("positions", ops.arange(LENGTH)) + of("positions", self.kept)
        x += of("lengths", ops.arange(length)) + of("lengths", tf.range(tf.shape(words)[1]) % 3)
        x += of("segments", np.array([0, 0, 0, 1, 1, 1])) + of("shared", words)
        x += of("shared", ops.arange(LENGTH)) + of("shared", ops.arange(LENGTH) // 2)
        x += of("repeated", ops.broadcast_to(ops.arange(LENGTH), (rows, LENGTH)))
        x += ops.take(self.tables["constants"].embeddings, [3, 3, 5, 5, 5, 7], axis=0)
        x += ops.mean(of("distances", distances), axis=0)
        x += of("tied", words)
        logits = ops.matmul(x, ops.transpose(self.tables["tied"].embeddings))
        return ops.concatenate([x, ops.tanh(logits)], axis=-1)


def text(batch: int = 8, length: int = LENGTH) -> tf.data.Dataset:
    random = np.random.default_rng(5)
    words = random.integers(0, WORDS, (EXAMPLES, length)).astype("int32")
    return batches(words, (words.sum(1) % 3).astype("int32"), batch)


def model(length: int | None = LENGTH) -> keras.Model:
    words = keras.Input([length], dtype="int32")
    x = Constants()(words)
    x = layers.GlobalAveragePooling1D()(layers.Dense(8, activation="tanh")(x))
    return keras.Model(words, layers.Dense(3)(x))


@row("embeddings of constants, RMSprop", too=True, core=True)
def rmsprop() -> Case:
    return Case(compiled(model(), optimizers.RMSprop(0.01, epsilon=1e-3)), text())


@row("embeddings of constants and of lengths that are not known, Adagrad, clipnorm", too=True)
def adagrad() -> Case:
    return Case(compiled(model(None), optimizers.Adagrad(0.1, clipnorm=0.05)), text())


@row("embeddings of constants, Adam, jit_compile", too=True, only=("two",))
def adam_jit_compile() -> Case:
    return Case(compiled(model(), optimizers.Adam(0.01, epsilon=1e-3), jit_compile=True), text())


@row("embeddings of constants, Adafactor", too=True)
def adafactor() -> Case:
    return Case(compiled(model(), optimizers.Adafactor(0.01)), text())
