"""Functions as one op: on which device, of which arguments, and run by how many threads."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

from tfmw.compat.graph import calls_function
from tfmw.compat.parameter_servers import TracedOp, one_op

FLOAT = tf.TensorSpec([None], tf.float32)
ELSEWHERE = "/job:ps/replica:0/task:0/device:CPU:0"


def called(op: TracedOp, *specs: tf.TensorSpec) -> Any:
    """The op that runs the function, in a graph."""
    graph = tf.function(op, autograph=False).get_concrete_function(*specs).graph
    (call,) = filter(calls_function, graph.get_operations())
    return call


def executor(op: TracedOp, *specs: tf.TensorSpec) -> bytes:
    """The kind of executor that runs the function."""
    found: bytes = called(op, *specs).get_attr("executor_type")
    return found


def test_one_thread_runs_what_calls_no_function() -> None:
    op = TracedOp(lambda x: x * 2, FLOAT)
    assert executor(op, FLOAT) == b"SINGLE_THREADED_EXECUTOR"
    branches = TracedOp(lambda x: tf.cond(x[0] > 0, lambda: x * 2, lambda: x), FLOAT)
    assert executor(branches, FLOAT) == b""
    assert branches(tf.constant([3.0])).numpy() == [6.0]


def test_a_condition_of_which_nothing_depends_is_not_run() -> None:
    def double(x: tf.Tensor) -> tf.Tensor:
        tf.cond(x[0] > 0, lambda: x * 3, lambda: x)
        return x * 2

    assert executor(TracedOp(double, FLOAT), FLOAT) == b"SINGLE_THREADED_EXECUTOR"


def test_an_op_within_is_none_of_its_own() -> None:
    double, triple = one_op(lambda x: x * 2, waits=False), one_op(lambda x: x * 3)
    assert executor(TracedOp(double, FLOAT), FLOAT) == b"SINGLE_THREADED_EXECUTOR"
    assert executor(TracedOp(triple, FLOAT), FLOAT) == b"", "it may wait: by a thread of its own"
    assert double(tf.constant([1.0])).numpy() == [2.0]


@pytest.mark.parametrize("device", [ELSEWHERE, "/device:CPU:1", "/device:GPU:0"])
def test_ops_on_other_devices(device: str) -> None:
    def add(x: tf.Tensor) -> tf.Tensor:
        with tf.device(device):
            return x + 1

    assert not TracedOp(add, FLOAT).is_on_one_device
    assert TracedOp(lambda x: x + 1, FLOAT).is_on_one_device


def test_which_arguments_are_used() -> None:
    def step(values: list[tf.Tensor], more: dict[str, tf.Tensor]) -> Any:
        values[0] * 2  # nothing depends on it
        return values[1] + 1, more["returned"]

    specs = [FLOAT, FLOAT], {"returned": FLOAT, "unused": FLOAT}
    assert TracedOp(step, *specs).uses == [False, True, True, False]


def test_it_is_traced_once() -> None:
    traces = []

    def double(x: tf.Tensor) -> tf.Tensor:
        traces.append(x)
        return x * 2

    op = TracedOp(double, FLOAT)

    @tf.function(autograph=False)
    def loop(x: tf.Tensor) -> Any:
        (end,) = tf.while_loop(lambda x: tf.reduce_sum(x) < 100, lambda x: [op(op(x))], [op(x)])
        return end

    assert loop(tf.constant([1.0])).numpy() == [128.0]
    assert len(traces) == 1
