"""Batches of a `PyDataset` that one worker computes for all."""

from __future__ import annotations

import contextlib
import functools
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import keras
import numpy as np
import pytest

from tests.helpers.cases import each
from tests.helpers.cluster import run_cluster
from tfmw.cluster import wire
from tfmw.cluster.group import Group
from tfmw.data import py_dataset
from tfmw.data.divided_work import BatchExchange, DividedBatches

KEY = b"of this training"
MOST_KEPT = 4


@pytest.fixture
def exchanges() -> Iterator[list[BatchExchange]]:
    """Batch exchanges of three workers of this process."""
    found = [BatchExchange("127.0.0.1", KEY) for _ in range(3)]
    for exchange in found:
        exchange.peers = [("127.0.0.1", each.port) for each in found]
    yield found
    for exchange in found:
        exchange.close()


class Source:
    """Counts what each worker computes."""

    def __init__(self, exchanges: list[BatchExchange], batch: Any = None):
        self.computed: Counter[tuple[int, int]] = Counter()
        self._batch = batch or (lambda index: (np.full([2, 3], index), {"y": np.float32(index)}))
        self.workers = [
            DividedBatches(exchange, 1, rank, functools.partial(self._compute, rank), MOST_KEPT)
            for rank, exchange in enumerate(exchanges)
        ]
        for worker in self.workers:
            worker[0]
        self.computed.clear()

    def _compute(self, rank: int, index: int) -> Any:
        self.computed[rank, index] += 1
        return self._batch(index)

    def _read(self, rank: int, number: int) -> list[Any]:
        return [self.workers[rank][index] for index in range(number)]

    def read(self, ranks: range = range(3), number: int = 7) -> list[list[Any]]:
        """The batches of each worker, which read at the same time."""
        with ThreadPoolExecutor(3) as pool:
            read = [pool.submit(self._read, rank, number) for rank in ranks]
            return [each.result() for each in read]


def test_each_batch_is_computed_once(exchanges) -> None:
    source = Source(exchanges)
    for _ in range(2):
        for worker in source.workers:
            worker.begin_epoch()
        for batches in source.read():
            for index, (x, y) in enumerate(batches):
                np.testing.assert_array_equal(x, np.full([2, 3], index))
                assert y["y"] == index
                assert y["y"].dtype == np.float32
    owned = {(index % 3, index): 2 for index in range(1, 7)}
    assert source.computed == owned | {(rank, 0): 2 for rank in range(3)}, "the first one by all"


def test_a_worker_that_begins_later_is_awaited(exchanges) -> None:
    source = Source(exchanges)
    source.workers[1].begin_epoch()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(lambda: source.workers[1][3])
        assert not source.computed
        source.workers[0].begin_epoch()
        assert waiting.result()[1]["y"] == 3
    assert source.computed == {(0, 3): 1}


@pytest.mark.parametrize("gone", ["ended", "another epoch", "another key"])
def test_a_batch_that_cannot_be_fetched_is_computed(exchanges, gone: str) -> None:
    source = Source(exchanges)
    for worker in source.workers[1:]:
        worker.begin_epoch()
    if gone == "ended":
        exchanges[0].close()
    elif gone == "another epoch":
        source.workers[0].begin_epoch()
        source.workers[0].begin_epoch()
    else:
        other = BatchExchange("127.0.0.1", b"of another training")
        exchanges.append(other)
        exchanges[1].peers[0] = ("127.0.0.1", other.port)
    (batches,) = source.read(range(1, 2))
    assert [y["y"] for _, y in batches] == list(range(7))
    expected = {(1, 0): 1, (1, 1): 1, (2, 2): 1, (1, 3): 1, (1, 4): 1, (2, 5): 1, (1, 6): 1}
    assert source.computed == expected


def test_a_worker_that_cannot_be_reached_is_tried_once(exchanges, caplog, monkeypatch) -> None:
    attempts = []

    def fails(address: str, key: bytes) -> Any:
        attempts.append(address)
        raise TimeoutError("timed out")

    monkeypatch.setattr(wire, "connect", fails)
    source = Source(exchanges)
    source.workers[1].begin_epoch()
    source.read(range(1, 2))
    assert len(attempts) == 2, "one for each of the others"
    assert sorted(r.getMessage().split(" of a")[0] for r in caplog.records) == [
        f"this worker computes worker {owner}'s batches" for owner in (0, 2)
    ]
    assert source.computed == {(1, index): 1 for index in range(7)}


