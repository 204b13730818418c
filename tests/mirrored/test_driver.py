"""The synchronous driver's own functions; tests/matrix tests its results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

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
