"""train_on_batch, test_on_batch and predict_on_batch beside Keras's methods in one process."""

from __future__ import annotations

import zlib
from typing import Any

import keras
import numpy as np
import pytest

import tfmw
from tests.helpers.cases import cases, chosen, each
from tfmw.train import strategies
from tfmw.train.mirrored import batch_driver

LOOPS = ["gan"]
MORE_LOOPS = [
    "batches_of_many_sizes",
    "clipped_weights",
    "weighted_examples",
    "own_step",
    "reinforce",
]

pytestmark = pytest.mark.process


@pytest.fixture(
    scope="module", params=[pytest.param("devices", marks=pytest.mark.nightly), "workers"]
)
def tasks(request: pytest.FixtureRequest, run_cluster: Any) -> list[dict[str, Any]]:
    """Result of each task of two replicas."""
    workers = 2 if request.param == "workers" else 1
    loops = sorted(set(chosen(request, "test_a_loop_has_the_numbers_of_one_process", "loop")))
    # Else the methods of Keras that the loops run beside would be those of tfmw, too.
    options = ["--keras", "off"]
    run = run_cluster("on_batch.py", request.param, *loops, workers=workers, options=options)
    assert run.status == 0, run.output
    return list(run)


@pytest.mark.parametrize("loop", cases(LOOPS, MORE_LOOPS))
def test_a_loop_has_the_numbers_of_one_process(tasks: list[dict[str, Any]], loop: str) -> None:
    for task in each(tasks):
        expected, received = task[loop]
        np.testing.assert_allclose(received, expected, rtol=2e-4, atol=2e-5)


def test_the_model_is_an_ordinary_one_between_calls(tasks: list[dict[str, Any]]) -> None:
    first = tasks[0]["ordinary"]
    assert len({tuple(state) for state in first["states"]}) == 3
    for task in tasks[1:]:
        assert task["ordinary"] == first


def test_compile_takes_effect(tasks: list[dict[str, Any]]) -> None:
    assert all(not any(task["recompiled"]) for task in tasks)


def test_a_global_seed_takes_effect(tasks: list[dict[str, Any]]) -> None:
    for first, second in each(task["seeded"] for task in tasks):
        assert first == second


def test_parameter_servers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strategies, "servers_of", lambda strategy: "servers")
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with pytest.raises(tfmw.UsageError, match="train_on_batch needs synchronous replicas"):
        tfmw.train_on_batch(model, np.zeros([2, 2]), np.zeros([2, 1]))


def test_wrong_use_is_one_sentence(tasks: list[dict[str, Any]]) -> None:
    checked = [task for task in tasks if "lengths" in task]
    assert len(checked) == (len(tasks) == 1)  # the next test has those of several tasks
    for task in checked:
        assert "tensors with [8, 7] rows" in task["lengths"]
        assert "from within tfmw.fit" in task["within fit"]


def test_tasks_that_differ_are_told_so(run_cluster: Any) -> None:
    """The error comes before the step: it has no effect, and no task waits for another."""
    run = run_cluster("on_batch.py", "differences", status=2)
    assert "tasks passed different batches" in run.output
    for task in run:
        for name in ("batches", "lengths", "calls"):
            assert "tasks passed different batches" in task[name], name
        assert "bias' differs between tasks" in task["weights"]
        assert "received 1.0 in a batch" in task["lists"]


class TestComparison:
    """Comparison of the values that tasks sum before a step, for any number of tasks."""

    @staticmethod
    def differing(values: list[list[float]]) -> list[bool]:
        every = np.array(values)
        return batch_driver.differing(every.sum(0), np.square(every).sum(0), len(values))

    def sampled(self, tasks: int, batch: Any, other: Any = None) -> list[list[float]]:
        """Samples of tasks that have a batch, and of the last one, which may have another batch."""
        checksum = zlib.crc32(str(tasks).encode())
        one = batch_driver._sampled(batch, tasks, checksum)
        last = one if other is None else batch_driver._sampled(other, tasks, checksum)
        return [[*one, *one]] * (tasks - 1) + [[*last, *one]]

    def test_equal_batches_are_equal_for_any_number_of_tasks(self) -> None:
        for tasks in range(1, 513):
            batch = np.random.default_rng(tasks).normal(size=(5, 3)) * 10.0 ** (tasks % 9)
            assert self.differing(self.sampled(tasks, batch)) == [False, False], tasks

    def test_one_other_batch_is_seen_among_any_number_of_tasks(self) -> None:
        for tasks in range(2, 513):
            ids: np.ndarray = np.arange(tasks, tasks + 40) + 10**6
            assert self.differing(self.sampled(tasks, ids, ids + 1)) == [True, False], tasks
            values = ids / 1e5
            assert self.differing(self.sampled(tasks, values, values * 1.01)) == [True, False]
            nearly = values * (1 + 1e-6)
            assert self.differing(self.sampled(tasks, values, nearly)) == [False, False]

    def test_each_bit_of_a_checksum_counts(self) -> None:
        for tasks in (2, 33, 64, 512):
            for bit in range(32):
                checksums = [0xFFFFFFFF] * (tasks - 1) + [0xFFFFFFFF ^ 1 << bit]
                values = [batch_driver._sampled(np.zeros(1), 0, c) for c in checksums]
                assert self.differing(values) == [True], (tasks, bit)