def test_batches_that_nobody_fetches_are_not_all_kept(exchanges) -> None:
    source = Source(exchanges)
    one, other = source.workers[:2]
    for worker in (one, other):
        worker.begin_epoch()
    for index in range(0, 60, 3):
        one[index]
    assert len(one._batches) == MOST_KEPT
    assert len(one._taken) == MOST_KEPT
    assert [other[index][1]["y"] for index in (3, 57)] == [3, 57]
    assert source.computed[0, 3] == 2, "an old one is computed again"
    assert source.computed[0, 57] == 1


def test_threads_and_batches_do_not_grow_with_the_number_of_workers(monkeypatch) -> None:
    kept = []
    monkeypatch.setattr(py_dataset, "divided", lambda compute, group, most: kept.append(most))

    class Slow(keras.utils.PyDataset):
        def __len__(self) -> int:
            return 9

    for threads, size, expected in ((4, 2, 8), (4, 512, 16), (20, 512, 20), (2, 3, 6)):
        dataset = py_dataset.OrderedPyDataset(Slow(workers=threads), shuffle=False)
        dataset.divide(Group(0, size))
        assert dataset.workers == expected
        assert dataset.max_queue_size == max(10, expected)
        assert kept.pop() == dataset.max_queue_size + expected


@pytest.mark.parametrize(
    "batch", [lambda index: (np.array(["text"]),), lambda index: ([1.0, 2.0], object())]
)
def test_other_values_than_arrays_are_not_sent(exchanges, batch) -> None:
    source = Source(exchanges, batch)
    for worker in source.workers:
        worker.begin_epoch()
    source.read()
    assert source.computed == {(rank, index): 1 for rank in range(3) for index in range(7)}


def test_batches_that_draw_are_computed_by_all(exchanges) -> None:
    source = Source(exchanges, lambda index: (np.random.random([2]),))
    for worker in source.workers:
        worker.begin_epoch()
    source.read()
    assert source.computed == {(rank, index): 1 for rank in range(3) for index in range(7)}


def test_an_error_reaches_every_worker(exchanges) -> None:
    fails = threading.Event()

    def batch(index: int) -> Any:
        if fails.is_set():
            raise OSError("no such file: 0.png")
        return (np.zeros(1),)

    source = Source(exchanges, batch)
    fails.set()
    for worker in source.workers:
        worker.begin_epoch()
        with pytest.raises(OSError, match=r"0\.png"):
            worker[3]


def test_strangers_get_nothing_and_hold_nobody_up(exchanges) -> None:
    source = Source(exchanges)
    for worker in source.workers:
        worker.begin_epoch()
    address = ("127.0.0.1", exchanges[0].port)
    with contextlib.ExitStack() as opened:
        strangers = [
            opened.enter_context(socket.create_connection(address, timeout=30)) for _ in range(20)
        ]
        strangers[0].sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert source.workers[1][3][1]["y"] == 3
        assert source.computed == {(0, 3): 1}
        for stranger in strangers:
            received = b""
            with contextlib.suppress(ConnectionResetError):
                while part := stranger.recv(1000):  # the end comes by itself
                    received += part
            assert len(received) <= 32, "more than a nonce"


@pytest.mark.process
def test_the_work_is_divided_and_the_results_are_those_of_keras() -> None:
    (alone,) = run_cluster("divided_dataset.py", workers=1)
    workers = run_cluster("divided_dataset.py", workers=2)
    for worker in each(workers):
        for name, expected in each(alone.items()):
            for what in ("losses", "weights", "evaluated", "predicted"):
                np.testing.assert_allclose(worker[name][what], expected[what], rtol=2e-5)
    epochs, batches, looked_at = 3, 12, 2
    for name, expected in alone.items():
        computed = [len(worker[name]["computed"]) for worker in workers]
        if name == "whole epochs":
            assert len(expected["computed"]) == looked_at + epochs * batches
            half = looked_at + epochs * batches // 2
            assert computed == [half, half + epochs], "the first batch by all"
        elif name == "draws":
            assert computed == [len(expected["computed"])] * 2
        else:  # the first four batches, in each epoch; threads read ahead, further than that
            for rank, worker in enumerate(workers):
                times = [worker[name]["computed"].count(index) for index in range(4)]
                owned = [epochs * (index % 2 == rank or index == 0) for index in range(4)]
                assert times == [1 + owned[0], 1 + owned[1], owned[2], owned[3]]
