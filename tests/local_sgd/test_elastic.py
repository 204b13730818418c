"""Elastic rounds on real processes: as one process, and with members that are lost."""

from __future__ import annotations

import collections
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import tfmw
from tests.helpers.cases import each
from tests.helpers.cluster import ClusterRun, run_cluster
from tests.programs.elastic import EPOCHS, X, Y, made
from tfmw.callbacks import BackupAndRestore
from tfmw.errors import UsageError
from tfmw.train.checkpoint.store import BackupStore
from tfmw.train.local_sgd.elastic_training import MemberBackups
from tfmw.train.local_sgd.round_client import RoundClient

ELASTIC = ("--elastic", "--max-restarts", "9")


def weights(found: Any) -> np.ndarray:
    return np.concatenate([np.ravel(w) for w in found["weights"]])


@pytest.fixture(scope="module")
def calm() -> ClusterRun:
    return run_cluster("elastic.py", "sync", workers=3, options=["--elastic"])


@pytest.mark.nightly
def test_rounds_after_each_step_are_synchronous_steps(calm: ClusterRun) -> None:
    model = made(keras.optimizers.SGD(0.05))
    history = model.fit(
        X, Y, batch_size=17, epochs=3, shuffle=False, validation_data=(X[:30], Y[:30]), verbose=0
    )
    expected = np.concatenate([np.ravel(w) for w in model.get_weights()])
    for member in each(calm):
        np.testing.assert_allclose(weights(member["numpy"]), expected, rtol=2e-5, atol=1e-6)
        np.testing.assert_allclose(
            member["numpy"]["val_loss"], history.history["val_loss"], rtol=1e-5
        )


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["numpy", "dataset", "int8", "XLA, bf16", "by time"])
def test_all_members_have_the_same_weights(calm: ClusterRun, name: str) -> None:
    first, *others = (weights(member[name]) for member in calm)
    assert np.isfinite(first).all()
    assert len(others) == 2
    for other in others:
        np.testing.assert_array_equal(other, first)


def counted(run: ClusterRun) -> collections.Counter[int]:
    """Number of steps, of rounds that have ended, that trained on each example."""
    ended = (numbers for member in run for _, _, numbers in member["ended"])
    return collections.Counter(n for numbers in ended for n in numbers)


@pytest.fixture(scope="module")
def lost() -> ClusterRun:
    return run_cluster(
        "elastic.py",
        "lose",
        "1:7:steps",
        "0:14:round",
        "2:21:after",
        workers=3,
        options=ELASTIC,
    )


def test_each_example_is_trained_on_once_in_each_epoch(lost: ClusterRun) -> None:
    assert counted(lost) == dict.fromkeys(range(len(X)), EPOCHS)


def test_the_others_went_on(lost: ClusterRun) -> None:
    """The others' processes were not restarted, and some rounds had two members."""
    assert lost.output.count("alone: it failed") == 3
    assert "attempt 1 starts" not in lost.output
    assert {members for members, _, _ in lost[1]["ended"]} > {3}


def test_the_lost_ones_have_the_common_weights_at_the_end(lost: ClusterRun) -> None:
    for member in each(lost):
        np.testing.assert_array_equal(weights(member), weights(lost[0]))
        assert member["epochs"] == list(range(EPOCHS))


@pytest.mark.nightly
def test_where_all_are_lost_all_resume_from_their_backups() -> None:
    # In the first step of the second epoch, in which member 2 has one step less.
    losses = ["0:8:steps", "1:8:steps", "2:7:steps"]
    run = run_cluster("elastic.py", "lose", "with-backups", *losses, workers=3, options=ELASTIC)
    assert counted(run) == dict.fromkeys(range(len(X)), EPOCHS)
    assert run.output.count("alone: it failed") == 3
    assert len({weights(member).tobytes() for member in run}) == 1


