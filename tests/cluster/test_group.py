"""Values between workers during training, and what is kept of them in the coordination service."""

from __future__ import annotations

import collections
import contextlib
import itertools
import threading
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from tests.helpers.threads import in_threads
from tfmw.cluster import group, leaving
from tfmw.compat import runtime


class Store:
    """The coordination service of tasks that are threads."""

    def __init__(self) -> None:
        self.longest = 4 << 20  # characters of a message
        self._values: dict[str, Future[str]] = {}
        self.calls: collections.Counter[threading.Thread] = collections.Counter()

    def set(self, key: str, value: str) -> None:
        assert value.isascii()
        assert len(value) <= self.longest
        self.calls[threading.current_thread()] += 1
        self._values.setdefault(key, Future()).set_result(value)

    def get(self, key: str, *_: Any) -> str:
        self.calls[threading.current_thread()] += 1
        return self._values.setdefault(key, Future()).result(60)


class Member(group.Group):
    """The group of a task that is a thread."""

    def __init__(self, rank: int, size: int):
        super().__init__(rank, size, [f"/task:{each}" for each in range(size)])
        self._numbers = itertools.count()

    def _next_key(self) -> str:
        return f"calls/{next(self._numbers)}"


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    made = Store()
    monkeypatch.setattr(runtime, "coordination_set", made.set)
    monkeypatch.setattr(runtime, "coordination_get", made.get)
    monkeypatch.setattr(leaving, "shared_call", contextlib.nullcontext)  # it counts in a process
    return made


@pytest.mark.parametrize("size", [1, 2, 3, 16, 128, 512])
def test_a_worker_makes_as_many_calls_in_a_group_of_any_size(store: Store, size: int) -> None:
    def work(rank: int) -> tuple[list[Any], int]:
        member = Member(rank, size)
        found = [member.from_all(rank), member.from_chief(lambda: rank), member.from_all(-rank)]
        member.require_same({"epochs": 3})
        return found, store.calls[threading.current_thread()]

    results = in_threads(size, work)
    everyone = list(range(size))
    assert [found for found, _ in results] == [[everyone, 0, [-rank for rank in everyone]]] * size
    chief, *others = [calls for _, calls in results]
    assert others == [3 * 2 + 1] * (size - 1)
    assert chief == (3 * size + 1 if size > 1 else 0)


def test_values_may_be_longer_than_a_message(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.longest = 40
    monkeypatch.setattr(group, "_PIECE", 36)
    monkeypatch.setattr(group, "_BYTES", 30)
    texts = ["\u00e9" * length for length in (100, 0, 1, 28)]
    array = np.arange(50.0)

    def work(rank: int) -> list[Any]:
        member = Member(rank, len(texts))
        found = [member.from_all(texts[rank]), member.from_chief(lambda: texts)]
        found.append(member.arrays_from_chief({"a": array} if rank == 0 else {})["a"].tolist())
        return found

    assert in_threads(len(texts), work) == [[texts, texts, array.tolist()]] * len(texts)


@pytest.mark.multiprocess
def test_keys_of_earlier_calls_are_deleted(run_cluster):
    """However many calls a training makes, a few dozen keys are kept on the chief."""
    results = run_cluster("group_keys.py", workers=2)
    assert [r["right"] for r in results] == [True, True]
    deleted = [f"{key}/" for key in results[0]["deleted"]]
    keys = [key for r in results for key in r["keys"]]
    assert len(keys) > 1500
    assert len(set(keys)) == len(keys)
    assert sum(not key.startswith(tuple(deleted)) for key in keys) < 150
    assert [r["first is there"] for r in results] == [False, False]
