"""Every example once an epoch over all tasks, recorded in the training step; predictions; seed."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.helpers.cases import cases, chosen, each
from tests.helpers.cluster import ClusterRun, run_cluster

pytestmark = pytest.mark.process

ALL = list(range(1, 104))

EXPECTED = {
    "plain": ALL,
    "shuffled": ALL,
    "shuffled before a map": ALL,
    "shuffled batches": ALL,
    "cached, shuffled": ALL,
    "shuffle inside of interleave": list(range(1, 101)),
    "parallel interleave in any order": list(range(1, 101)),
    "repeat inside of the epoch": 3 * list(range(1, 31)),
    "filtered": [i for i in ALL if i % 7 != 3],
    "fewer than tasks": [1],
    "batches of one": list(range(1, 6)),
    "padded": ALL,
    "ragged to batch": ALL,
    "zipped": list(range(1, 51)),
    "function": [*range(1, 8), *range(101, 121)],
    "PyDataset": ALL,
    "arrays shuffled": ALL,
    "arrays": ALL,
}


MORE = [
    *("shuffled before a map", "cached, shuffled", "parallel interleave in any order", "zipped"),
    *("repeat inside of the epoch", "batches of one", "padded"),
    *("shuffle inside of interleave", "ragged to batch"),
]


@pytest.fixture(scope="module")
def run(request: pytest.FixtureRequest) -> ClusterRun:
    asked = chosen(request, "test_every_example_once_per_epoch")
    left_out = [name for name in MORE if name not in asked]
    return run_cluster("coverage.py", *left_out)


@pytest.mark.parametrize("name", cases([n for n in EXPECTED if n not in MORE], MORE))
def test_every_example_once_per_epoch(run: ClusterRun, name: str) -> None:
    for epoch in range(2):
        trained = Counter(run[0][name][epoch] + run[1][name][epoch])
        assert trained == Counter(EXPECTED[name]), f"epoch {epoch}"


def test_every_task_counts_the_examples_of_all(run: ClusterRun) -> None:
    """The count holds for each way of dividing the dataset, of known length or not."""
    for counts in each(task["counts"] for task in run):
        assert len(counts) >= 12
        assert counts == {n: sum(len(e) for task in run for e in task[n]) for n in counts}


def test_the_tasks_global_seeds_differ(run: ClusterRun) -> None:
    assert run[0]["global seeds"] != run[1]["global seeds"]


@pytest.mark.parametrize("name", ["shuffled", "shuffled batches", "arrays shuffled", "PyDataset"])
def test_each_epoch_is_shuffled_differently(run: ClusterRun, name: str) -> None:
    first, second = run[0][name]
    assert first != second
    assert first != sorted(first)


def test_skip_and_take_choose_the_same_on_all_tasks(run: ClusterRun) -> None:
    for epoch in range(2):
        trained = Counter(run[0]["skip and take"][epoch] + run[1]["skip and take"][epoch])
        assert len(trained) == 41
        assert set(trained.values()) == {1}


def test_repeated_shuffle_has_each_example_once_per_pass(run: ClusterRun) -> None:
    trained = Counter(e for task in run for epoch in task["steps"] for e in epoch)
    assert sum(trained.values()) == 80
    assert set(trained.values()) == {1}


def test_each_task_maps_only_its_shard(run: ClusterRun) -> None:
    trained = [task["counted map"][0] for task in run]
    calls = [task["map calls"] for task in run]
    assert Counter(trained[0] + trained[1]) == Counter(ALL)
    assert sorted(calls[0] + calls[1]) == ALL
    assert [len(c) for c in calls] == [len(t) for t in trained]
    assert abs(len(calls[0]) - len(calls[1])) <= 1


def test_predictions_are_complete_and_in_order_on_every_task(run: ClusterRun) -> None:
    for task in each(run):
        assert all(task["predictions"].values()), task["predictions"]


@pytest.mark.nightly
def test_seed_makes_runs_equal_bit_for_bit() -> None:
    first, second = (run_cluster("coverage.py", "seeded") for _ in range(2))
    hashes = {task["seeded"] for r in (first, second) for task in r}
    assert len(hashes) == 1
    assert first[0]["other"] not in hashes
