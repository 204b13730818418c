"""Processes that a task starts: multiprocessing imports the script in them again."""

from __future__ import annotations

import json
import os

import pytest

from tfmw import Cluster
from tfmw.observe import task_process

CONFIG = {
    "cluster": {"worker": ["127.0.0.1:1", "127.0.0.1:2"]},
    "task": {"type": "worker", "index": 1},
}


@pytest.mark.process
@pytest.mark.parametrize("method", ["spawn", pytest.param("forkserver", marks=pytest.mark.nightly)])
def test_children_have_no_cluster(run_cluster, method):
    run = run_cluster("children.py", method)
    child = {"cluster": "Cluster(single process)", "joined": False, "progress": None}
    for rank, result in enumerate(run):
        assert f"worker {rank} of 2" in result["cluster"]
        assert result["children"] == [child] * 6
        assert result["script"] == "Cluster(single process)"
        assert f"worker {1 - rank} of 2" in result["of the other task"]
        assert result["progress"] is not None
    assert run[0]["loss"] == run[1]["loss"] == [pytest.approx(55 / 6)]


def test_who_is_a_child(monkeypatch):
    own = {"TF_CONFIG": json.dumps(CONFIG)}
    monkeypatch.delenv(task_process.VARIABLE, raising=False)
    assert Cluster.resolve(own).index == 1  # no task has started this process
    monkeypatch.setenv(task_process.VARIABLE, "")
    task_process.mark(CONFIG)
    marked = {**own, task_process.VARIABLE: os.environ[task_process.VARIABLE]}
    assert Cluster.resolve(marked).index == 1  # the task itself
    of_parent = {
        **own,
        task_process.VARIABLE: marked[task_process.VARIABLE].replace(
            str(os.getpid()), str(os.getppid())
        ),
    }
    assert Cluster.resolve(of_parent).is_single
    assert Cluster.resolve(of_parent, CONFIG).is_single  # the script describes the cluster itself
    another = {**CONFIG, "task": {"type": "worker", "index": 0}}
    assert Cluster.resolve({**of_parent, "TF_CONFIG": json.dumps(another)}).index == 0
    monkeypatch.setenv("TFMW_ERROR_FILE", "/errors/error.json")
    assert task_process.own_path("TFMW_ERROR_FILE") == "/errors/error.json"
    monkeypatch.setenv(task_process.VARIABLE, of_parent[task_process.VARIABLE])
    assert task_process.own_path("TFMW_ERROR_FILE") is None
