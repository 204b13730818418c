"""Callbacks on two processes: the chief decides and all hear, one task writes, errors end all."""

from __future__ import annotations

import re

import keras
import keras_tuner
import pytest
from keras_tuner.src.engine.tuner_utils import SaveBestEpoch
from tqdm.keras import TqdmCallback

from tests.helpers.cluster import ClusterRun, run_cluster
from tfmw.errors import UsageError
from tfmw.train.callbacks import roles

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def decisions(tmp_path_factory: pytest.TempPathFactory) -> ClusterRun:
    return run_cluster("callbacks.py", "decisions", str(tmp_path_factory.mktemp("d")))


@pytest.fixture(scope="module")
def writers(tmp_path_factory: pytest.TempPathFactory) -> ClusterRun:
    return run_cluster("callbacks.py", "writers", str(tmp_path_factory.mktemp("w")))


@pytest.mark.parametrize(
    "name",
    [
        "early",
        "plateau",
        "schedule",
        "stop 0 batch",
        "stop 0 epoch",
        "stop 1 batch",
        "stop 1 epoch",
        "weights 0",
        "weights 1",
        "plain",
    ],
)
def test_all_tasks_end_with_the_same_weights(decisions: ClusterRun, name: str) -> None:
    chief, other = ({k: v for k, v in r[name].items() if k != "warnings"} for r in decisions)
    assert chief == other


def test_early_stopping_restores_the_best_weights(decisions: ClusterRun) -> None:
    # The loss falls, and the callback wants it to rise: the first epoch is its best.
    assert decisions[0]["early"]["epochs"] == [0, 1]
    assert decisions[0]["early"]["sha"] == decisions[0]["first epoch"]
    assert decisions[0]["early"]["sha"] != decisions[0]["plain"]["sha"]


def test_learning_rates_change_everywhere(decisions: ClusterRun) -> None:
    assert decisions[1]["plateau"]["rate"] == pytest.approx(0.1 * 0.5**3)
    assert decisions[1]["schedule"]["rate"] == pytest.approx(0.1 / 4)


def test_the_chief_stops_all(decisions: ClusterRun) -> None:
    assert decisions[1]["stop 0 batch"]["iterations"] == 3
    assert decisions[1]["stop 0 epoch"]["epochs"] == [0, 1]


def test_stop_on_another_task_is_ignored(decisions: ClusterRun) -> None:
    for hook in ("batch", "epoch"):
        assert decisions[1][f"stop 1 {hook}"]["epochs"] == [0, 1, 2, 3]
        assert decisions[1][f"stop 1 {hook}"]["sha"] == decisions[1]["plain"]["sha"]


def test_weights_changed_on_one_task_only(decisions: ClusterRun) -> None:
    """The chief's change is everybody's; another task's is undone. Both are told."""
    plain = decisions[0]["plain"]
    assert decisions[1]["weights 0"]["sha"] != plain["sha"]
    assert decisions[1]["weights 0"]["rate"] == pytest.approx(0.05)
    assert decisions[1]["weights 1"]["sha"] == plain["sha"]
    assert decisions[1]["weights 1"]["rate"] == pytest.approx(0.1)
    for on in (0, 1):
        told = [w for w in decisions[0][f"weights {on}"]["warnings"] if "chief's values" in w]
        assert len(told) == 1
    assert not any("chief's values" in w for w in plain["warnings"])


def test_nan_ends_the_run_everywhere(decisions: ClusterRun) -> None:
    assert decisions[0]["nan epochs"] == decisions[1]["nan epochs"] == [0]


def test_only_the_chief_writes(writers: ClusterRun) -> None:
    chief, other = writers
    assert other["files"] == []
    assert {"1.weights.h5", "2.weights.h5", "best.keras", "log.csv"} <= set(chief["files"])
    boards = [f for f in chief["files"] if f.startswith("board/train/")]
    assert boards
    lines = chief["csv"].splitlines()
    assert [line.split(",")[0] for line in lines] == ["epoch", "0", "1"]


def test_every_task_runs_callbacks_that_do_not_write(writers: ClusterRun) -> None:
    #              LambdaCallback, RemoteMonitor, chief_only, ChiefOnly(...)
    assert writers[0]["calls"] == [[0, 1], [0, 1], 2, 2]
    assert writers[1]["calls"] == [[0, 1], [], 0, 0]


def test_only_the_chief_logs_to_a_client(writers: ClusterRun) -> None:
    assert writers[0]["logged"] == [[0, 1], [0, 1]]
    assert writers[1]["logged"] == [[], []]


def test_what_wraps_fit_runs_on_the_chief(writers: ClusterRun) -> None:
    assert [task["runs"] for task in writers] == [1, 0]


def test_checkpoint_has_the_weights_of_all_workers(writers: ClusterRun) -> None:
    assert writers[0]["loaded"] == writers[0]["fit"]["sha"] == writers[1]["fit"]["sha"]


@pytest.mark.nightly
def test_an_error_in_one_tasks_callback_ends_the_run(tmp_path) -> None:
    run = run_cluster("callbacks.py", "breaks", str(tmp_path), status=1)
    assert run.by_task == {}
    last = run.output.strip().splitlines()[-1]
    assert re.search(r"worker 1.*ValueError: the callback of task 1 is broken", last), last


@pytest.mark.parametrize(
    "callback",
    [
        keras.callbacks.ModelCheckpoint("s3://bucket/model.keras"),
        keras.callbacks.CSVLogger("az://bucket/log.csv"),
        keras.callbacks.TensorBoard("s3://bucket/logs"),
    ],
    ids=lambda callback: type(callback).__name__,
)
def test_files_of_callbacks_in_a_bucket_are_refused(callback):
    kind = type(callback).__name__
    with pytest.raises(
        UsageError, match=f"of {kind} can be written to .*tfmw.storage.upload after"
    ):
        roles.for_task([callback], is_chief=True, workers=1)


def test_orbax_checkpoint_is_refused_on_several_workers():
    class OrbaxCheckpoint(keras.callbacks.Callback):
        """Keras's own needs Orbax, which is not installed."""

    callback = OrbaxCheckpoint()
    assert roles.for_task([callback], is_chief=True, workers=1) == [callback]
    with pytest.raises(UsageError, match=r"use keras\.callbacks\.ModelCheckpoint"):
        roles.for_task([callback], is_chief=True, workers=2)


def test_callbacks_of_other_packages_that_write_are_known_by_name() -> None:
    assert roles.writes(TqdmCallback(verbose=0))
    assert roles.writes(SaveBestEpoch(keras_tuner.Objective("loss", "min"), "best.keras"))
    own = type("TqdmCallback", (keras.callbacks.Callback,), {})
    assert not roles.writes(own())
