"""`predict` makes several steps in one call of TensorFlow, where their outputs can be joined."""

from __future__ import annotations

import contextlib
import json
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfmw
from tests.helpers.threads import Exchange, in_threads
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
    """The width is that of the longest text in a batch, so outputs of steps differ in shape."""
    layer = keras.layers.TextVectorization(vocabulary=list("abcdefg"))
    one = keras.Sequential([keras.Input((1,), dtype="string"), layer])
    dataset = tf.data.Dataset.from_tensor_slices([["a"], ["b c"], ["d e f"], ["g"]]).batch(2)
    expected = keras.Model.predict(one, dataset, verbose=0)
    one.compile(steps_per_execution=2)
    found = tfmw.predict(one, dataset, verbose=0)
    assert found.to_list() == expected.to_list() == [[2, 0], [3, 4], [5, 6, 7], [8, 0, 0]]


LONGEST = 64  # characters of a value that workers exchange as JSON


@pytest.mark.parametrize("splits", [True, False], ids=["parts of batches", "whole batches"])
@pytest.mark.parametrize("ends", [(50, 50, 50), (50, 49, 49), (3, 50, 0)], ids=str)
def test_sizes_of_many_steps_are_not_sent_as_one_small_value(
    splits: bool, ends: tuple[int, ...]
) -> None:
    """Example j of a step belongs to worker j mod 3, or the whole batch to one in turn."""
    size = len(ends)
    values, arrays = Exchange(size), Exchange(size)
    steps: list[list[list[int]]] = []  # the examples of each worker
    count = 0
    for step in range(max(ends)):
        batch = list(range(count, count + 1 + step % 8))
        count += len(batch)
        there = [rank for rank in range(size) if step < ends[rank]]
        if splits and len(there) == size:
            steps.append([batch[rank::size] for rank in range(size)])
        else:
            owner = there[step % len(there)]
            steps.append([batch if rank == owner else [] for rank in range(size)])

    def predictions(rank: int) -> Any:
        from_all, gather = values.of(rank), arrays.of(rank)

        def of_all(value: Any) -> list[Any]:
            text = json.dumps(value)
            if len(text) > LONGEST:
                raise ValueError(f"{len(text)} characters")
            return [json.loads(each) for each in from_all(text)]

        def gather_between_steps(own: list[np.ndarray], cuts: Any, out: np.ndarray) -> None:
            np.concatenate(gather(own[0]), out=out)

        replicas: Any = SimpleNamespace(
            group=SimpleNamespace(size=size, rank=rank, from_all=of_all),
            transport=SimpleNamespace(
                part_number=lambda rank: rank, gather_between_steps=gather_between_steps
            ),
            local=1,
            count=size,
            step_errors=contextlib.nullcontext,
        )
        driver: Any = SimpleNamespace(
            replicas=replicas,
            splits=splits,
            model=SimpleNamespace(run_eagerly=True),
        )
        collected = prediction.Predictions(driver, iterator=None)
        own = [step[rank] for step in steps[: ends[rank]]]
        rows: list[Any] = [[len(part) if splits else [len(part)]] for part in own]
        outputs = [[np.array(part, np.int64)] for part in own]
        collected._calls = [(rows[:2], outputs[:2]), (rows[2:], outputs[2:])]
        return collected.assembled()

    for found in in_threads(size, predictions):
        np.testing.assert_array_equal(found, np.arange(count))
