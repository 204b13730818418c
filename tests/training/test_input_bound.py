"""Training that waits for its input: the slowest stage is named, with the line that mends it."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tfmw.compat import datasets
from tfmw.observe.step_times import StepTimes
from tfmw.train import reporter
from tfmw.train.mirrored.step_loops import step_loop
from tfmw.train.reporter import InputBound


def read(dataset: tf.data.Dataset, elements: int = 10) -> Any:
    iterator = iter(dataset)
    for _ in range(elements):
        next(iterator)
    return iterator


def slow(x: tf.Tensor) -> tf.Tensor:
    def wait(value: np.ndarray) -> np.ndarray:
        time.sleep(0.01)
        return value

    return tf.ensure_shape(tf.numpy_function(wait, [x], tf.int64), x.shape)


def slow_generator() -> Any:
    for i in range(100):
        time.sleep(0.01)
        yield i


def slow_in_threads(x: tf.Tensor) -> tf.Tensor:
    """A map without side effects, which tf.data runs in threads even if ops are deterministic."""
    large = tf.fill([900, 900], tf.cast(x, tf.float32))
    return tf.reduce_sum(large @ large)


NUMBERS = tf.data.Dataset.range(1000)


@pytest.mark.parametrize(
    ("dataset", "stage"),
    [
        (NUMBERS.map(slow).shuffle(5).prefetch(2), "Map"),
        (NUMBERS.batch(2).map(slow).prefetch(2), "Map"),
        (NUMBERS.map(slow_in_threads, num_parallel_calls=2).take(50), "ParallelMap"),
        (tf.data.Dataset.from_generator(slow_generator, output_types=tf.int64), "Generator"),
    ],
)
def test_the_slowest_stage_is_found(dataset: tf.data.Dataset, stage: str) -> None:
    began = time.monotonic()
    found = datasets.slowest_stage(read(dataset))
    assert found is not None
    assert found[0] == stage
    assert 0 < found[1] < time.monotonic() - began  # in seconds, of one element
    assert stage == "ParallelMap" or found[1] >= 0.009  # it sleeps for 0.01 s


def test_without_a_model_there_is_no_stage() -> None:
    assert datasets.slowest_stage(iter([1, 2])) is None


BOUND = StepTimes(steps=1000, seconds=20.0, input_s=15.0)


def test_it_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    check, iterator = InputBound(), read(NUMBERS.map(slow))
    for _ in range(3):
        check.check(BOUND, iterator)
    (record,) = caplog.records
    assert record.getMessage().startswith(
        "training waits for its input 75 % of the time; its slowest stage is Map, "
    )
    assert record.getMessage().endswith("use dataset.map(fn, num_parallel_calls=tf.data.AUTOTUNE)")


def test_a_stage_that_does_not_explain_the_wait_is_not_named() -> None:
    line = reporter.described(BOUND, ("ParallelMap", 0.0005))  # of 15 ms
    assert line.startswith("training waits for its input 75 % of the time; to read ahead: ")


@pytest.mark.parametrize(
    "times",
    [
        StepTimes(steps=100, seconds=20.0, input_s=5.0),
        StepTimes(steps=100, seconds=reporter.ENOUGH_S / 2, input_s=4.9),
        StepTimes(steps=3, seconds=20.0, input_s=15.0),
    ],
)
def test_nothing_is_said(times: StepTimes, caplog: pytest.LogCaptureFixture) -> None:
    InputBound().check(times, iter(NUMBERS))
    assert caplog.records == []


@pytest.mark.parametrize("endless", [False, True])
def test_the_wait_ends_before_the_step_begins(endless: bool) -> None:
    """Otherwise one thread may run the step first, whose time then counts as a wait."""
    iterator: Any = iter(NUMBERS.map(lambda x: (x, None)))

    @tf.function
    def steps() -> Any:
        return step_loop(lambda x, _: -x, iterator, tf.constant(3, tf.int64), (), endless)

    graph = steps.get_concrete_function().graph
    (loop,) = [op for op in graph.get_operations() if op.type in ("While", "StatelessWhile")]
    body = graph._functions[loop.get_attr("body").name].graph
    kinds = ("Neg",) if endless else ("If", "StatelessIf")
    (step,) = [op for op in body.get_operations() if op.type in kinds]
    before, clocks = [step.inputs[0].op], set()
    while before:
        op = before.pop()
        clocks |= {op.name} if op.type == "Timestamp" else set()
        before += [*op.control_inputs, *(tensor.op for tensor in op.inputs)]
    assert len(clocks) == 2
