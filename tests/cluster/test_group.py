"""Values between workers during training, and what is kept of them in the coordination service."""

from __future__ import annotations

import collections
import contextlib
import itertools
import threading
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

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

    def root_cause(self, found: Exception) -> Any:
        return found


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


class Late:
    """TensorFlow's context, with a chief that sets a value after hours, on the clock that passes.

    Args:
        lost_s: when the chief can no longer be reached.
    """

    def __init__(self, set_s: float, lost_s: float):
        self.now_s, self._set_s, self._lost_s = 0.0, set_s, lost_s

    def get_config_key_value(self, key: str, timeout_ms: int) -> str:
        if self.now_s >= self._set_s:
            return '0 {"value": 3}'
        self.now_s += timeout_ms / 1000
        raise tf.errors.DeadlineExceededError(None, None, "not set")

    def check_collective_ops_peer_health(self, task: str, timeout_ms: int) -> None:
        if self.now_s >= self._lost_s:
            raise tf.errors.UnavailableError(None, None, f"{task} is lost")


def wait_for(late: Late, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(runtime, "_context", SimpleNamespace(context=lambda: late))
    monkeypatch.setattr(runtime, "time", SimpleNamespace(monotonic=lambda: late.now_s))
    return Member(1, 2).from_chief(lambda: None)


def test_a_worker_waits_for_the_chief_as_long_as_it_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The chief may be in a callback that it alone runs: an evaluation, an upload."""
    day_s = 86400.0
    assert wait_for(Late(day_s, lost_s=2 * day_s), monkeypatch) == 3
    late = Late(2 * day_s, lost_s=day_s)
    with pytest.raises(tf.errors.UnavailableError, match="task:0 is lost"):
        wait_for(late, monkeypatch)
    assert day_s <= late.now_s < day_s + 60


@pytest.mark.process
def test_keys_of_earlier_calls_are_deleted(run_cluster):
    """The chief keeps a few dozen keys, for any number of calls in a training."""
    results = run_cluster("group_keys.py", workers=2)
    assert [r["right"] for r in results] == [True, True]
    deleted = [f"{key}/" for key in results[0]["deleted"]]
    keys = [key for r in results for key in r["keys"]]
    assert len(keys) > 1500
    assert len(set(keys)) == len(keys)
    assert sum(not key.startswith(tuple(deleted)) for key in keys) < 150
    assert [r["first is there"] for r in results] == [False, False]
