"""Loop over the steps of one Python call, in one traced function or eager."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfmw.compat import datasets


def step_loop(
    one_step: Callable[..., Any],
    iterator: Any,
    max_steps: tf.Tensor,
    kinds: Sequence[tuple[tf.DType, list[int | None]]] = (),
    endless: bool = False,
) -> Any:
    """Runs up to `max_steps` steps; ends with the data, or at a step without examples.

    Args:
        one_step: (element of the iterator) -> number of examples over all replicas, int64 [].
        iterator: iterator over the dataset of a `data.Shard`.
        max_steps: int64 [].
        kinds: dtypes and shapes of further tensors that `one_step` returns, as a list.
        endless: whether the data has no end. Then a step needs no `tf.cond`, which takes time to
            trace.

    Returns:
        (number of steps, number of their examples, seconds of waiting for the data, a
        `tf.TensorArray` for each of the other tensors). The first elements of an array are those of
        the steps.
    """

    def step(element: tuple[Any, ...]) -> Any:
        found = one_step(*element)
        return found if kinds else (found, [])

    def end() -> Any:
        shapes = [[0 if n is None else n for n in shape] for _, shape in kinds]
        return tf.constant(0, tf.int64), [
            tf.zeros(shape, dtype) for shape, (dtype, _) in zip(shapes, kinds, strict=True)
        ]

    def body(
        steps_done: tf.Tensor, seen: tf.Tensor, going: tf.Tensor, waited: tf.Tensor, arrays: Any
    ) -> Any:
        begin = _seconds()
        with tf.control_dependencies([begin]):
            element = iterator.get_next() if endless else iterator.get_next_as_optional()
        if endless:
            found = tf.nest.flatten(element, expand_composites=True)
        else:
            found = [element.has_value()]
        with tf.control_dependencies([tensor for tensor in found if tensor is not None]):
            end_of_wait = _seconds()
        waited += end_of_wait - begin
        # The clock is read before the step, also where one thread runs one operation at a time. The
        # data stays on its device, from which each replica gets its own part.
        with tf.control_dependencies([end_of_wait]), tf.device("cpu:0"):
            found = [None if tensor is None else tf.identity(tensor) for tensor in found]
        if endless:
            packed = tf.nest.pack_sequence_as(element, found, expand_composites=True)
            examples, values = step(packed)
        else:
            examples, values = tf.cond(found[0], lambda: step(element.get_value()), end)
        place = tf.cast(steps_done, tf.int32)
        arrays = [a.write(place, v) for a, v in zip(arrays, values, strict=True)]
        going = examples > 0
        return steps_done + tf.cast(going, tf.int64), seen + examples, going, waited, arrays

    zero = tf.constant(0, tf.int64)
    growing: dict[str, Any] = {"size": 0, "dynamic_size": True, "infer_shape": False}
    arrays = [tf.TensorArray(dtype, element_shape=shape, **growing) for dtype, shape in kinds]
    steps_done, examples, _, waited, arrays = tf.while_loop(
        lambda steps_done, seen, going, *rest: tf.logical_and(going, steps_done < max_steps),
        body,
        (zero, zero, tf.constant(True), tf.constant(0.0, tf.float64), arrays),
        parallel_iterations=1,
    )
    return steps_done, examples, waited, arrays


def _seconds() -> tf.Tensor:
    """The time; 0 if traced operations must be deterministic, as TensorFlow then has no clock."""
    if tf.executing_eagerly():
        return tf.constant(time.perf_counter(), tf.float64)
    return tf.constant(0.0, tf.float64) if datasets.is_deterministic() else tf.timestamp()
