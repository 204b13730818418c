"""Kinds of data, and the ways in which they may fail to divide."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from tests.matrix.row import Case, row
from tests.matrix.rows.common import BATCH, EXAMPLES, adam, batches, classes, compiled, mlp, numbers


def _case(x: Any, y: Any = None, **options: Any) -> Case:
    return Case(compiled(mlp(), adam()), x, y, **options)


@row("seeded shuffle, map, prefetch", core=True, nightly=True)
def shuffled() -> Case:
    data = tf.data.Dataset.from_tensor_slices(numbers()).shuffle(20, seed=3)
    return _case(data.map(lambda x, y: (x * 2, y)).batch(BATCH).prefetch(2), predict=numbers()[0])


def _counted(data: tf.data.Dataset) -> dict[str, Any]:
    # If the length is unknown, Keras's fit counts an optimizer step more at the end of an epoch.
    # The step that finds no data still adds to `iterations`, so Keras is told the length.
    steps = sum(1 for _ in data)
    return {"x": data.apply(tf.data.experimental.assert_cardinality(steps))}


@row("filtered: unknown length", nightly=True, core=True)
def filtered() -> Case:
    data = tf.data.Dataset.from_tensor_slices(numbers()).filter(lambda x, y: x[0] < 1)
    data = data.map(lambda x, y: (x + 1, y)).batch(BATCH)
    return _case(data, reference=_counted(data))


@row("map after the batch", nightly=True)
def map_after_batch() -> Case:
    return _case(classes().map(lambda x, y: (x - tf.reduce_mean(x, axis=0), y)))


@row("batches that replicas do not divide", core=True, fast=True)
def indivisible() -> Case:
    return _case(classes(EXAMPLES, 7))


@row("last batch smaller than the number of replicas", core=True, nightly=True)
def tail() -> Case:
    return _case(classes(17))


@row("whole dataset smaller than the number of replicas", nightly=True, core=True)
def one_example() -> Case:
    return _case(classes(1))


@row("batch size of one", nightly=True)
def single() -> Case:
    return _case(classes(5, 1))


@row("drop_remainder", nightly=True)
def drop_remainder() -> Case:
    data = tf.data.Dataset.from_tensor_slices(numbers())
    return _case(data.map(lambda x, y: (x, y)).batch(7, drop_remainder=True))


@row("steps_per_epoch and repeat()", nightly=True)
def repeat() -> Case:
    data = tf.data.Dataset.from_tensor_slices(numbers()).map(lambda x, y: (x, y)).repeat(5)
    test = {"x": classes()}
    return _case(data.batch(7), fit={"steps_per_epoch": 4}, evaluate=test, predict=classes())


@row("infinite dataset", nightly=True)
def infinite() -> Case:
    data = tf.data.Dataset.from_tensor_slices(numbers()).repeat().batch(BATCH)
    test = {"x": data, "steps": 3}
    return _case(data, fit={"steps_per_epoch": 6}, evaluate=test, predict=classes())


@row("steps_per_epoch beyond one pass, no repeat", nightly=True)
def passes() -> Case:
    return _case(classes(), fit={"steps_per_epoch": 3, "epochs": 1})


@row("arrays", core=True, fast=True)
def arrays() -> Case:
    x, y = numbers()
    return _case(x, y, fit={"batch_size": 7, "shuffle": False})


@row("arrays in a dict, default batch size", nightly=True)
def dict_of_arrays() -> Case:
    a = keras.Input([5], name="a")
    model = compiled(keras.Model({"a": a}, layers.Dense(3)(a)), adam())
    x, y = numbers()
    return Case(model, {"a": x}, y, {"shuffle": False})


@row("arrays shuffled, validation_split", nightly=True)
def arrays_shuffled() -> Case:
    # One global batch per epoch, so that any order gives the same step.
    x, y = numbers()
    return _case(x, y, fit={"batch_size": 64, "validation_split": 0.3})


@row("validation data of its own size", nightly=True, core=True)
def validation() -> Case:
    x, y = numbers(13)
    return _case(classes(), fit={"validation_data": (x, y), "validation_batch_size": 4})


class Pairs(keras.utils.PyDataset):
    def __init__(self) -> None:
        super().__init__()
        self.x, self.y = numbers()

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> Any:
        part = slice(index * BATCH, (index + 1) * BATCH)
        return self.x[part], self.y[part]


@row("PyDataset", nightly=True)
def py_dataset() -> Case:
    return _case(Pairs(), fit={"shuffle": False})


def _endless() -> Iterator[Any]:
    x, y = numbers()
    while True:
        for start in range(0, EXAMPLES, BATCH):
            yield x[start : start + BATCH], y[start : start + BATCH]


@row("generator", nightly=True)
def generator() -> Case:
    test = {"x": classes()}
    return _case(_endless(), fit={"steps_per_epoch": 5}, evaluate=test, predict=classes())


@row("from_generator", nightly=True)
def from_generator() -> Case:
    x, y = numbers()
    data = tf.data.Dataset.from_generator(
        lambda: zip(x, y, strict=True),
        output_signature=(tf.TensorSpec([5]), tf.TensorSpec([], tf.int32)),
    )
    data = data.map(lambda x, y: (x, y)).batch(BATCH)
    return _case(data, reference=_counted(data))


WORDS = ["red", "green", "blue", "a longer name"]


@row("strings through StringLookup, numbers through Normalization", nightly=True)
def strings() -> Case:
    x, y = numbers()
    lookup = layers.StringLookup(vocabulary=WORDS[:3], output_mode="one_hot")
    normalization = layers.Normalization()
    normalization.adapt(x)
    word, number = keras.Input([1], dtype="string"), keras.Input([5])
    both = layers.Concatenate()([lookup(word), normalization(number)])
    model = compiled(keras.Model([word, number], layers.Dense(3)(both)), adam())
    words = np.array(WORDS, object)[np.arange(EXAMPLES) % 4][:, None]
    return Case(model, batches((tf.constant(words), x), y))


@row("strings through TextVectorization", nightly=True)
def text() -> Case:
    vectorize = layers.TextVectorization(output_mode="int", output_sequence_length=4)
    vectorize.adapt(WORDS)
    model = keras.Sequential(
        [
            keras.Input([], dtype="string"),
            vectorize,
            layers.Embedding(9, 4),
            layers.Flatten(),
            layers.Dense(3),
        ]
    )
    sentences = np.array([f"{WORDS[i % 4]} {WORDS[i % 3]}" for i in range(EXAMPLES)])
    return Case(compiled(model, adam()), batches(sentences, numbers()[1]))


class MeanWord(keras.Model):
    """Averages the embeddings of ragged sentences, int32 [batch, None]."""

    def __init__(self) -> None:
        super().__init__()
        self.table = layers.Embedding(20, 4)
        self.head = layers.Dense(3)

    def call(self, words: Any) -> Any:
        dense = words.to_tensor() if isinstance(words, tf.RaggedTensor) else words
        known = tf.cast(dense > 0, tf.float32)[..., None]
        summed = tf.reduce_sum(self.table(dense) * known, axis=1)
        return self.head(summed / tf.reduce_sum(known, axis=1))


@row("ragged inputs", nightly=True)
def ragged() -> Case:
    random = np.random.default_rng(8)
    lengths = random.integers(1, 6, EXAMPLES)
    words = tf.RaggedTensor.from_row_lengths(
        random.integers(1, 20, lengths.sum()).astype("int32"), lengths
    )
    model = compiled(MeanWord(), adam())
    model.build((None, None))
    return Case(model, batches(words, numbers()[1]))