@pytest.mark.nightly
@pytest.mark.parametrize(
    "losses",
    [
        pytest.param(["saved=11,11", "1:13:steps"], id="one lost"),
        pytest.param(["saved=14,11", "0:15:steps", "1:15:steps"], id="all lost"),
    ],
)
def test_backups_between_two_rounds_lose_no_example(losses: list[str]) -> None:
    """Backups are due after each second and each fifth step, rounds after each third.

    If all are lost, member 1 has its last backup from an earlier round than member 0.
    """
    run = run_cluster(
        "elastic.py", "lose", "with-backups", "every=2,5", *losses,
        workers=2, options=ELASTIC,
    )  # fmt: skip
    assert counted(run) == dict.fromkeys(range(len(X)), EPOCHS)
    assert run.output.count("alone: it failed") == len(losses) - 1
    assert len({weights(member).tobytes() for member in run}) == 1


@pytest.mark.nightly
def test_all_members_save_and_resume_where_one_is_preempted() -> None:
    run = run_cluster(
        "elastic.py", "lose", "with-backups", "0:10:leave",
        workers=2, options=ELASTIC,
    )  # fmt: skip
    assert "attempt 1 starts at once: the tasks of attempt 0 saved their state" in run.output
    assert run.output.count("restored step") == 2
    assert counted(run) == dict.fromkeys(range(len(X)), EPOCHS)
    assert len({weights(member).tobytes() for member in run}) == 1


@pytest.mark.parametrize("positions", [{}, {"positions": [8, 8]}])
def test_another_number_of_members_is_refused(positions: dict[str, Any], tmp_path: Path) -> None:
    """A new member has no backup, and would train on its part of earlier batches again."""
    client = RoundClient("127.0.0.1:1", 0, 3, b"key")
    record = {"done": False, "run": "another", "step": 8, "round": 2, **positions}
    with BackupStore(str(tmp_path)).locked():
        BackupStore(str(tmp_path)).write(8, {"w": np.zeros(1)}, record)
    backups = MemberBackups(client, BackupAndRestore(str(tmp_path)), None, [], 0)
    number = 2 if positions else 0
    said = f"is of {number} members of elastic rounds, and this run has 3: resume with as many"
    with pytest.raises(UsageError, match=said), backups:
        pass
    with BackupStore(str(tmp_path)).locked():
        pass


@pytest.mark.nightly
def test_a_stopped_worker_is_replaced() -> None:
    run = run_cluster("elastic.py", "lose", "1:7:stop", workers=2, options=ELASTIC)
    assert "worker 1 is killed: " in run.output
    assert run.output.count("alone: it failed") == 1
    assert counted(run) == dict.fromkeys(range(len(X)), EPOCHS)


@pytest.mark.nightly
def test_workers_of_a_notebook() -> None:
    model = made()
    history = tfmw.fit(
        model,
        X,
        Y,
        batch_size=17,
        epochs=2,
        sync=tfmw.LocalSGD(3, elastic=True),
        workers=2,
        on=tfmw.engines.Local(max_restarts=1),
        verbose=0,
    )
    assert len(history.history["loss"]) == 2
    assert not np.array_equal(model.get_weights()[0], made().get_weights()[0])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"every": 5}, "no server of rounds"),
        ({"every": "5 s", "elastic": False}, "expected a whole number"),
        ({"every": 8, "fragments": 2}, "exchange all weights"),
        ({"every": "often"}, "unknown"),
    ],
)
def test_wrong_arguments(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        tfmw.fit(made(), X, Y, sync=tfmw.LocalSGD(**{"elastic": True, **options}))


def test_a_member_needs_a_whole_description(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TFMW_ROUNDS", "127.0.0.1:1")
    with pytest.raises(UsageError, match="expected HOST:PORT, two whole numbers"):
        tfmw.fit(made(), X, Y, sync=tfmw.LocalSGD(5))
    for name, value in (("TFMW_MEMBER", "0"), ("TFMW_MEMBERS", "2"), ("TFMW_TOKEN", "x")):
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match="without sync="):
        tfmw.fit(made(), X, Y)
    with pytest.raises(UsageError, match="would train it alone"):
        tfmw.train_on_batch(made(), X, Y)
    with pytest.raises(tfmw.TfmwError, match="no server of rounds at"):
        tfmw.fit(made(), X, Y, sync=tfmw.LocalSGD(5))
