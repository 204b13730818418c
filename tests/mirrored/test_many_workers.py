"""Exchanges of up to 64 workers, which are threads, and plans of up to 512."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.helpers.threads import Exchange, in_threads
from tfmw.train.local_sgd.quantized_sum import QuantizedSum
from tfmw.train.mirrored import shard_plan
from tfmw.train.mirrored.collectives import hierarchy, listener, ring
from tfmw.train.mirrored.collectives.all_reduce import AllReduce, even_cuts

KEY = b"k" * 32
ALIGNED = 32  # elements that a cut may be moved by


@contextlib.contextmanager
def joined(machines: list[int]) -> Iterator[list[AllReduce]]:
    """Connects a worker for each entry, which is the number of its machine."""
    exchange = Exchange(len(machines))
    hosts = ["127.0.0.1"] * len(machines)

    def connected(rank: int) -> AllReduce:
        join = functools.partial(ring.connect, rank, hosts, KEY, exchange.of(rank))
        return hierarchy.connect(rank, machines, join)

    workers = in_threads(len(machines), connected)
    failed = [worker for worker in workers if isinstance(worker, Exception)]
    try:
        assert not failed, failed
        yield workers
    finally:
        for worker in workers:
            if isinstance(worker, AllReduce):
                worker.close()


RINGS = [pytest.param([0] * n, id=f"a ring of {n}") for n in (8, 33, 64)]
LEVELS = [
    pytest.param([rank // 8 for rank in range(48)], id="6 machines of 8"),
    pytest.param([rank % 16 for rank in range(64)], id="16 machines of 4, in turns"),
]


@pytest.mark.parametrize("machines", [*RINGS, *LEVELS])
def test_exchanges_of_many_workers(machines: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    # Over TCP, which every pair of machines has.
    monkeypatch.setenv(listener.SHARED_MEMORY, "0")
    size, length = len(machines), 3 * len(machines) + 1
    # Whole numbers, whose sums are exact in any order.
    arrays = np.random.default_rng(size).integers(-9, 9, [size, length]).astype("f")
    total, cuts = arrays.sum(axis=0), even_cuts(length, size)

    with joined(machines) as workers:

        def exchanged(rank: int) -> dict[str, Any]:
            own = workers[rank].reduce_scatter(arrays[rank].copy(), cuts).copy()
            return {
                "own": own,
                "all": workers[rank].all_gather(own, cuts, np.empty(length, "f")),
                "sum": workers[rank].sum(arrays[rank].copy()),
                "rows": workers[rank].gather([np.full([rank % 3], rank)])[0],
                "first": workers[rank].broadcast(arrays[rank].copy()),
                "shifted": workers[rank].shift([np.full(rank % 3, rank, "f"), arrays[rank]]),
            }

        found = in_threads(size, exchanged)
        parts = [workers[rank].own_part(cuts) for rank in range(size)]
        previous = [worker.previous for worker in workers]
    rows = np.concatenate([np.full([rank % 3], rank) for rank in range(size)])
    assert sorted(previous) == list(range(size))
    for part, before, results in zip(parts, previous, found, strict=True):
        assert not isinstance(results, Exception), results
        np.testing.assert_array_equal(results["own"], total[part])
        np.testing.assert_array_equal(results["all"], total)
        np.testing.assert_array_equal(results["sum"], total)
        np.testing.assert_array_equal(results["rows"], rows)
        np.testing.assert_array_equal(results["first"], arrays[0])
        sent = np.concatenate([np.full(before % 3, before, "f"), arrays[before]])
        np.testing.assert_array_equal(results["shifted"].view("f"), sent)
    assert sorted((part.start, part.stop) for part in parts) == list(itertools.pairwise(cuts))


@pytest.mark.parametrize("machines", [2, 3, 32, 128, 256])
def test_512_workers_have_each_a_part_of_a_sum(machines: int) -> None:
    groups = hierarchy.by_machine([rank % machines for rank in range(512 // machines * machines)])
    assert groups is not None
    size, link = sum(map(len, groups)), SimpleNamespace(peer=None)
    between = [[group[place] for group in groups] for place in range(len(groups[0]))]

    def of(ranks: Sequence[int], rank: int) -> ring.Ring:
        return ring.Ring(ranks.index(rank), ranks, link, link, None)  # type: ignore[arg-type]

    workers = {
        rank: hierarchy.HierarchicalRing(groups, rank, of(groups[m], rank), of(between[p], rank))
        for m, group in enumerate(groups)
        for p, rank in enumerate(group)
    }
    assert sorted(workers) == list(range(size))
    for elements in (0, 1, size + 1, 1_000_000):
        cuts = even_cuts(elements, size)
        parts = [(one.own_part(cuts).start, one.own_part(cuts).stop) for one in workers.values()]
        assert sorted(parts) == list(itertools.pairwise(cuts))
        assert sorted(workers[0].part_number(rank) for rank in range(size)) == list(range(size))


def test_what_quantization_takes_away_from_many_sums_is_not_lost() -> None:
    size, length = 48, 1500
    arrays = np.random.default_rng(0).normal(size=[size, length]).astype("f")
    with joined([0] * size) as workers:

        def summed(rank: int) -> tuple[np.ndarray, np.ndarray]:
            quantized = QuantizedSum(length, "int8")
            totals = [quantized(workers[rank], arrays[rank].copy()) for _ in range(3)]
            return np.stack(totals), quantized.left.ravel()[:length]

        found = in_threads(size, summed)
    totals, _ = found[0]
    assert len({other.tobytes() for other, _ in found}) == 1
    kept = np.sum([left for _, left in found], axis=0)
    np.testing.assert_allclose(totals.sum(axis=0) + kept, 3 * arrays.sum(axis=0), atol=2e-3)


class Replicas(SimpleNamespace):
    """Stand-in for a transport of so many replicas, in a ring or on machines of 8, for a plan."""

    pack_bytes = 1 << 20
    whole_sums = False

    def part_number(self, rank: int) -> int:
        if self.size % 8:
            return int((rank + 1) % self.size)
        machine, place = divmod(rank, 8)
        return int((place + 1) % 8 * (self.size // 8) + (machine + 1) % (self.size // 8))


@pytest.mark.parametrize("size", [1, 2, 3, 7, 8, 33, 48, 64, 512])
@pytest.mark.parametrize("optimizer", [keras.optimizers.Adam, keras.optimizers.Lamb])
def test_a_sharded_update_updates_each_element_once(size: int, optimizer: Any) -> None:
    shapes = [[300, 70], [70], [1], [0], [70, 30], [30], [513]]
    variables = [keras.Variable(np.zeros(shape, "f")) for shape in shapes]
    made = optimizer()
    made.build(variables)
    grads = [tf.zeros(shape) for shape in shapes]
    transport: Any = Replicas(size=size)
    packs = shard_plan.divided(made, transport, grads, variables)
    updated: Counter[tuple[int, int]] = Counter()
    loads: list[int] = [0] * size
    for pack in packs:
        assert (pack.cuts[0], pack.cuts[-1]) == (0, sum(pack.sizes.values()))
        assert len(pack.cuts) == size + 1
        for rank, part in enumerate(pack.parts):
            for index, place in part:
                updated.update((index, e) for e in range(place.start, place.stop))
                loads[rank] += place.stop - place.start
    elements = sum(int(np.prod(shape)) for shape in shapes)
    assert len(updated) == elements
    assert set(updated.values()) == {1}
    largest = 0 if optimizer is keras.optimizers.Adam else 300 * 70  # Lamb looks at whole variables
    assert max(loads) <= max(largest, elements / size + ALIGNED * len(packs))
