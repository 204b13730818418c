"""Embeddings of ids that come and go: which id has which row depends on the global batch."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import tfmw
from tests.matrix.row import Case, row
from tests.matrix.rows.common import adam, batches, compiled, numbers


def _ids(examples: int) -> Any:
    """More ids than rows; some come often, some are gone after a while."""
    random = np.random.default_rng(9)
    drifting: Any = np.arange(examples)[:, None] // 4
    return random.zipf(1.6, (examples, 3)).clip(max=40) + drifting


def _model(ids: Any, optimizer: Any, **options: Any) -> keras.Model:
    table = tfmw.layers.HashTableEmbedding(4, capacity=32, seed=3, **options)
    inputs = keras.Input(ids.shape[1:], dtype=str(ids.dtype) if ids.dtype != object else "string")
    return compiled(
        keras.Model(inputs, layers.Dense(3)(layers.Flatten()(table(inputs)))), optimizer
    )


@row("hash table of int64", nightly=True, core=True)
def integers() -> Case:
    ids = _ids(37)
    model = _model(ids, adam(), min_count=2, max_age=3)
    return Case(model, batches(ids, numbers()[1]))


@row(
    "hash table of strings, data of unknown length, a last batch of one",
    nightly=True,
    only=("two",),
)
def strings() -> Case:
    ids = _ids(33)
    names = tf.strings.as_string(ids).numpy()
    y = numbers(33)[1]
    data = tf.data.Dataset.from_tensor_slices((names, y)).filter(lambda x, y: True).batch(8)
    known = data.apply(tf.data.experimental.assert_cardinality(5))  # see `data.filtered`
    model = _model(names, keras.optimizers.Adagrad(0.1), min_count=3)
    return Case(model, data, reference={"x": known})
