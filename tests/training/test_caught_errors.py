"""A program catches the error of a call, and makes further calls."""

from __future__ import annotations

import os
from typing import Any

import pytest

from tfmw.cluster import membership
from tfmw.errors import Preempted, TfmwError, printable
from tfmw.train.checkpoint.store import BackupStore


@pytest.mark.process
@pytest.mark.parametrize("collectives", ["auto", pytest.param("grpc", marks=pytest.mark.nightly)])
def test_the_cluster_is_usable_after_an_error_of_all_tasks(run_cluster, collectives, tmp_path):
    run = run_cluster("caught_errors.py", collectives, "alike", str(tmp_path / "backups"))
    for result in run:
        assert result["caught"] == {
            "compile": "UsageError",
            "arguments": "ValueError",
            "build": "ValueError",
            "step": "InvalidArgumentError",
            "callback": "LookupError",
            "evaluate": "ValueError",
            "batch": "ValueError",
            "settings": "UsageError",
            "class weights": "UsageError",
            "shuffle": "UsageError",
            "validation": "UsageError",
            "steps of evaluate": "UsageError",
            "batches of predict": "UsageError",
            "settings of a batch": "UsageError",
        }
        rates = "about layer 2: Dropout, rate: worker 0 has 0.1, worker 1 has 0.2. Run"
        assert rates in result["messages"]["settings"]
        assert rates in result["messages"]["settings of a batch"]
        for name, sentence in {
            "class weights": "about class_weight: worker 0 has {'0': 1.0}, worker 1 has",
            "shuffle": "about shuffle: worker 0 has False, worker 1 has True. Run",
            "validation": "about validation_data: worker 0 has 'none', worker 1 has 'some'. Run",
            "steps of evaluate": "about steps: worker 0 has 1, worker 1 has 2. Run",
            "batches of predict": "about batch_size: worker 0 has 4, worker 1 has 8. Run",
        }.items():
            assert sentence in result["messages"][name]
        assert result["then"] == dict.fromkeys([*result["caught"], "resumed"], result["first"])
    assert_complete(tmp_path / "backups")  # the run that resumed


@pytest.mark.nightly
@pytest.mark.process
def test_after_an_error_of_one_task_the_next_call_says_so(run_cluster, tmp_path):
    run = run_cluster("caught_errors.py", "auto", "apart", str(tmp_path / "backups"))
    assert run[1]["caught"] == {"callback": "LookupError"}
    for result in run:
        sentence = result["then"]["callback"]
        assert sentence.startswith("TfmwError: the cluster has ended, as an earlier call failed on")
        assert "start all tasks again" in sentence
        # The name of a file that is not UTF-8, in the error, travels and is printed.
        assert r"LookupError: from a callback: caf\udce9" in printable(sentence)
    assert len(os.listdir(tmp_path / "backups")) > 1  # a restart resumes from them


@pytest.mark.process
@pytest.mark.nightly
def test_parameter_servers_are_usable_after_an_error(run_cluster, tmp_path):
    backups = str(tmp_path / "backups")
    run = run_cluster("caught_errors.py", "auto", "servers", backups, workers=1, ps=1)
    assert list(run.chief["caught"].values()) == ["UsageError", "ValueError", "LookupError"]
    resumed = run.chief["then"].pop("resumed")
    assert run.chief["then"] == dict.fromkeys(run.chief["caught"], run.chief["first"])
    assert 0 < resumed[0] < run.chief["first"][0]  # the mean over the steps that were left
    assert_complete(backups)


def assert_complete(directory: Any) -> None:
    newest = BackupStore(directory).newest()
    assert newest is not None
    assert newest.record["done"]


class StoppedByScheduler(Preempted):
    """A preemption of another name."""


def test_only_a_preempted_run_may_be_followed_by_calls(monkeypatch: Any) -> None:
    """Checks the type: an error of another library may have the same name."""
    monkeypatch.setattr(membership, "_joined", object())
    namesake = type("Preempted", (Exception,), {})
    for error, usable in ((StoppedByScheduler("saved"), True), (namesake("saved"), False)):
        monkeypatch.setattr(membership, "_failed", "")
        monkeypatch.setattr(membership, "_preempted", False)
        membership.mark_failed(error)
        if usable:
            membership.require_usable()
            continue
        with pytest.raises(TfmwError, match="the cluster has ended"):
            membership.require_usable()
