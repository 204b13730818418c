"""Sums of workers on several machines: within each machine, then between machines."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from tests.helpers.threads import Exchange, in_threads
from tfmw.train.local_sgd.quantized_sum import QuantizedSum
from tfmw.train.mirrored.collectives import hierarchy, ring
from tfmw.train.mirrored.collectives.all_reduce import RingBroken, even_cuts
from tfmw.train.mirrored.collectives.hierarchy import HierarchicalRing
from tfmw.train.mirrored.collectives.ring import Ring

KEY = b"k" * 32
MACHINES = {
    "two of two": "aabb",
    "in turns": "abab",
    "three of two": "aabbcc",
    "two of three": "abbaba",
}


@pytest.fixture
def joined() -> Iterator[Callable[[str], list[Any]]]:
    """Connects a worker for each letter, which is the name of its machine."""
    rings: list[Any] = []

    def join(machines: str) -> list[Any]:
        exchange = Exchange(len(machines))
        hosts = ["127.0.0.1"] * len(machines)

        def connected(rank: int) -> Any:
            join = functools.partial(ring.connect, rank, hosts, KEY, exchange.of(rank))
            return hierarchy.connect(rank, machines, join)

        rings.extend(in_threads(len(machines), connected))
        return rings

    yield join
    for one in rings:
        one.close()


@pytest.fixture(params=list(MACHINES.values()), ids=list(MACHINES))
def levels(request: pytest.FixtureRequest, joined: Any) -> list[HierarchicalRing]:
    rings: list[HierarchicalRing] = joined(request.param)
    assert {type(ring) for ring in rings} == {HierarchicalRing}
    return rings


def test_every_exchange_is_as_over_one_ring(levels: list[HierarchicalRing]) -> None:
    size = len(levels)
    for length in (0, 1, size - 1, 10_007, 700_001):
        arrays = [np.random.default_rng(r).normal(size=length).astype("f") for r in range(size)]
        cuts = even_cuts(length, size)

        def exchanged(rank: int, arrays: Any = arrays, cuts: Any = cuts) -> Any:
            ring, rows = levels[rank], arrays[rank][: 3 * rank].reshape(-1, 1)
            own = ring.reduce_scatter(arrays[rank].copy(), cuts).copy()
            return {
                "sum": ring.sum(arrays[rank].copy(), what="gradients"),
                "own": own,
                "total": ring.all_gather(own, cuts, np.empty_like(arrays[rank])),
                "rows": ring.gather([rows, rows[:, 0]]),
                "first": ring.broadcast(arrays[rank].copy()),
                "last": ring.broadcast(arrays[rank].copy(), root=size - 1),
            }

        found = in_threads(size, exchanged)
        for rank, results in enumerate(found):
            np.testing.assert_allclose(results["sum"], np.sum(arrays, axis=0), rtol=1e-5, atol=1e-5)
            np.testing.assert_array_equal(results["sum"], found[0]["sum"])
            np.testing.assert_array_equal(results["total"], found[0]["sum"])
            np.testing.assert_array_equal(
                results["own"], found[0]["sum"][levels[rank].own_part(cuts)]
            )
            np.testing.assert_array_equal(results["first"], arrays[0])
            np.testing.assert_array_equal(results["last"], arrays[-1])
            expected = np.concatenate([array[: 3 * r] for r, array in enumerate(arrays)])
            np.testing.assert_array_equal(results["rows"][0], expected[:, None])
            np.testing.assert_array_equal(results["rows"][1], expected)
    assert levels[0].exchanges == 30
    assert levels[0].counts["gradients"] == 5


def test_parts_of_workers_are_the_whole(levels: list[HierarchicalRing]) -> None:
    cuts = [3 * n * n for n in range(len(levels) + 1)]  # as uneven as those of whole variables
    parts = sorted((p.start, p.stop) for p in (ring.own_part(cuts) for ring in levels))
    assert parts == list(itertools.pairwise(cuts))
    arrays = [np.full(cuts[-1], rank + 1.0) for rank in range(len(levels))]

    def both(rank: int) -> Any:
        own = levels[rank].reduce_scatter(arrays[rank].copy(), cuts)
        return levels[rank].all_gather(own, cuts, np.empty(cuts[-1]))

    for total in in_threads(len(levels), both):
        np.testing.assert_array_equal(total, np.sum(arrays, axis=0))


def test_a_way_of_its_own_between_machines(levels: list[HierarchicalRing]) -> None:
    """Values that are rounded there keep what all workers of each machine have added."""
    size = len(levels)
    for length in (1, 999, 10_007):
        arrays = [np.random.default_rng(r).normal(size=length).astype("f") for r in range(size)]
        ways = [QuantizedSum(ring.longest_part(length), "int8") for ring in levels]

        def summed(rank: int, arrays: Any = arrays, ways: Any = ways) -> Any:
            return levels[rank].sum_with(ways[rank], arrays[rank].copy())

        found = in_threads(size, summed)
        exact = np.sum(arrays, axis=0)
        for total in found:
            np.testing.assert_array_equal(total, found[0])
            np.testing.assert_allclose(total, exact, atol=np.abs(exact).max() / 60)


def test_sixteen_bits_are_summed_by_the_given_function(levels: list[HierarchicalRing]) -> None:
    def add(a: Any, b: Any, out: Any) -> None:
        np.maximum(a, b, out=out)

    arrays: list[Any] = [np.full(99, rank, np.float16) for rank in range(len(levels))]
    for total in in_threads(len(levels), lambda rank: levels[rank].sum(arrays[rank], add)):
        np.testing.assert_array_equal(total, np.full(99, len(levels) - 1, np.float16))


@pytest.mark.parametrize("machines", ["aaaa", "abcd", "aab", "aaab"])
def test_one_ring_where_machines_have_one_worker_or_different_numbers(
    joined: Any, machines: str
) -> None:
    rings = joined(machines)
    assert {type(ring) for ring in rings} == {Ring}
    sums = in_threads(len(rings), lambda rank: rings[rank].sum(np.ones(5)))
    assert all((total == len(rings)).all() for total in sums)


def test_unknown_machines_are_different_ones() -> None:
    assert hierarchy.by_machine([None, None, None, None]) is None
    assert hierarchy.by_machine([None, "a", "a", "b", "b"]) is None


def test_a_lost_worker_ends_the_exchanges_of_all(levels: list[HierarchicalRing]) -> None:
    lost = len(levels) - 1

    def leaves(rank: int) -> Any:
        if rank == lost:
            return levels[rank].close()
        return levels[rank].sum(np.ones(1_000_000))

    *others, _ = in_threads(len(levels), leaves)
    assert {type(error) for error in others} == {RingBroken}
    assert any(f"lost worker {lost} " in str(error) for error in others)
    assert all(isinstance(ring.broken, RingBroken) for ring in levels)


def test_workers_in_different_exchanges_are_named(levels: list[HierarchicalRing]) -> None:
    last = len(levels) - 1

    def differ(rank: int) -> Any:
        what = "metrics" if rank == last else "gradients"
        return levels[rank].sum(np.ones(10), what=what)

    errors = [str(error) for error in in_threads(len(levels), differ)]
    named = [f"worker {last} exchange 0 (metrics)" in e for e in errors if "(metrics)" in e]
    assert named
    assert all(named)
