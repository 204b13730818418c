"""`predict` makes several steps in one call of TensorFlow, where their outputs can be joined."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfmw
from tfmw.train.mirrored import prediction

STEPS = 40
X: Any = np.random.default_rng(0).normal(size=(STEPS * 4 - 1, 3)).astype("float32")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The steps of each call."""
    made: list[int] = []
    extend = prediction.Predictions.extend

    def noted(self: prediction.Predictions, max_steps: int) -> int:
        made.append(extend(self, max_steps))
        return made[-1]

    monkeypatch.setattr(prediction.Predictions, "extend", noted)
    return made


def model(**compiled: Any) -> keras.Model:
    keras.utils.set_random_seed(1)
    inputs = keras.Input((3,))
    scores = keras.layers.Dense(2)(inputs)
    found = keras.Model(inputs, {"scores": scores, "first": scores[:, 0], "positive": scores > 0})
    found.compile(**compiled)
    return found


def batches() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(X).batch(4)


def test_few_calls_of_many_steps_give_the_predictions_of_keras(calls: list[int]) -> None:
    one = model()
    expected = keras.Model.predict(one, batches(), verbose=0)
    found = tfmw.predict(one, batches(), verbose=0)
    assert sum(calls) == STEPS
    assert len(calls) < STEPS / 2
    assert list(found) == list(expected)
    for name, array in expected.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array)


def test_callbacks_on_batches_see_the_outputs_of_each_call(calls: list[int]) -> None:
    seen = []

    class OnBatch(keras.callbacks.Callback):
        def on_predict_batch_end(self, batch, logs=None):
            seen.append((batch, logs))

    one = model(steps_per_execution=7)
    found = tfmw.predict(one, batches(), callbacks=[OnBatch()], verbose=0)
    assert calls == [7, 7, 7, 7, 7, 5]
    assert [batch for batch, _ in seen] == [6, 13, 20, 27, 34, 41]
    for name, array in found.items():
        np.testing.assert_array_equal(np.concatenate([each[name] for _, each in seen]), array)


def test_outputs_of_changing_width_are_those_of_keras() -> None:
    """It is that of the longest text of a batch, so outputs of several steps make no one tensor."""
    layer = keras.layers.TextVectorization(vocabulary=list("abcdefg"))
    one = keras.Sequential([keras.Input((1,), dtype="string"), layer])
    dataset = tf.data.Dataset.from_tensor_slices([["a"], ["b c"], ["d e f"], ["g"]]).batch(2)
    expected = keras.Model.predict(one, dataset, verbose=0)
    one.compile(steps_per_execution=2)
    found = tfmw.predict(one, dataset, verbose=0)
    assert found.to_list() == expected.to_list() == [[2, 0], [3, 4], [5, 6, 7], [8, 0, 0]]
