"""The loop over the steps of one Python call: eager, or in one traced function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf


def eager_loop(
    one_step: Callable[..., Any], iterator: Any, max_steps: tf.Tensor
) -> tuple[int, int]:
    """Runs up to `max_steps` steps; ends with the data, or at a step without examples.

    Args:
        one_step: (element of the iterator) -> number of examples over all replicas, int64 [].
        iterator: over the dataset of a `data.Shard`.
        max_steps: int64 [].

    Returns:
        (number of steps, number of examples of them).
    """
    seen = 0
    for steps_done in range(int(max_steps)):
        try:
            element = next(iterator)
        except StopIteration:
            return steps_done, seen
        examples = int(one_step(*element))
        if not examples:
            return steps_done, seen
        seen += examples
    return int(max_steps), seen


def traced_loop(
    one_step: Callable[..., Any], iterator: Any, max_steps: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """As `eager_loop`, traced into one function."""

    def body(steps_done: tf.Tensor, seen: tf.Tensor, going: tf.Tensor) -> Any:
        element = iterator.get_next_as_optional()
        examples = tf.cond(
            element.has_value(),
            lambda: one_step(*element.get_value()),
            lambda: tf.constant(0, tf.int64),
        )
        going = examples > 0
        return steps_done + tf.cast(going, tf.int64), seen + examples, going

    steps_done, seen, _ = tf.while_loop(
        lambda steps_done, seen, going: tf.logical_and(going, steps_done < max_steps),
        body,
        [tf.constant(0, tf.int64), tf.constant(0, tf.int64), tf.constant(True)],
        parallel_iterations=1,
    )
    return steps_done, seen
