"""Hosts come and go: real supervisors, real training. Each launch shows several rows.

The hosts are addresses of loopback or, where a link is cut, network namespaces.
"""

from __future__ import annotations

import csv
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.helpers.buckets import NIGHTLY, opened, s3
from tests.helpers.cases import cases
from tests.helpers.cluster import run_cluster
from tests.helpers.hosts import NETWORK, Hosts, Loopback, Namespaces, network
from tfmw.launcher import run_files

pytestmark = pytest.mark.process

ALL = os.environ.get("TFMW_TEST_HOSTS") == "all"
"""Whether `make nightly` runs these tests, at every point."""


TOKEN = "0123456789abcdef" * 4


@pytest.fixture
def cables() -> Iterator[Loopback | Namespaces]:
    with network(3) as found:
        yield found


def assert_same_to_rounding(done: dict[str, Any], undisturbed: dict[str, Any]) -> None:
    for name, values in undisturbed["history"].items():
        np.testing.assert_allclose(done["history"][name], values, rtol=2e-5, err_msg=name)
    for found, expected in zip(done["weights"], undisturbed["weights"], strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def scalars(folder: Path, tag: str) -> dict[int, float]:
    """Scalars as TensorBoard shows them: the last value of each step, over all files."""
    found: dict[int, float] = {}
    for path in sorted(folder.glob("events.*"), key=lambda path: path.stat().st_mtime):
        for event in tf.compat.v1.train.summary_iterator(str(path)):
            for value in event.summary.value:
                if value.tag == tag:
                    found[event.step] = float(tf.make_ndarray(value.tensor))
    return found


@pytest.fixture(params=["directory", pytest.param("bucket", marks=pytest.mark.nightly)])
def bucket(request, cables, monkeypatch) -> Iterator[str]:
    """URL of a bucket that all hosts reach; "" for a directory."""
    if request.param == "directory":
        yield ""
        return
    inside = isinstance(cables, Namespaces)
    with s3(monkeypatch, f"{NETWORK}.254" if inside else "127.0.0.1") as server:
        yield server.url


@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of MLflow
def test_hosts_come_and_go(cables, bucket, tmp_path):
    """The link of the host that leads goes down, and is back; `make nightly` has more of it.

    Lock, record and backups are in a directory, or in a bucket: the only place that hosts share.
    """
    epochs, go = 10, tmp_path / "go"
    flags = [
        f"--backup_dir={bucket or tmp_path}/backup",
        f"--log={tmp_path}",
        f"--epochs={epochs}",
    ]
    flags += ["--pause=0.3", f"--go={go}", f"--board={tmp_path}/board"]
    flags += [f"--mlflow={tmp_path}/mlflow.db"] if ALL else []
    options = ["--max-restarts=20", "--min-hosts=2", "--rejoin-timeout=2"]
    env = {"TFMW_TOKEN": TOKEN}
    # Host 0 leads, unless the others start late: then the chief, its worker, moves with the lead.
    place = f"{bucket}/supervisors" if bucket else ""
    with Hosts(
        *(tmp_path, cables, *options),
        program="hosts_fit.py",
        flags=flags,
        env=env,
        first=0,
        bucket=place,
        forked=not ALL,
    ) as h:
        h.steps(0, count=9)  # an epoch is logged after the last backup
        leader = h.leader()
        if ALL:  # a host dies, and comes back
            other = 0 if leader else 1
            h.kill(other)
            h.wait_for(leader, f"attempt 1 on .*, without {h.name(other)}")
            h.steps(leader, hosts=2)
            h.start(other)
            h.steps(other, hosts=3)

        # The host that leads is cut off without a word, and comes back; it cannot lead meanwhile.
        for victim in (leader, (leader + 1) % 3)[: 2 if ALL else 1]:
            rest = (victim + 1) % 3
            cut_at = h.now(rest)
            cables.cut(h, victim)
            h.steps(rest, hosts=2)
            assert h.leader() != victim
            since = h.now(h.leader())
            cables.mend(h, victim)
            h.wait_for(
                h.leader(),
                f"{h.name(victim)} joins once the tasks have saved their state",
                since=since,
            )
            h.wait_for(h.leader(), r"exited .*\(not counted as a restart\)", since=since)
            h.steps(victim, hosts=3)
            lines = h.lines[rest]
            made, later = (
                set(re.findall(r"\] step (\d+) at", "".join(part)))
                for part in (lines[:cut_at], lines[cut_at:])
            )
            assert len(made & later) <= 6  # those since the backup before

        if ALL:  # the supervisor of the host that leads dies, and comes back
            led = h.leader()
            h.kill(led)
            leader = h.wait_for_leader(other_than=led)
            h.steps(leader, hosts=2)
            h.start(led)
            h.steps(led, hosts=3)
        go.touch()
        assert h.end() == [0, 0, 0], h.output()
        results, record, output = h.results(), h.record(), "\n".join(h.lines[h.leader()])
    alone = run_cluster(
        "hosts_fit.py", f"--backup_dir={tmp_path}/b", f"--epochs={epochs}", workers=1
    )
    assert len(results) == 3
    for worker in results:
        assert_same_to_rounding(worker, alone[0])
        # trackers continue with this run on any host of the chief
        assert worker["run"] == record["run"]
    assert record["status"] == 0
    # The chief has moved; the time of all attempts is divided nevertheless.
    (line,) = re.findall(
        r"tfmw: (?:goodput \d+ % of|took) ([\d.]+) s: training .* restarts ", output
    )
    times = [float(at) for at in re.findall(r"\] step \d+ at ([\d.]+)", output)]
    assert float(line) > max(times) - min(times)
    expected = alone[0]["history"]["loss"]
    for name in ("anew", "append"):
        with open(tmp_path / f"{name}.csv", newline="") as file:
            rows = list(csv.DictReader(file))
        assert [int(row["epoch"]) for row in rows] == list(range(epochs)), name
        np.testing.assert_allclose([float(row["loss"]) for row in rows], expected, rtol=2e-5)
    if ALL:  # one run in the tracker, with each epoch, though the chief has moved
        from mlflow.tracking import MlflowClient

        client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
        (run,) = client.search_runs([e.experiment_id for e in client.search_experiments()])
        assert run.info.status == "FINISHED"
        logged = {m.step: m.value for m in client.get_metric_history(run.info.run_id, "loss")}
        assert sorted(logged) == list(range(epochs))
        np.testing.assert_allclose([logged[epoch] for epoch in range(epochs)], expected, rtol=2e-5)
    shown = scalars(tmp_path / "board" / "train", "epoch_loss")
    assert sorted(shown) == list(range(epochs))
    np.testing.assert_allclose([shown[epoch] for epoch in range(epochs)], expected, rtol=2e-5)


@pytest.mark.nightly
def test_hosts_with_several_workers_each(tmp_path, monkeypatch):
    """The one that dies is replaced on its host. Each host's status shows its own workers."""
    flags, options = [f"--backup_dir={tmp_path}/backup"], ["--workers-per-host=2"]
    monkeypatch.setenv(run_files.RUNTIME_DIRECTORY, str(tmp_path / "runtime"))
    with Hosts(tmp_path, 2, *options, "--max-restarts=2", flags=flags) as hosts:
        _, found = hosts.wait_for(1, r"made step [5-9] (\d+)")
        shown = {run.pid: run.status() for run in run_files.runs()}
        for host, process in enumerate(hosts.processes):
            assert process is not None
            status = shown[process.pid]
            own, others = (2 * host, 2 * host + 1), (2 - 2 * host, 3 - 2 * host)
            assert [task["task"] for task in status["tasks"]] == [f"worker {i}" for i in own]
            assert status["elsewhere"] == {f"worker {i}": f"127.0.0.{2 - host}" for i in others}
        os.kill(int(found[1]), signal.SIGKILL)
        assert hosts.end() == [0, 0], hosts.output()
    results = hosts.results()
    assert [worker["attempt"] for worker in results] == [0] * 4
    assert len({worker["weights"] for worker in results}) == 1
    for worker in results:
        assert set(worker["seen"]) == {3.0}  # epochs


@pytest.mark.nightly
@pytest.mark.parametrize("store", ["s3", *NIGHTLY])
def test_with_a_bucket_the_host_that_leads_dies_and_comes_back(tmp_path, monkeypatch, store):
    epochs, go = 8, tmp_path / "go"
    flags = [f"--backup_dir={tmp_path}/backup", f"--epochs={epochs}", "--pause=0.7", f"--go={go}"]
    options = ["--max-restarts=5", "--min-hosts=1", "--rejoin-timeout=1"]
    with opened(store, monkeypatch) as server:
        options.append(f"--rendezvous={server.url}/run7")
        with Hosts(tmp_path, 2, *options, program="hosts_fit.py", flags=flags) as h:
            h.wait_for(0, r"\] step \d+ at")
            leader = next(host for host in (0, 1) if h.said(host))
            other = 1 - leader
            h.kill(leader)
            h.wait_for(other, "attempt 1 on .*, without ")
            h.steps(other)
            h.start(leader)
            h.wait_for(other, "joins once the tasks have saved their state")
            h.wait_for(other, r"attempt 2 on 127.0.0.1, 127.0.0.2")
            h.steps(leader)
            go.touch()
            assert h.end() == [0, 0], h.output()
            results = h.results()
    assert [worker["attempt"] for worker in results] == [2, 2]
    assert results[0]["run"] == results[1]["run"]
    assert results[0]["weights"] == results[1]["weights"]
    np.testing.assert_allclose(results[0]["history"]["ids"], [47.5] * epochs, rtol=1e-6)


@pytest.mark.parametrize("kind", cases(["synchronous"], ["local"]))
def test_without_backups_hosts_die_come_back_and_leave(tmp_path, kind):
    """The state is in the memory of those that stay, in files that their new workers find."""
    epochs, go = 8, tmp_path / "go"
    flags = [f"--epochs={epochs}", "--pause=0.3", f"--go={go}"]
    flags += ["--local"] if kind == "local" else []
    options = ["--max-restarts=5", "--min-hosts=1", "--rejoin-timeout=1"]
    options.append(f"--rendezvous=dir:{tmp_path}/backup/supervisors")
    env = {"TFMW_TOKEN": TOKEN}
    with Hosts(
        *(tmp_path, 2, *options), program="hosts_fit.py", flags=flags, env=env, forked=True
    ) as h:
        h.steps(0, count=4)
        leader = h.leader()
        other = 1 - leader
        h.kill(other)
        if kind == "local":
            h.wait_for(
                leader, r"state of worker \d is lost: the mean of the others' takes its place"
            )
        h.wait_for(leader, r"workers continue after step [1-9]")
        h.steps(leader, hosts=1)
        h.start(other)
        h.wait_for(leader, "joins once the tasks have saved their state")
        h.wait_for(leader, r"exited .*\(not counted as a restart\)")
        h.steps(other, hosts=2)
        h.kill(other, signal.SIGTERM)
        h.wait_for(leader, f"without {h.name(other)}")
        h.steps(leader, hosts=1)
        go.touch()
        assert h.end()[leader] == 0, h.output()
        results = h.results()
    (done,) = results
    # The mean of all ids and of their squares in each epoch: each example was trained on once.
    np.testing.assert_allclose(done["history"]["ids"], [47.5] * epochs, rtol=1e-6)
    squares = [np.mean(np.arange(96) ** 2)] * epochs
    np.testing.assert_allclose(done["history"]["squares"], squares, rtol=1e-6)
    assert done["attempt"] == 3


@pytest.mark.nightly
def test_a_killed_worker_is_replaced_on_its_host(tmp_path):
    """The other host's worker stays, and waits; no attempt begins, and nothing is on disk."""
    undisturbed = run_cluster("lost_workers.py", "arrays", workers=2)
    ends = ["kill:1:1:2", "kill:0:2:4"]
    with Hosts(
        *(tmp_path, 2, "--max-restarts=1"),
        program="lost_workers.py",
        flags=["arrays", *ends],
        env={"TFMW_TOKEN": TOKEN},
        bucket=f"dir:{tmp_path}/supervisors",
        forked=True,
    ) as h:
        assert h.end() == [0, 0], h.output()
        results, output = h.results(), h.output()
    assert len(results) == 2
    for found, expected in zip(results, undisturbed, strict=True):
        for name in ("state", "history", "seen", "score"):
            assert found[name] == expected[name], name
    replaced = re.findall(r"tfmw: (worker \d) is replaced \(not counted as a restart\)", output)
    assert sorted(replaced) == ["worker 0", "worker 1"]
    assert "attempt 0 on " in output
    assert "attempt 1 on " not in output
