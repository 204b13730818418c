"""The loop over the steps of one Python call: eager, or in one traced function."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfmw.keras_compat import datasets


def eager_loop(
    one_step: Callable[..., Any], iterator: Any, max_steps: tf.Tensor
) -> tuple[int, int, float]:
    """Runs up to `max_steps` steps; ends with the data, or at a step without examples.

    Args:
        one_step: (element of the iterator) -> number of examples over all replicas, int64 [].
        iterator: over the dataset of a `data.Shard`.
        max_steps: int64 [].

    Returns:
        (number of steps, number of examples of them, seconds of waiting for the data).
    """
    seen, waited = 0, 0.0
    for steps_done in range(int(max_steps)):
        begin = time.perf_counter()
        try:
            element = next(iterator)
        except StopIteration:
            return steps_done, seen, waited
        waited += time.perf_counter() - begin
        examples = int(one_step(*element))
        if not examples:
            return steps_done, seen, waited
        seen += examples
    return int(max_steps), seen, waited


def traced_loop(
    one_step: Callable[..., Any], iterator: Any, max_steps: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """As `eager_loop`, traced into one function."""

    def body(steps_done: tf.Tensor, seen: tf.Tensor, going: tf.Tensor, waited: tf.Tensor) -> Any:
        begin = _seconds()
        with tf.control_dependencies([begin]):
            element = iterator.get_next_as_optional()
        more = element.has_value()
        with tf.control_dependencies([more]):
            waited += _seconds() - begin
        examples = tf.cond(
            more,
            lambda: one_step(*element.get_value()),
            lambda: tf.constant(0, tf.int64),
        )
        going = examples > 0
        return steps_done + tf.cast(going, tf.int64), seen + examples, going, waited

    nothing = tf.constant(0, tf.int64)
    steps_done, seen, _, waited = tf.while_loop(
        lambda steps_done, seen, going, waited: tf.logical_and(going, steps_done < max_steps),
        body,
        [nothing, nothing, tf.constant(True), tf.constant(0.0, tf.float64)],
        parallel_iterations=1,
    )
    return steps_done, seen, waited


def _seconds() -> tf.Tensor:
    """The time; 0 where operations must be deterministic, as TensorFlow then has no clock."""
    return tf.constant(0.0, tf.float64) if datasets.is_deterministic() else tf.timestamp()
