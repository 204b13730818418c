"""The side-car evaluator, beside synchronous training and beside parameter servers."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfmw
from tests.helpers.by_hand import ByHand, free_ports
from tests.helpers.cluster import run_cluster
from tfmw import UsageError
from tfmw.cluster import membership
from tfmw.train.checkpoint import evaluator
from tfmw.train.checkpoint.store import BackupStore
from tfmw.train.saved_model import verify_export as verify

pytestmark = pytest.mark.process
EPOCHS, STEPS = 3, 20


def scalars(folder):
    """{tag: {step: value}} of the TensorBoard files in a folder."""
    found: dict[str, dict[int, float]] = {}
    for path in folder.glob("events.out.*"):
        for record in tf.data.TFRecordDataset(str(path)):
            event = tf.compat.v1.Event.FromString(record.numpy())
            for value in event.summary.value:
                of_tag = found.setdefault(value.tag, {})
                of_tag[event.step] = float(tf.make_ndarray(value.tensor))
    return found


@pytest.fixture(
    scope="module",
    params=[0, pytest.param(1, marks=pytest.mark.nightly)],
    ids=["synchronous", "parameter servers"],
)
def run(request, tmp_path_factory):
    """A run with an evaluator that is given time for each backup."""
    folder = tmp_path_factory.mktemp("evaluator")
    found = run_cluster(
        "evaluated.py",
        str(folder),
        workers=1 + (not request.param),
        ps=request.param,
        evaluator=True,
    )
    return found, folder / "backups"


def test_every_backup_is_evaluated_with_its_weights(run):
    result, folder = run
    done = json.loads((folder / "evaluation" / "done.json").read_text())
    assert set(done) == {str(STEPS * (e + 1)) for e in range(EPOCHS)}
    by_chief = result.chief["val_loss"]
    for epoch, loss in enumerate(by_chief):
        assert done[str(STEPS * (epoch + 1))]["val_loss"] == pytest.approx(loss, rel=1e-5)
    assert result.by_task["evaluator"]["val_loss"] == pytest.approx(by_chief, rel=1e-5)


def test_evaluation_is_logged_for_tensorboard(run):
    result, folder = run
    found = scalars(folder / "evaluation")["evaluation_loss_vs_iterations"]
    expected = {STEPS * (e + 1): loss for e, loss in enumerate(result.chief["val_loss"])}
    assert found == pytest.approx(expected, rel=1e-5)


@contextlib.contextmanager
def tensorboard(folder):
    """The real TensorBoard on a folder: asks its server for a path, with a query."""
    (port,) = free_ports(1)
    options = ["--logdir", str(folder), "--port", str(port), "--bind_all", "--load_fast=false"]
    command = [sys.executable, "-m", "tensorboard.main", *options]
    with (folder / "tensorboard.log").open("wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log)

    def ask(path, **query):
        url = f"http://127.0.0.1:{port}/data/{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=30) as answer:
            return json.load(answer)

    try:
        deadline = time.monotonic() + 60
        while True:
            with contextlib.suppress(urllib.error.URLError):
                # It answers before it has read all files.
                if ask("plugin/scalars/tags").keys() >= {"board/train", "backups/evaluation"}:
                    break
            assert server.poll() is None, (folder / "tensorboard.log").read_text()
            assert time.monotonic() < deadline, (folder / "tensorboard.log").read_text()
            time.sleep(0.1)
        yield ask
    finally:
        server.terminate()
        server.wait()


@pytest.mark.nightly
def test_the_real_tensorboard_shows_training_and_evaluation(run):
    """One curve of the chief's, and beside it the evaluator's, over steps of their own."""
    result, folder = run
    with tensorboard(folder.parent) as ask:

        def curve(run, tag):
            # [wall time, step, value]
            points = ask("plugin/scalars/scalars", run=run, tag=tag)
            return {step: value for _, step, value in points}

        runs = set(ask("plugin/scalars/tags"))
        assert runs == {"board/train", "board/validation", "backups/evaluation"}
        losses = curve("board/train", "epoch_loss")
        assert losses == pytest.approx(dict(enumerate(result.chief["loss"])), rel=1e-5)
        val_losses = curve("board/validation", "epoch_loss")
        assert val_losses == pytest.approx(dict(enumerate(result.chief["val_loss"])), rel=1e-5)
        beside = curve("backups/evaluation", "evaluation_loss_vs_iterations")
        expected = {STEPS * (e + 1): loss for e, loss in enumerate(result.chief["val_loss"])}
        assert beside == pytest.approx(expected, rel=1e-5)


def test_the_profile_is_the_chiefs(run):
    """`profile_batch` of the callback: one trace, with the steps in it."""
    result, folder = run
    traces = list(folder.parent.rglob("*.xplane.pb"))
    if "chief" in result.by_task:  # the coordinator of parameter servers, which asked for none
        assert traces == []
        return
    (trace,) = traces
    assert trace.parts[-5:-2] == ("train", "plugins", "profile")
    assert b"PyFunc" in trace.read_bytes()  # the exchanges with the other worker, over the ring


def test_best_backup_is_exported_and_backups_are_removed(run):
    result, folder = run
    assert verify(folder / "best") == []
    best = min(result.chief["val_loss"])
    assert result.by_task["evaluator"]["best_loss"] == pytest.approx(best, rel=1e-4)
    assert not list(folder.glob("step_*"))


@pytest.mark.nightly
def test_killed_evaluator_resumes(tmp_path):
    """The test kills the evaluator alone, and only the evaluator starts again."""
    arguments = [tmp_path, "--wait"]
    with ByHand("evaluated.py", workers=1, ps=1, arguments=arguments) as cluster:
        first = cluster.start("evaluator")
        first.wait_for("evaluated step 20")
        first.kill()
        second = cluster.start("evaluator")
        second.wait_for("evaluator watches")
        cluster.chief.say("go on")
        assert cluster.chief.end() == 0, cluster.chief.output
        assert second.end() == 0, second.output
    assert "evaluated step 20" not in second.output
    done = json.loads((tmp_path / "backups" / "evaluation" / "done.json").read_text())
    assert {"20", str(STEPS * EPOCHS)} <= set(done)


def test_second_evaluator_is_refused(tmp_path):
    with evaluator._watching(str(tmp_path)):
        second = evaluator._watching(str(tmp_path))
        with pytest.raises(UsageError, match="another evaluator"), second:
            pass


def small_model(weight: float) -> keras.Model:
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.set_weights([np.full((1, 1), weight), np.zeros(1)])
    return model


def trained(folder: Path) -> None:
    """Leaves the backup of a run that is over, and runs the hooks of the end of its process."""
    x: Any = np.ones((4, 1), np.float32)
    callback = tfmw.callbacks.BackupAndRestore(folder, delete_checkpoint=False)
    tfmw.fit(small_model(3.0), x, x, epochs=1, verbose=0, callbacks=[callback])


@pytest.mark.nightly
def test_evaluator_killed_before_an_export_exports_after_its_restart(tmp_path, monkeypatch):
    trained(tmp_path)
    module: Any = evaluator
    export = module.export

    def die(*_: Any) -> None:
        raise SystemExit("killed")

    monkeypatch.setattr(evaluator, "export", die)
    with pytest.raises(SystemExit):
        evaluator.watch(small_model(0.0), lambda: {"loss": 1.0}, tmp_path)
    monkeypatch.setattr(evaluator, "export", export)
    evaluator.watch(small_model(0.0), lambda: {"loss": 1.0}, tmp_path)
    assert verify(tmp_path / "best") == []


@pytest.mark.nightly
def test_backups_are_kept_for_a_restarted_evaluator(tmp_path, monkeypatch):
    at_end: list[Callable[[], Any]] = []
    monkeypatch.setattr(membership, "on_success", at_end.append)

    def killed(_: float) -> None:
        raise SystemExit("killed while it waits for a backup")

    with pytest.raises(SystemExit):
        evaluator.watch(small_model(0.0), lambda: {"loss": 1.0}, tmp_path, sleep=killed)
    x: Any = np.ones((4, 1), np.float32)
    tfmw.fit(small_model(3.0), x, x, epochs=1, verbose=0, backup_dir=tmp_path)
    for end in at_end:
        end()
    store = BackupStore(tmp_path)
    assert store.steps(), "the evaluator would wait for ever"
    history = evaluator.watch(small_model(0.0), lambda: {"loss": 1.0}, tmp_path, sleep=killed)
    assert history.history["val_loss"] == [1.0]
    assert store.steps() == []
    assert not store.has_evaluator()


@pytest.mark.nightly
def test_backups_are_kept_for_an_evaluator_that_starts_after_the_training(tmp_path, monkeypatch):
    at_end: list[Callable[[], Any]] = []
    monkeypatch.setattr(membership, "on_success", at_end.append)
    monkeypatch.setenv("TFMW_EVALUATOR", "1")  # as tfmw run --evaluator sets it
    x: Any = np.ones((4, 1), np.float32)
    tfmw.fit(small_model(3.0), x, x, epochs=1, verbose=0, backup_dir=tmp_path)
    for end in at_end:
        end()

    def never(_: float) -> None:
        raise SystemExit("there is nothing to wait for")

    history = evaluator.watch(small_model(0.0), lambda: {"loss": 1.0}, tmp_path, sleep=never)
    assert history.history["val_loss"] == [1.0]
    assert BackupStore(tmp_path).steps() == []


def test_evaluator_reports_once_that_there_is_no_backup(tmp_path, caplog):
    polls = 0

    def sleep(_: float) -> None:
        nonlocal polls
        polls += 1
        if polls == 200:  # of half a second
            raise SystemExit("enough")

    with pytest.raises(SystemExit):
        evaluator.watch(small_model(0.0), lambda: {"loss": 1.0}, tmp_path, sleep=sleep)
    assert caplog.text.count("the evaluator waits for a backup in") == 1
