"""The synchronous driver's own functions; tests/matrix tests its results."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.platform import tf_logging

import tfmw
from tfmw.train.mirrored.replicas import new_function


@pytest.mark.parametrize(
    ("make", "warns"), [(new_function, False), (tf.function, True)], ids=["ours", "plain"]
)
def test_consecutive_fits_do_not_warn_of_retracing(
    make: Callable[..., Any], warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    tf.get_logger().addHandler(caplog.handler)
    try:
        for _ in range(12):  # each evaluate of a loop traces a function from the same lines

            def look(value: tf.Tensor) -> tf.Tensor:
                return value + 1

            assert make(look)(tf.constant(1)) == 2
    finally:
        tf.get_logger().removeHandler(caplog.handler)
    assert any("retracing" in message for message in caplog.messages) == warns


def test_an_eager_step_brings_no_advice_that_its_user_cannot_follow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The advice is to wrap `strategy.run`; TensorFlow gives it five times at most."""
    said: list[str] = []
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", lambda record: said.append(record.getMessage()))
    monkeypatch.setattr(tf_logging, "_log_counter_per_token", {})
    strategy = tfmw.strategies.mirrored(["CPU:0"])
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", run_eagerly=True)
    x: np.ndarray = np.ones([4, 2], "float32")
    tf.get_logger().addHandler(handler)
    try:
        tfmw.fit(model, x, x[:, :1], batch_size=2, strategy=strategy, verbose=0)
        assert not any("eagerly" in line for line in said)
        monkeypatch.setattr(tf_logging, "_log_counter_per_token", {})
        strategy.run(lambda: tf.constant(1))
        assert any("eagerly has significant overhead" in line for line in said)
    finally:
        tf.get_logger().removeHandler(handler)
