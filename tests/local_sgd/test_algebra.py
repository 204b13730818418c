"""The arithmetic of rounds, without replicas: schedule, outer step, sums in a few bits."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.helpers.cases import each
from tests.helpers.threads import Exchange, in_threads
from tfmw.train.local_sgd.outer_step import OuterStep, fragments_of
from tfmw.train.local_sgd.quantized_sum import BLOCK, LEVELS, QuantizedSum
from tfmw.train.local_sgd.rounds import Rounds
from tfmw.train.local_sgd.sync_settings import LocalSGD
from tfmw.train.mirrored.collectives import ring
from tfmw.train.mirrored.synchronization import EachStep

SGD = keras.optimizers.SGD
RANDOM = np.random.default_rng(0)


def settings(every: int, fragments: int = 1, overlap: int = 0) -> LocalSGD:
    return LocalSGD(every, fragments=fragments, overlap=overlap)


def outer(values: list[Any], optimizer: Any = None, fragments: int = 1) -> OuterStep:
    config = keras.optimizers.serialize(optimizer or SGD(1.0))
    return OuterStep([tf.constant(v, tf.float32) for v in values], config, fragments)


def test_rounds_have_all_that_a_driver_asks_of_a_synchronization():
    strategy = tf.distribute.get_strategy()
    asked = {name for name in dir(EachStep(strategy)) if not name.startswith("_")}
    assert {"reduction", "count_examples", "reduced", "after_steps", "state"} <= asked
    assert asked <= set(dir(Rounds(strategy, settings(2))))


# ---------------------------------------------------------------- the schedule


@pytest.mark.parametrize(
    ("every", "fragments", "overlap"), [(1, 1, 0), (6, 2, 0), (6, 2, 2), (7, 3, 1), (5, 5, 0)]
)
def test_each_fragment_is_exchanged_once_in_every_steps_and_none_overlap(every, fragments, overlap):
    due = settings(every, fragments, overlap)
    steps = range(1, 4 * every + 1)
    applied = [(s, f) for s in steps if (f := due.applied_after(s)) is not None]
    begun = [(s, f) for s in steps if (f := due.begun_after(s)) is not None]
    assert [f for _, f in applied] == [f % fragments for f in range(4 * fragments)]
    for at in range(4 * fragments):
        assert applied[at] == (begun[at][0] + overlap, begun[at][1])
        assert overlap == 0 or at == 0 or begun[at][0] > applied[at - 1][0] - 1
    acts = sorted({s for s, _ in applied + begun})
    step, seen = 0, []
    while step < 3 * every:
        step += due.steps_to_next(step)
        seen.append(step)
    assert seen == acts[: len(seen)]


@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("sizes", [[1, 1, 1, 1, 1], [100, 1, 1, 1, 1], [1, 1, 1, 1, 100]])
def test_fragments_have_all_weights_once_in_order(sizes, count):
    parts = fragments_of(sizes, count)
    assert [i for part in parts for i in part] == list(range(len(sizes)))
    assert len(parts) == count
    assert all(parts)


def test_fragments_of_alike_weights_are_alike():
    assert [len(part) for part in fragments_of([7] * 12, 4)] == [3, 3, 3, 3]


# ---------------------------------------------------------------- the outer step


def mean_gradient(step: OuterStep, of_workers: list[Any], fragment: int = 0) -> tf.Tensor:
    grads = [step.gradient(fragment, [tf.constant(w, tf.float32) for w in ws]) for ws in of_workers]
    return tf.add_n(grads) / len(grads)


def test_sgd_of_rate_1_sets_weights_to_their_mean():
    workers = [[RANDOM.normal(size=(3, 2)), RANDOM.normal(size=4)] for _ in range(3)]
    step = outer([np.ones((3, 2)), np.zeros(4)])
    step.apply(0, mean_gradient(step, workers))
    for common, values in zip(each(step.common), zip(*workers, strict=True), strict=True):
        np.testing.assert_allclose(common, np.mean(values, axis=0), atol=1e-6)


def test_workers_that_agree_keep_what_they_have():
    step = outer([np.ones(5)])
    step.apply(0, mean_gradient(step, [[np.arange(5.0)]] * 4))
    np.testing.assert_allclose(step.common[0], np.arange(5.0), atol=1e-6)


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "rmsprop"])
def test_any_optimizer_updates_by_the_mean(optimizer):
    start, workers = RANDOM.normal(size=6), [[RANDOM.normal(size=6)] for _ in range(2)]
    step = outer([start], keras.optimizers.get(optimizer))
    variable, expected = keras.Variable(start, dtype="float32"), keras.optimizers.get(optimizer)
    for _ in range(3):
        mean = np.mean([variable - w[0].astype("float32") for w in workers], axis=0)
        step.apply(0, mean_gradient(step, workers))
        expected.apply([tf.constant(mean, tf.float32)], [variable])
    np.testing.assert_allclose(step.common[0], variable, rtol=1e-5)


def test_fragments_have_optimizers_of_their_own():
    step = outer([np.zeros(2), np.zeros(3)], keras.optimizers.Adam(0.1), 2)
    step.apply(1, tf.ones(3))
    np.testing.assert_array_equal(step.common[0], np.zeros(2))
    np.testing.assert_allclose(step.common[1], -0.1 * np.ones(3), rtol=1e-4)
    assert [int(v) for v in step.state if "iteration" in v.path] == [0, 1]


@pytest.mark.parametrize(
    ("overlap", "mixed", "first", "second"),
    # Weights that begin at 1 and lose 2 in each step; an outer rate of 2. Worked out by hand, as
    # are the published histories of torchft (its `test_fixtures`), with which these agree.
    [
        (0, 0.0, [-11, -35, -59], [-23, -47]),
        (0, 0.5, [-8, -24.5, -40.25], [-17, -32]),
        (1, 0.0, [-7, -27, -47], [-19, -39]),
    ],
)
def test_fragments_in_turns_follow_the_paper(overlap, mixed, first, second):
    due, step = settings(6, 2, overlap), outer([np.ones(1)] * 2, SGD(2.0), 2)
    weights, begun = np.ones(2), {}
    found: list[list[float]] = [[], []]
    for number in range(1, 16):
        weights -= 2
        if (fragment := due.begun_after(number)) is not None:
            own = [weights[fragment : fragment + 1]]
            begun[fragment] = mean_gradient(step, [own, own], fragment)
        if (fragment := due.applied_after(number)) is not None:
            step.apply(fragment, begun.pop(fragment))
            common = float(step.common[fragment][0])
            weights[fragment] = common + mixed * (weights[fragment] - common)
            found[fragment].append(float(weights[fragment]))
    assert found == [first, second]


# ---------------------------------------------------------------- sums in a few bits


@contextlib.contextmanager
def quantized_sums(size: int, elements: int, kind: str) -> Iterator[Callable[..., list[Any]]]:
    exchange = Exchange(size)
    hosts = ["127.0.0.1"] * size
    rings = in_threads(
        size, lambda r: ring.connect(r, hosts, b"k" * 32, exchange.of(r), range(size))
    )
    sums = [QuantizedSum(elements, kind) for _ in range(size)]

    def run(arrays: list[Any]) -> list[Any]:
        return in_threads(size, lambda rank: (sums[rank](rings[rank], arrays[rank]), sums[rank]))

    yield run
    for one in rings:
        one.close()


@pytest.mark.parametrize("kind", LEVELS)
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("elements", [1, BLOCK, 3 * BLOCK + 7, 600 * BLOCK])
def test_rounding_loses_nothing_that_does_not_come_later(kind, size, elements):
    given, taken = np.zeros(elements), np.zeros(elements)
    with quantized_sums(size, elements, kind) as run:
        for _ in range(3):
            arrays = [RANDOM.normal(size=elements).astype("float32") for _ in range(size)]
            results = run(arrays)
            for total, _ in results:
                np.testing.assert_array_equal(total, results[0][0])
            given += np.sum(arrays, axis=0, dtype="float64")
            taken += results[0][0]
            left = sum(q.left.reshape(-1)[:elements].astype("float64") for _, q in results)
            np.testing.assert_allclose(taken + left, given, atol=1e-4)
            assert np.abs(taken - given).max() <= 5 * size / LEVELS[kind] * size


def test_eight_bits_send_a_quarter_of_the_bytes():
    for kind, least in (("int8", 3.98), ("int4", 7.9)):
        packed = QuantizedSum(100 * BLOCK, kind).packed(np.ones([100, BLOCK], np.float32))
        assert 4 * 100 * BLOCK / packed.nbytes > least


@pytest.mark.parametrize("kind", LEVELS)
def test_largest_values_zeros_and_nan_travel(kind):
    quantized = QuantizedSum(BLOCK, kind)
    blocks: np.ndarray[Any, Any] = np.zeros([4, BLOCK], np.float32)
    blocks[1] = np.linspace(-3, 3, BLOCK)
    blocks[2, 5] = np.nan
    blocks[3, 7] = np.inf
    found = quantized.unpacked(quantized.packed(blocks))
    np.testing.assert_array_equal(found[0], 0)
    np.testing.assert_allclose(found[1, [0, -1]], [-3, 3], rtol=1e-6)
    assert np.abs(found[1] - blocks[1]).max() <= 3 / LEVELS[kind] / 2 * 1.001
    assert not np.isfinite(found[2:]).any()
