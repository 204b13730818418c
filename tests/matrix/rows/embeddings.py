"""Embeddings: rows of positions, lengths, segments and constants; sparse ids and gradients."""

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


@row("embeddings of constants, RMSprop", nightly=True, core=True)
def rmsprop() -> Case:
    return Case(compiled(model(), optimizers.RMSprop(0.01, epsilon=1e-3)), text())


@row("embeddings of constants and of lengths that are not known, Adagrad, clipnorm", nightly=True)
def adagrad() -> Case:
    return Case(compiled(model(None), optimizers.Adagrad(0.1, clipnorm=0.05)), text())


@row("embeddings of constants, Adam, jit_compile", nightly=True, only=("two",))
def adam_jit_compile() -> Case:
    return Case(compiled(model(), optimizers.Adam(0.01, epsilon=1e-3), jit_compile=True), text())


@row("embeddings of constants, Adafactor", nightly=True)
def adafactor() -> Case:
    return Case(compiled(model(), optimizers.Adafactor(0.01)), text())


def ids_of_several_lengths() -> tuple[np.ndarray, np.ndarray]:
    """(ids int64 [examples, LENGTH], how many of each row count)."""
    random = np.random.default_rng(5)
    ids = random.integers(1, WORDS, (EXAMPLES, LENGTH))
    return ids, random.integers(1, LENGTH + 1, EXAMPLES)


class Lookup(keras.Model):
    """An embedding of the ids, reduced over those of each example."""

    def __init__(self, reduce: Any) -> None:
        super().__init__()
        self.table, self.out = layers.Embedding(WORDS, SIZE), layers.Dense(3)
        self.reduce = reduce

    def call(self, ids: Any) -> Any:
        return self.out(self.reduce(self.table, ids))


@row("sparse ids into an Embedding, Adam")
def sparse_ids() -> Case:
    ids, lengths = ids_of_several_lengths()
    sparse = tf.sparse.from_dense(ids * (np.arange(LENGTH) < lengths[:, None]))
    model = Lookup(lambda table, ids: tf.reduce_sum(table(ids), axis=1))
    data = batches(sparse, (lengths % 3).astype("int32"))
    return Case(compiled(model, optimizers.Adam(0.01, epsilon=1e-3)), data)


@row(
    "a mean over ragged rows padded in the step",
    but="each replica pads to the longest row of its own part",
    equal=(),
    warns="padded to the longest one (RaggedTensorToTensor at",
    only=("devices",),
)
def padded_in_the_step() -> Case:
    ids, lengths = ids_of_several_lengths()
    ragged = tf.RaggedTensor.from_tensor(ids, lengths=lengths)
    model = Lookup(lambda table, ids: tf.reduce_mean(table(ids.to_tensor()), axis=1))
    data = batches(ragged, (lengths % 3).astype("int32"))
    return Case(compiled(model, optimizers.Adam(0.01, epsilon=1e-3)), data, predict=None)


class ClippedByHand(Lookup):
    """Clips the gradients itself: that of the embedding is sparse."""

    def train_step(self, data: Any) -> Any:
        ids, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(ids, y, self(ids, training=True))
        grads, _ = tf.clip_by_global_norm(tape.gradient(loss, self.trainable_variables), 0.05)
        limited = [tf.clip_by_norm(grad, 0.03) for grad in grads]
        self.optimizer.apply_gradients(zip(limited, self.trainable_variables, strict=True))
        return {"value": loss}


class ScatteredByHand(Lookup):
    """Updates the rows itself."""

    def train_step(self, data: Any) -> Any:
        ids, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(ids, y, self(ids, training=True))
        for variable, grad in zip(
            self.trainable_variables, tape.gradient(loss, self.trainable_variables), strict=True
        ):
            if isinstance(grad, tf.IndexedSlices):
                slices = tf.IndexedSlices(0.5 * grad.values, grad.indices, grad.dense_shape)
                variable.value.scatter_sub(slices)
            else:
                variable.assign_sub(0.5 * grad)
        return {"value": loss}


def _by_hand(kind: Any, **options: Any) -> Case:
    ids, lengths = ids_of_several_lengths()
    positions = layers.Embedding(LENGTH, SIZE)  # its rows are looked up by each replica

    def reduce(table: Any, ids: Any) -> Any:
        return ops.mean(table(ids) * (1 + positions(ops.arange(LENGTH))), axis=1)

    model = kind(reduce)
    model.positions = positions
    data = batches(ids, (lengths % 3).astype("int32"))
    optimizer = optimizers.Adam(0.01, epsilon=1e-3)
    return Case(compiled(model, optimizer, metrics=None, **options), data)


@row("sparse gradients clipped by hand, Adam", nightly=True)
def sparse_clipped() -> Case:
    return _by_hand(ClippedByHand)


@row("sparse gradients clipped by hand, run_eagerly", nightly=True)
def sparse_clipped_eagerly() -> Case:
    return _by_hand(ClippedByHand, run_eagerly=True)


@row("sparse gradients, rows updated by hand", nightly=True)
def sparse_scattered() -> Case:
    return _by_hand(ScatteredByHand)
