"""Keys, errors and losses of workers over their own connections; the workers are threads."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest
import tensorflow as tf

from tests.helpers.threads import in_threads
from tfmw.cluster import coordination
from tfmw.cluster.coordination import Coordination
from tfmw.cluster.wire import Channel

NAMES = ["worker 0", "worker 1", "worker 2"]


def connected(*silent: int) -> tuple[list[Any], list[socket.socket]]:
    """The workers' coordination, and their ends of the connections to the chief.

    Args:
        silent: ranks of workers that are connected and send nothing.
    """
    pairs = []
    for _ in NAMES[1:]:
        with socket.create_server(("127.0.0.1", 0)) as server:
            one = socket.create_connection(server.getsockname())
            pairs.append((server.accept()[0], one))
    chief = Coordination(0, NAMES, {rank: Channel(a) for rank, (a, _) in enumerate(pairs, 1)})
    ends = [b for _, b in pairs]
    others = [
        None if rank in silent else Coordination(rank, NAMES, {0: Channel(end)})
        for rank, end in enumerate(ends, 1)
    ]
    return [chief, *others], ends


def close(worker: Any) -> None:
    worker._left.update(range(len(NAMES)))
    worker._failed.set()  # ends its thread
    for peer in worker._peers.values():
        peer.close()


@pytest.fixture
def workers() -> Iterator[list[Any]]:
    made, _ = connected()
    yield made
    for worker in made:
        close(worker)


def test_a_key_is_read_by_all_set_once_and_deleted_with_those_below(workers: list[Any]) -> None:
    def work(rank: int) -> str:
        if rank == 1:
            workers[1].set("a/b", ["é" * 5000])
        value: str = workers[rank].get("a/b", 60.0)
        return value

    assert in_threads(3, work) == [["é" * 5000]] * 3
    assert [worker.set("a/b", "again") for worker in workers] == [["é" * 5000]] * 3
    workers[2].set("ab", "stays")
    workers[2].delete("a")
    for worker in workers:
        with pytest.raises(tf.errors.DeadlineExceededError):
            worker.get("a/b", 0.01)
        assert worker.get("ab") == "stays"
    workers[0].set("a/b", "later")
    assert [w.get("a/b") for w in workers] == ["later"] * 3


def test_an_error_that_a_worker_reports_ends_the_calls_of_all(workers: list[Any]) -> None:
    def work(rank: int) -> str:
        if rank == 2:
            workers[2].fail("ValueError: bad batch")
        with pytest.raises(tf.errors.InternalError) as found:
            workers[rank].get("never", 60.0)
        return found.value.message

    sentence = "Error reported from /job:worker/task:2: ValueError: bad batch"
    assert in_threads(3, work) == [sentence] * 3
    for worker in workers:
        assert worker.error(60.0).message == sentence
        with pytest.raises(tf.errors.InternalError, match="bad batch"):
            worker.set("a", "b")


@pytest.mark.parametrize("lost", [0, 1])
def test_the_loss_of_a_worker_is_known_to_all(workers: list[Any], lost: int) -> None:
    workers[lost]._left.update(range(3))  # it notices nothing itself
    for peer in workers[lost]._peers.values():
        peer.close()
    for worker in (worker for worker in workers if worker.rank != lost):
        with pytest.raises(tf.errors.UnavailableError, match=f"^worker {lost} was lost: "):
            worker.get("never", 60.0)


def test_workers_leave_together_without_an_error(workers: list[Any]) -> None:
    def leave(rank: int) -> None:
        workers[rank].leave(rank)

    assert in_threads(3, leave) == [None] * 3
    assert [worker.ended for worker in workers] == [{0: 0, 1: 1, 2: 2}, {0: 0, 2: 2}, {0: 0, 1: 1}]
    assert [worker.error(0.0) for worker in workers] == [None] * 3


@pytest.mark.parametrize("elsewhere", [True, False])
def test_a_silent_worker_is_lost_unless_its_process_is_known_to_run(
    monkeypatch: pytest.MonkeyPatch, elsewhere: bool
) -> None:
    """A worker that holds the interpreter's lock sends nothing for as long."""
    monkeypatch.setattr(coordination, "_TICK_S", 0.01)
    monkeypatch.setattr(coordination, "SILENT_TICKS", 1)
    monkeypatch.setattr(coordination, "SILENT_TICKS_ELSEWHERE", 3)
    own = coordination._process()
    (chief, _, other), ends = connected(1)
    chief._processes[1] = ["another machine", *own[1:]] if elsewhere else own
    try:
        if elsewhere:
            sentence = "worker 1 was lost: it does not respond"
            with pytest.raises(tf.errors.UnavailableError, match=sentence):
                chief.get("never", 60.0)
            assert other.error(60.0).message == sentence
        else:
            while chief._silent[1] < 20:
                time.sleep(0.01)
            assert chief.error(0.0) is None
    finally:
        close(chief)
        close(other)
        ends[0].close()
