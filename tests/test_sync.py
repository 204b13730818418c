"""The synchronous driver's own functions; what it computes is in tests/matrix."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

from tfmw import sync


class Heard(logging.Handler):
    """Keeps what TensorFlow warns of."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@pytest.mark.parametrize(
    ("make", "warns"), [(sync._function, False), (tf.function, True)], ids=["ours", "plain"]
)
def test_one_fit_after_the_other_is_not_taken_for_retracing(
    make: Callable[..., Any], warns: bool
) -> None:
    heard = Heard()
    tf.get_logger().addHandler(heard)
    try:
        for _ in range(12):  # each evaluate of a loop traces a function from the same lines

            def look(value: tf.Tensor) -> tf.Tensor:
                return value + 1

            assert make(look)(tf.constant(1)) == 2
    finally:
        tf.get_logger().removeHandler(heard)
    assert any("retracing" in message for message in heard.messages) == warns
