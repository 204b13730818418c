"""Values between workers during training, and what is kept of them on the chief."""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.cluster.test_coordination import close, connected
from tests.helpers.threads import in_threads
from tfmw.cluster import coordination, group, leaving
from tfmw.errors import UsageError

SIZE = 3
own = threading.local()


class Member(group.Group):
    """The group of a task that is a thread."""

    def __init__(self, rank: int):
        super().__init__(rank, SIZE)
        self._numbers = itertools.count()
        own.rank = rank

    def _next_key(self) -> str:
        return f"call {next(self._numbers)}"


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    made, _ = connected()
    monkeypatch.setattr(coordination, "current", lambda: made[own.rank])
    monkeypatch.setattr(leaving, "shared_call", contextlib.nullcontext)  # it counts in a process
    yield made
    for worker in made:
        close(worker)


def test_all_tasks_get_all_values_and_the_chief_keeps_none(workers: list[Any]) -> None:
    text = "\u00e9" * (5 << 20)
    array = np.arange(50.0)

    def work(rank: int) -> list[Any]:
        member = Member(rank)
        found = [member.from_all((rank, text)), member.from_chief(lambda: (rank, text))]
        found += [member.from_all(call * rank) for call in range(100)]
        found += [member.from_chief(functools.partial(str, call)) for call in range(100)]
        found.append(member.arrays_from_chief({"a": array} if rank == 0 else {})["a"].tolist())
        member.require_same({"epochs": 3, "class_weight": {np.int64(0): np.float32(0.5)}})
        rate = 0.1 + 1e-9 * rank  # as hosts with other processors may find
        member.require_same({"rate": rate, "limit": float("nan"), "means": {"x": [rate, 2]}})
        with pytest.raises(UsageError, match="epochs: worker 0 has 0, worker 1 has 1"):
            member.require_same({"epochs": rank})
        return found

    first: list[Any] = [[[rank, text] for rank in range(SIZE)], [0, text]]
    gathered = [[call * rank for rank in range(SIZE)] for call in range(100)]
    expected = [*first, *gathered, *map(str, range(100)), array.tolist()]
    assert in_threads(SIZE, work) == [expected] * SIZE
    assert workers[0]._values == workers[0]._gathered == workers[0]._readers == {}


def test_a_usage_error_of_the_chief_is_raised_by_all(workers: list[Any]) -> None:
    def refuse() -> None:
        raise UsageError("no such optimizer")

    errors = in_threads(SIZE, lambda rank: Member(rank).from_chief(refuse))
    assert [str(error) for error in errors] == ["no such optimizer"] * SIZE


@pytest.mark.parametrize("alike", [True, False])
def test_tasks_agree_whether_they_have_failed_alike(workers: list[Any], alike: bool) -> None:
    numbers = itertools.repeat(0)

    def work(rank: int) -> bool:
        return Member(rank).raised_alike(ValueError(), [8 if alike else rank])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(group, "_errors", numbers)
        assert in_threads(SIZE, work) == [alike] * SIZE


def test_a_task_that_does_not_fail_in_time_decides_that_tasks_differ(
    workers: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(rank: int) -> bool:
        return rank < SIZE - 1 and Member(rank).raised_alike(ValueError(), [8])

    monkeypatch.setattr(group, "_errors", itertools.repeat(0))
    monkeypatch.setattr(group, "_ALIKE_S", 0.2)
    assert in_threads(SIZE, work) == [False] * SIZE


def test_calls_are_made_again_for_a_worker_that_makes_them_now(
    workers: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def first(member: Member) -> list[Any]:
        return [member.from_all(member.rank), member.from_chief(lambda: "seed")]

    def work(rank: int) -> Any:
        member = Member(rank)
        if rank == 1:
            return first(member)
        group.repeat([(False, rank), (True, "seed")], member)
        return None

    monkeypatch.setattr(group, "_made", [])
    monkeypatch.setattr(group, "_calls", 0)
    assert in_threads(SIZE, work)[1] == [[0, 1, 2], "seed"]


def test_a_posted_value_is_read_until_its_task_is_lost(workers: list[Any]) -> None:
    both_have_read = threading.Barrier(2)

    def work(rank: int) -> Any:
        member = Member(rank)
        if rank == 1:
            member.post("part/1", {"wrote": True})
            return None
        found = member.posted("part/1", 60.0)
        assert member.posted("part/2", 0.01) is None
        both_have_read.wait(60)
        if rank == 0:
            workers[0]._lost(1, "gone")
        try:
            return found, member.posted("part/2", 60.0)
        except OSError as e:
            return found, str(e)

    sentence = "worker 1 was lost: gone"
    assert in_threads(SIZE, work)[::2] == [({"wrote": True}, sentence)] * 2
