"""Trains a small transformer on sentences, on one process or many.

    python recipes/text.py
    tfmw run --workers 2 recipes/text.py --export_dir=build/text

The input is text: the model has the vocabulary, and so has its export. The sentences are generated
by a rule: each has words of praise or blame, and "not" before a word reverses it. The label is the
sign of the sum. A bag of words cannot learn it, as it does not see which word a "not" reverses.
"""

from __future__ import annotations

import common
import keras
import numpy as np
import tensorflow as tf
from common import FLAGS

import tfmw

PRAISE = ["good", "great", "fine", "bright"]
BLAME = ["bad", "poor", "dull", "weak"]
OTHER = ["the", "film", "was", "and", "plot", "seemed", "very", "music"]
WORDS = 16  # at most so many words in a sentence
EXAMPLES = 4096


def main() -> None:
    """Trains, reports and exports by the flags."""
    cluster = common.init()  # before any TensorFlow op
    train = make_data(1, EXAMPLES, FLAGS.batch_size)
    test = make_data(2, 512, FLAGS.batch_size)
    model = make_model()
    train, epochs, steps = common.limits(train, cluster)
    history = tfmw.fit(
        model,
        train,
        epochs=epochs,
        steps_per_epoch=steps,
        validation_data=test,
        strategy=FLAGS.strategy,
        backup_dir=FLAGS.backup_dir,
        export_dir=FLAGS.export_dir,
    )
    common.report(history, cluster)


def make_data(seed: int, count: int, batch_size: int) -> tf.data.Dataset:
    """Batches of (sentences string [batch, 1], label int64 [batch]), the same on every worker."""
    random = np.random.default_rng(seed)
    sentences: list[list[str]] = []
    labels: list[int] = []
    while len(sentences) < count:
        words, value = [], 0
        for _ in range(random.integers(1, 4)):
            words += list(random.choice(OTHER, 2))
            praised, reversed_ = random.integers(2), random.integers(2)
            words += ["not"] * reversed_ + [random.choice(PRAISE if praised else BLAME)]
            value += 1 if praised != reversed_ else -1
        if value:
            sentences.append([" ".join(words)])
            labels.append(int(value > 0))
    data = tf.data.Dataset.from_tensor_slices((sentences, labels))
    return data.shuffle(count).batch(batch_size)


class Positions(keras.layers.Layer):
    """Adds a learned vector for each position to [batch, words, width]."""

    def build(self, shape: tuple[int | None, ...]) -> None:
        self.table = self.add_weight(shape=shape[1:], initializer="random_normal", name="table")

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        return inputs + self.table


def block(x: keras.KerasTensor, width: int, heads: int) -> keras.KerasTensor:
    """One block of a transformer's encoder, with the normalization first."""
    normal = keras.layers.LayerNormalization()(x)
    x = x + keras.layers.MultiHeadAttention(heads, width // heads)(normal, normal)
    normal = keras.layers.LayerNormalization()(x)
    return x + keras.layers.Dense(width)(keras.layers.Dense(2 * width, "gelu")(normal))


def make_model(width: int = 32, heads: int = 4, blocks: int = 2) -> keras.Model:
    """Words, positions, attention, and a classifier of the mean over all words."""
    text = keras.Input((1,), dtype="string", name="text")
    words = keras.layers.TextVectorization(
        output_sequence_length=WORDS, vocabulary=[*PRAISE, *BLAME, *OTHER, "not"]
    )
    ids = words(text)
    x = Positions()(keras.layers.Embedding(words.vocabulary_size(), width)(ids))
    for _ in range(blocks):
        x = block(x, width, heads)
    x = keras.layers.GlobalAveragePooling1D()(keras.layers.LayerNormalization()(x))
    output = keras.layers.Dense(1, "sigmoid", name="praise")(x)
    model = keras.Model(text, output)
    model.compile(keras.optimizers.Adam(2e-3), "binary_crossentropy", metrics=["accuracy"])
    return model


if __name__ == "__main__":
    common.run(main)
