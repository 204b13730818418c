"""A worker of local SGD is lost, and all continue from copies that were never sent."""

from __future__ import annotations

import re
import threading
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.helpers.cases import each
from tests.helpers.cluster import ClusterRun
from tests.helpers.threads import in_threads
from tests.training.test_lost_workers import results, trained
from tfmw.cluster.group import Group
from tfmw.train.checkpoint.tensor_files import ReplicaRows, SlotParts
from tfmw.train.mirrored.peer_state import PeerState
from tfmw.train.mirrored.state_copies import Continued, Copy, Layout

STEPS, EVERY, EPOCHS = 7, 3, 4  # of an epoch of the program; between two exchanges


def steps_of_copies(run: ClusterRun) -> list[int]:
    return [int(step) for step in re.findall(r"continue after step (\d+)", run.output)]


@pytest.mark.process
def test_new_workers_have_the_weights_and_the_state_of_the_lost_ones() -> None:
    undisturbed = trained("local")
    disturbed = trained("local", "kill:1:1:2", "kill:0:2:4")
    assert results(disturbed) == results(undisturbed)
    found = steps_of_copies(disturbed)
    assert len(found) == 2
    # Copies are taken right after an exchange.
    assert all(step % STEPS and step % STEPS % EVERY == 0 for step in found)


@pytest.mark.process
def test_the_replica_of_a_lost_machine_continues_with_the_mean_of_the_others() -> None:
    run = trained("local", "machine:1:2:3")
    assert run.output.count("the state of worker 1 is lost: the mean of the others'") == 1
    assert run.output.count("is replaced (not counted as a restart)") == 1
    for worker in each(run):
        assert len(worker["seen"]) == STEPS * EPOCHS  # no step is repeated, or left out
        assert worker["score"] == run[0]["score"]
        assert worker["history"] == run[0]["history"]
        assert np.isfinite(worker["history"]["loss"]).all()


def test_a_copy_of_rows_is_taken_without_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other worker, whose description of its rows is known, is not there at all."""
    state = PeerState(Group(1, 2), tf.distribute.get_strategy(), None)
    own: Any = SlotParts([], [], [ReplicaRows("m", 2, 1, tf.constant([[1.5, 2.5]]))])
    sent: list[Any] = []

    def described(group: Group, value: Any) -> list[Any]:
        sent.append(value)
        return [[("m", 0, 2)], value]

    monkeypatch.setattr(Group, "from_all", described)
    driver: Any = type("Driver", (), {"model": keras.Sequential()})
    for _ in range(2):
        layout, shards = state._shards(driver, own)
        assert layout == ([[("m", 0, 2)], [("m", 2, 2)]], {"m": ("float32", (2, 2))}, True)
        (values,) = shards[1]
        np.testing.assert_array_equal(values.view("float32"), [1.5, 2.5])
        assert list(shards) == [1]
    assert sent == [[("m", 2, 2)]]  # once


def test_only_rows_that_their_own_worker_lacks_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first two workers have changed places, as after another order of the hosts."""
    layout = Layout.of([[("m", 2 * i, 2)] for i in range(3)], {"m": ("float32", (3, 2))}, True)
    senders = {0: 1, 1: 0, 2: 2}
    holders = {sender: rank for rank, sender in senders.items()}
    barrier, sent = threading.Barrier(3), dict[int, np.ndarray]()
    sources: list[int] = []

    def send(state: PeerState, array: np.ndarray, source: int) -> None:
        if state._group.rank == source:
            sent[source] = array.copy()
            sources.append(source)
        barrier.wait()
        array[...] = sent[source]

    def received(rank: int) -> list[np.ndarray]:
        state = PeerState(Group(rank, 3), tf.distribute.get_strategy(), None)
        of_one: np.ndarray = np.full(2, holders[rank], "float32").view(np.uint8)
        state._complete = [Copy({"step": 7}, {}, layout, {holders[rank]: [of_one]})]
        rows = state._receive_rows(Continued(7, 0, 0, senders), layout)
        return [array for _, array in layout.rows_in(rows, rank)]

    monkeypatch.setattr(PeerState, "_send", send)
    for rank, (found,) in enumerate(in_threads(3, received)):
        np.testing.assert_array_equal(found, [[rank, rank]])
    assert sources == [1, 0]
