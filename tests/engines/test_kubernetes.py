"""Jobs on a Kubernetes of this machine, whose pods are processes: helpers/fake_kubernetes.py."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tfmw
from tests.engines.contract import (
    PLAIN,
    TIMEOUT_S,
    Contract,
    FromAShell,
    HasController,
    ancestor,
    doubled,
    marked_copy,
    meet,
    process_of,
    rank,
    runs_forever,
    shell,
    wait_for,
)
from tests.helpers.cluster import PYTHONPATH
from tests.helpers.fake_kubernetes import FakeKubernetes
from tfmw.cluster.signals import LEAVE
from tfmw.engines import Engine, Job, Kubernetes
from tfmw.errors import PREEMPTED, TaskFailed, UsageError
from tfmw.launcher.engines import kubernetes, kubernetes_api

# The client's own sockets are closed by the garbage collector.
pytestmark = [pytest.mark.process, pytest.mark.filterwarnings("ignore::ResourceWarning")]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeKubernetes]:
    folder = tmp_path_factory.mktemp("kubernetes")
    with FakeKubernetes(folder) as made, pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "KUBECONFIG", str(made.kubeconfig))
        yield made
        gc.collect()


@pytest.fixture(scope="module")
def engine(cluster: FakeKubernetes) -> Kubernetes:
    return Kubernetes(image="tfmw:test", python=sys.executable, grace_s=20)


class TestKubernetes(FromAShell, HasController, Contract):
    setting = "python"
    place = r"Job tfmw-\w+ in the namespace training"
    host = "tfmw.launcher.engines.kubernetes_tasks"
    lost = r"its controller is gone: its container has ended: SIGKILL"
    test_fit_equals_that_of_two_workers = marked_copy(
        Contract.test_fit_equals_that_of_two_workers, pytest.mark.nightly
    )
    test_other_versions_are_refused = marked_copy(
        Contract.test_other_versions_are_refused, pytest.mark.nightly
    )
    test_missing_module_is_named = marked_copy(
        Contract.test_missing_module_is_named, pytest.mark.nightly
    )

    def environment(self, engine: Engine, home: Path) -> dict[str, str]:
        first = os.path.dirname(sys.executable)
        return {kubernetes.IMAGE: "tfmw:test", "PATH": f"{first}{os.pathsep}{os.environ['PATH']}"}

    def controller(self, engine: Engine, job: Job) -> int:
        number = job.id.partition(":")[2]
        return process_of("-m tfmw.launcher.engines.kubernetes_tasks control", number)

    @contextlib.contextmanager
    def tasks_that_find(self, engine: Engine, path: Path) -> Iterator[Engine]:
        assert isinstance(engine, Kubernetes)
        variable = {"name": "PYTHONPATH", "value": f"{path}{os.pathsep}{PYTHONPATH}"}
        pod = {"spec": {"containers": [{"name": "tfmw", "env": [variable]}]}}
        yield dataclasses.replace(engine, pod_template=pod)

    @pytest.fixture(autouse=True)
    def _leaves_nothing(self, cluster: FakeKubernetes) -> Iterator[None]:
        yield
        wait_for(lambda: not [key for key in cluster.objects if key[0] != "events"])

    @pytest.mark.nightly
    def test_drained_pods_save_their_state_and_come_back(
        self, cluster: FakeKubernetes, engine: Kubernetes, tmp_path: Path
    ) -> None:
        """One pod is evicted; the restart does not count. The API server is busy, then away."""
        job = self.submit(engine, leaves_once, str(tmp_path), max_restarts=1)
        wait_for(lambda: len(list(tmp_path.glob("up_*"))) == 2)
        cluster.faults.extend([429, 500, 503] * 3)
        cluster.drain(cluster.pods("task")[1], "node h2 is drained")
        wait_for((tmp_path / "asked_0").exists)
        cluster.away = True
        wait_for((tmp_path / "left_1").exists)
        cluster.away = False
        assert job.result(TIMEOUT_S) == ["again", "again"]
        assert re.search(r"worker 1 on \S+: its machine will end: all save their", job.logs())
        assert "(not counted as a restart)" in job.logs()
        job.forget()

    @pytest.mark.nightly
    def test_pods_without_room(
        self, cluster: FakeKubernetes, engine: Kubernetes, tmp_path: Path
    ) -> None:
        """The reason is told while the job waits; a range starts with the pods that have room."""
        cluster.room = 1
        try:
            job = self.submit(engine, doubled, 4)
            wait_for(lambda: "waiting" in job.details())
            wait_for(lambda: "2 Insufficient cpu" in job.details()["waiting"])
            assert job.status() == "queued"
            why = "tfmw: the tasks wait: no node has room for a pod: 0/2 nodes are available"
            assert why in job.logs()
            shown = shell("status", job.id).splitlines()[-1]
            assert re.match(r"tasks wait for \d+ s: no node has room for a pod: 0/2 nodes", shown)
            job.cancel()
            assert job.status() == "cancelled"
            job.forget()
            wait_for(lambda: not cluster.pods("task"))

            grows = tfmw.submit(
                needs_two, (str(tmp_path),), (1, 2), on=engine, env=PLAIN, max_restarts=2
            )
            wait_for((tmp_path / "alone").exists)
            assert grows.details()["workers"] == 1
        finally:
            cluster.room = 100
        assert grows.result(TIMEOUT_S) == [2, 2]
        assert "tfmw: there is a place for more tasks" in grows.logs()
        grows.forget()

    @pytest.mark.nightly
    def test_suspended_job_saves_its_state(
        self, cluster: FakeKubernetes, engine: Kubernetes, tmp_path: Path
    ) -> None:
        """Kueue suspends the tasks' Job to give its place to another, and starts it at first."""
        queued = dataclasses.replace(engine, queue="team")
        job = self.submit(queued, leaves_once, str(tmp_path), max_restarts=1)
        admitted = admit(cluster)
        assert admitted["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team"
        wait_for(lambda: len(list(tmp_path.glob("up_*"))) == 2)
        with cluster.lock:
            admitted["spec"]["suspend"] = True
        admit(cluster, other_than=admitted)
        assert job.result(TIMEOUT_S) == ["again", "again"]
        job.forget()

    @pytest.mark.nightly
    def test_controller_that_is_taken_away(
        self, cluster: FakeKubernetes, engine: Kubernetes, tmp_path: Path
    ) -> None:
        """A new controller continues the job in its directory; without one the job is lost."""
        plain, kept = tmp_path / "plain", tmp_path / "kept"
        plain.mkdir()
        kept.mkdir()
        lost = self.submit(engine, runs_forever, str(plain))
        returns = dataclasses.replace(engine, directory=str(tmp_path / "jobs"))
        job = self.submit(returns, leaves_once, str(kept), max_restarts=1)
        for folder in (plain, kept):
            wait_for(lambda folder=folder: len(list(folder.glob("up_*"))) == 2)
        for pod in cluster.pods("controller"):
            cluster.drain(pod, "node h1 is drained")
        assert job.result(TIMEOUT_S) == ["again", "again"]
        assert lost.wait(TIMEOUT_S) == "lost"
        assert lost.details()["problem"].startswith("its controller is gone: ")
        wait_for(lambda: not cluster.pods("task", lost.id.partition(":")[2]))
        lost.forget()
        job.forget()

    @pytest.mark.nightly
    def test_pod_that_runs_out_of_memory(self, engine: Kubernetes, tmp_path: Path) -> None:
        job = self.submit(engine, kills_its_pod, str(tmp_path))
        with pytest.raises(TaskFailed, match=r"limit of memory \(OOMKilled\): raise the limit"):
            job.result(TIMEOUT_S)
        job.forget()

    def test_refusals(
        self,
        cluster: FakeKubernetes,
        engine: Kubernetes,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Nothing of a job that cannot start is left."""
        monkeypatch.setattr(kubernetes_api, "_BLOCKED_S", 0.1)
        absent = dataclasses.replace(engine, image="tfmw:absent")
        pull = r"cannot start: a pod cannot start \(ImagePullBackOff\): Failed to pull image"
        with pytest.raises(UsageError, match=pull):
            self.submit(absent, runs_forever, "")
        monkeypatch.setattr(cluster, "denied", {("create", "jobs")})
        forbidden = (
            r"refuses to create Jobs in the namespace training \(403\): jobs is forbidden: User"
        )
        with pytest.raises(UsageError, match=forbidden):
            self.submit(engine, runs_forever, "")
        with pytest.raises(UsageError, match=r"needs an image that has tfmw: .* or set TFMW_IMAGE"):
            self.submit(Kubernetes(), runs_forever, "")
        unknown = (
            r"there is no job kubernetes:4711 in the namespace training; the last jobs there: no"
        )
        with pytest.raises(UsageError, match=unknown):
            tfmw.attach("kubernetes:4711")

    def test_check_of_a_cluster(
        self, cluster: FakeKubernetes, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        command = ("check", "--kubernetes", "--set=image=tfmw:test")
        python = f"--set=python={sys.executable}"
        lines = shell(*command, python).splitlines()
        # A busy machine may take a moment to create the pod.
        assert [line for line in lines if "the tasks wait: " not in line] == [
            "checking Kubernetes, namespace training",
            "ok: version 1.33, rights, image and versions; all is well",
        ]
        monkeypatch.setattr(cluster, "denied", {("create", "secrets")})
        refused = shell(*command, python, status=1)
        assert "failed: Kubernetes refuses to create Secrets in the namespace training" in refused
        monkeypatch.setattr(cluster, "denied", set())
        other = shell(*command, "--set=python=/bin/false", status=1)
        assert "its container has ended: exit status 1" in other  # before it gets the call, or then


@pytest.mark.nightly
def test_kubectl_reads_and_deletes_what_a_job_has(
    cluster: FakeKubernetes, engine: Kubernetes, tmp_path: Path
) -> None:
    """Deleting the controller's Job ends everything, as docs/howto/kubernetes.md says."""

    def kubectl(*command: str) -> list[str]:
        return subprocess.check_output(
            ["kubectl", *command], env={**os.environ, "HOME": str(tmp_path)}, text=True
        ).split()

    job = tfmw.submit(runs_forever, (str(tmp_path),), 2, on=engine, env=PLAIN)
    wait_for(lambda: len(list(tmp_path.glob("up_*"))) == 2)
    name, labelled = f"tfmw-{job.id.partition(':')[2]}", f"--selector=tfmw/job={job.id[11:]}"
    found = kubectl("get", "jobs,pods", labelled, "--output=name")
    kinds = [entry.partition("/")[0] for entry in found]
    assert kinds == ["job.batch"] * 2 + ["pod"] * 3
    assert kubectl("get", "secret", name, "--output=name") == [f"secret/{name}"]
    kubectl("delete", "job", name, "--wait=false")
    assert job.wait(TIMEOUT_S) == "lost"
    assert job.details()["problem"].endswith("was deleted")
    wait_for(lambda: not [key for key in cluster.objects if key[0] != "events"])


def leaves_once(folder: str) -> str:
    """Both tasks leave once one is asked to; in the next attempt they return."""
    if os.environ["TFMW_ATTEMPT"] != "0":
        return "again"

    def leave(*_: object) -> None:
        Path(folder, f"asked_{rank()}").touch()

    for number in LEAVE:
        signal.signal(number, leave)
    meet(folder, "up")
    wait_for(lambda: list(Path(folder).glob("asked_*")))
    Path(folder, f"left_{rank()}").touch()
    sys.exit(PREEMPTED)


def needs_two(folder: str) -> int:
    """Waits on one worker until it is asked to leave; returns on two."""
    if len(json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"]) == 2:
        return 2
    for number in LEAVE:
        signal.signal(number, lambda *_: sys.exit(PREEMPTED))
    tfmw.report_progress(7)
    Path(folder, "alone").touch()
    wait_for(lambda: False)
    raise AssertionError


def kills_its_pod(folder: str) -> None:
    """Ends worker 1's pod by the signal that stands for OOMKilled."""
    meet(folder, "up")
    if rank() == 1:
        os.kill(ancestor(os.getpid(), TestKubernetes.host), signal.SIGSYS)
    wait_for(lambda: False)


def admit(cluster: FakeKubernetes, other_than: Any = None) -> Any:
    """Starts a suspended Job of tasks, as Kueue does."""

    def suspended() -> list[Any]:
        with cluster.lock:
            jobs = cluster.listed("jobs", "tfmw/role=task")
        return [job for job in jobs if job["spec"].get("suspend") and job is not other_than]

    wait_for(suspended)
    (job,) = suspended()
    with cluster.lock:
        job["spec"]["suspend"] = False
    return job
