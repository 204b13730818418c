"""Jobs on a real Ray cluster of two nodes on this machine."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import tfmw
from tests.engines.contract import (
    PLAIN,
    TIMEOUT_S,
    Contract,
    FromAShell,
    HasController,
    runs_forever,
    shell,
    wait_for,
)
from tests.helpers.cluster import ONE_THREAD, PYTHONPATH
from tfmw.cluster.signals import LEAVE
from tfmw.cluster.sockets import reserved_ports
from tfmw.engines import Engine, Job, Ray
from tfmw.errors import PREEMPTED, TaskFailed, UsageError
from tfmw.launcher import call
from tfmw.launcher.engines import job as jobs
from tfmw.launcher.engines import ray as ray_engine
from tfmw.launcher.engines.ray import NAMESPACE, RayJob, RayTasks

pytestmark = [pytest.mark.process, pytest.mark.filterwarnings("ignore::ResourceWarning")]


@contextlib.contextmanager
def two_nodes() -> Iterator[Any]:
    """A head with one core, which has all controllers, and one more node with one core."""
    import ray
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        for name in [n for n in os.environ if n.startswith(("RAY_", "TF_CONFIG"))]:
            patch.delitem(os.environ, name)
        for name, value in {**ONE_THREAD, "RAY_USAGE_STATS_ENABLED": "0"}.items():
            patch.setitem(os.environ, name, value)
        # Ray's sockets lie in there: their whole path may have 107 bytes.
        with tempfile.TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True) as short:
            head = {"num_cpus": 1, "include_dashboard": False}
            patch.setitem(os.environ, "RAY_TMPDIR", short)
            cluster = Cluster(initialize_head=True, head_node_args=head)
            try:
                cluster.add_node(num_cpus=1, num_gpus=2)
                ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
                yield cluster
            finally:
                ray.shutdown()
                cluster.shutdown()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with two_nodes() as nodes:
        yield nodes


@pytest.fixture(scope="module")
def engine(cluster: Any) -> Ray:
    return Ray(address=cluster.address)


def nothing_is_left() -> bool:
    """Whether Ray has no actor and no placement group of tfmw any more."""
    import ray

    actors = ray.util.list_named_actors(all_namespaces=True)
    groups = ray.util.placement_group_table().values()
    free = ray.available_resources().get("CPU") == ray.cluster_resources().get("CPU")
    return free and not actors and all(group["state"] == "REMOVED" for group in groups)


class TestRay(FromAShell, HasController, Contract):
    setting = "address"
    place = r"job ray:\w+ on the Ray cluster at \S+:\d+"
    host = "ray::_TaskActor"
    lost = r"its controller on the cluster was lost: "
    forgets = True
    pytestmark = pytest.mark.nightly  # `make test` has Slurm's

    def environment(self, engine: Engine, home: Path) -> dict[str, str]:
        assert isinstance(engine, Ray)
        return {"RAY_ADDRESS": str(engine.address)}

    def controller(self, engine: Engine, job: Job) -> int:
        import ray

        actor = ray.get_actor(job.id.partition(":")[2], namespace=NAMESPACE)
        pid: int = ray.get(actor.__ray_call__.remote(lambda _: os.getpid()))
        return pid

    @contextlib.contextmanager
    def tasks_that_find(self, engine: Engine, path: Path) -> Iterator[Engine]:
        assert isinstance(engine, Ray)
        variables = {"PYTHONPATH": f"{path}{os.pathsep}{PYTHONPATH}"}
        yield dataclasses.replace(engine, runtime_env={"env_vars": variables})

    def roomy(self, engine: Engine) -> Engine:
        assert isinstance(engine, Ray)
        return dataclasses.replace(engine, resources={"CPU": 0.5})

    @pytest.fixture(autouse=True)
    def _leaves_nothing(self, engine: Ray) -> Iterator[None]:
        yield
        wait_for(nothing_is_left)


def leaves_when_asked(folder: str) -> tuple[int, int]:
    """Trains for ever on one worker; returns on two."""
    import json

    workers = len(json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"])
    if workers == 2:
        return int(os.environ["TFMW_ATTEMPT"]), workers
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
    signal.signal(signal.SIGUSR1, lambda *_: sys.exit(75))
    tfmw.report_progress(7)
    Path(folder, "alone").touch()
    wait_for(lambda: False)
    raise AssertionError


def goes_on_alone(folder: str) -> int:
    """Waits for ever on two workers; returns on one."""
    if os.environ["TFMW_ATTEMPT"] == "0":
        runs_forever(folder)
    return int(os.environ["TFMW_ATTEMPT"])


class BusyActor:
    """The controller's actor: the first calls get lost, and in the end it dies.

    Args:
        replies: the result or the exception of each call.
    """

    def __init__(self, *replies: Any) -> None:
        self.replies = list(replies)
        self.read = self.write = self.remove = self
        self.calls = 0

    def remote(self, *args: Any) -> Any:
        self.calls += 1
        return self.replies.pop(0)


class FakeRay:
    """`ray.get` of what `BusyActor` returns, and the address of the head."""

    def __init__(self, head: str = "") -> None:
        import ray

        self.exceptions = ray.exceptions
        self.gcs_address = head

    def get_runtime_context(self) -> FakeRay:
        return self

    def get(self, reply: Any, timeout: float | None = None) -> Any:
        if isinstance(reply, Exception):
            raise reply
        return reply


def job_of(actor: BusyActor, head: str, monkeypatch: pytest.MonkeyPatch) -> RayJob:
    monkeypatch.setattr(Ray, "where", lambda self, number: "here")
    return RayJob(Ray(), "4711", FakeRay(head), actor)


def test_controller_that_is_not_reached_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's error of an actor that it cannot reach now is a kind of its error of a dead one."""
    from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError

    away = ActorUnavailableError("RpcError: keepalive watchdog timeout", None)
    status = b'{"state": "running", "attempt": 0}'
    actor = BusyActor(away, status)
    with socket.create_server(("127.0.0.1", 0)) as server:
        head = f"127.0.0.1:{server.getsockname()[1]}"
        job = job_of(actor, head, monkeypatch)
        assert job.status() == "running"
        assert actor.calls == 2
        actor = BusyActor(away, GetTimeoutError(), b"some output")
        assert job_of(actor, head, monkeypatch).read("output.log") == b"some output"
        actor = BusyActor(status, ActorDiedError())
        job = job_of(actor, head, monkeypatch)
        assert job.status() == "running"
        lost = job.details()
    assert lost["state"] == "lost"
    assert lost["problem"].startswith("its controller on the cluster was lost: The actor died unex")


@pytest.mark.parametrize("replies", [False, True])
def test_without_its_head_ray_has_lost_the_job(
    monkeypatch: pytest.MonkeyPatch, replies: bool
) -> None:
    """The error is one sentence, before Ray ends this process, after a minute.

    A controller on another machine than the head replies until then.
    """
    from ray.exceptions import GetTimeoutError

    monkeypatch.setattr(ray_engine, "_HEAD_S", 0.3)
    monkeypatch.setattr(jobs, "_ASK_EVERY_S", 0.1)
    with reserved_ports(1) as (port,):
        head = f"127.0.0.1:{port}"
    reply = b'{"state": "running"}' if replies else GetTimeoutError()
    actor = BusyActor(*[reply] * 1000)
    job = job_of(actor, head, monkeypatch)
    sentence = rf"ray:4711 has no result: Ray's head at {head} has not been reachable for 0\.3 s \("
    with pytest.raises(TaskFailed, match=sentence):
        job.result()
    calls = actor.calls
    job.cancel()
    job.forget()
    assert job.status() == "lost"
    assert actor.calls == calls, "what is gone is not waited for again"


def test_task_whose_actor_is_not_reached_may_be_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray
    from ray.exceptions import ActorDiedError, ActorUnavailableError

    tasks = RayTasks(Ray(), [])
    tasks._runs = [ActorUnavailableError("RpcError", None), ActorDiedError()]
    monkeypatch.setattr(ray, "wait", lambda runs, **_: (runs, []))
    monkeypatch.setattr(ray, "get", FakeRay().get)
    assert tasks.lost() == {
        1: "its actor was lost: The actor died unexpectedly before finishing this task."
    }


def test_tasks_of_a_node_that_is_drained_are_noticed() -> None:
    """Ray tells when the node will be ended, or that it is not known; new tasks avoid the node."""
    at = 1000 * (time.time() + 60)
    nodes = [{"NodeID": n, "Alive": True, "Resources": {"CPU": 1}} for n in ("a", "b", "c")]
    state = SimpleNamespace(get_draining_nodes=lambda: {"b": at, "c": 0})
    placed: Any = {"bundles_to_node_id": {0: "a", 1: "b", 2: "c"}}
    tasks = RayTasks(Ray(), [])
    tasks._ray = SimpleNamespace(
        nodes=lambda: nodes,
        util=SimpleNamespace(placement_group_table=lambda group: placed),
        _private=SimpleNamespace(state=SimpleNamespace(state=state)),
    )
    assert tasks.notices() == {}, "no task has a place yet"
    tasks._group = "group"
    assert re.fullmatch(r"its node is drained within (60|59) s", tasks.notices()[1])
    tasks._look_at = 0.0
    assert {rank: why[:19] for rank, why in tasks.notices().items()} == {
        1: "its node is drained",
        2: "its node is drained",
    }
    assert tasks.room(3) == 1
    tasks._ray = SimpleNamespace(_private=SimpleNamespace())  # another version of Ray
    tasks._look_at = 0.0
    assert tasks.notices() == {}


def leaves_its_node(folder: str) -> str:
    """Saves its state once it is asked to; returns in the next attempt."""
    if os.environ["TFMW_ATTEMPT"] != "0":
        return "again"
    for number in LEAVE:
        signal.signal(number, lambda *_: sys.exit(PREEMPTED))
    Path(folder, "up").touch()
    wait_for(lambda: False)
    raise AssertionError


@pytest.mark.nightly
def test_task_on_a_node_that_is_drained_saves_its_state(
    cluster: Any, engine: Ray, tmp_path: Path
) -> None:
    """The job continues on another node, without a restart that counts."""
    import ray
    from ray.core.generated import autoscaler_pb2

    there = dataclasses.replace(engine, resources={"CPU": 1, "drained": 1})
    first = cluster.add_node(num_cpus=1, resources={"drained": 1})
    job = tfmw.submit(leaves_its_node, (str(tmp_path),), 1, on=there, env=PLAIN, max_restarts=1)
    wait_for((tmp_path / "up").exists)
    second = cluster.add_node(num_cpus=1, resources={"drained": 1})
    reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    deadline_ms = int(1000 * (time.time() + TIMEOUT_S))
    drain = ray._raylet.GcsClient(address=cluster.address).drain_node
    assert drain(first.node_id, reason, "spot", deadline_ms)[0]
    assert job.result(TIMEOUT_S) == ["again"]
    assert "its node is drained within" in job.logs()
    assert "(not counted as a restart)" in job.logs()
    job.forget()
    for node in (first, second):
        cluster.remove_node(node)


WITH_A_TOKEN = """
import sys
import tfmw
from ray.cluster_utils import Cluster
from tests.engines import contract

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
job = tfmw.submit(contract.doubled, (4,), 1, on=tfmw.engines.Ray(address=cluster.address),
    env=contract.PLAIN)
print(cluster.address, job.id, flush=True)
sys.stdin.readline()
"""


@pytest.mark.nightly
def test_cluster_with_a_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Submitted in one process and read in another, both with the token; refused without it."""
    token = tmp_path / "token"
    token.write_text("0123456789abcdef0123456789abcdef")
    with tempfile.TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True) as short:
        environ = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
        environ |= {**ONE_THREAD, "RAY_TMPDIR": short, "RAY_USAGE_STATS_ENABLED": "0"}
        for name, value in {**environ, "PYTHONPATH": PYTHONPATH}.items():
            monkeypatch.setenv(name, value)
        with subprocess.Popen(
            [sys.executable, "-c", WITH_A_TOKEN], stdin=-1, stdout=-1, text=True
        ) as owner:
            assert owner.stdin is not None
            assert owner.stdout is not None
            try:
                address, job = owner.stdout.readline().split()[-2:]
                setting = f"--set=address={address}"
                logs = shell("logs", "--follow", job, setting)
                assert "hello from 0" in logs
                token.write_text("f" * 32)
                refused = shell("logs", job, setting, status=2)
                assert "tfmw: no Ray cluster was reached (" in refused
                assert "or give this process the cluster's token" in refused
                monkeypatch.delenv("RAY_AUTH_TOKEN_PATH")
                monkeypatch.setenv("HOME", str(tmp_path / "without a token"))
                refused = shell("logs", job, setting, status=2)
                assert "tfmw: the Ray cluster refuses this process: " in refused
            finally:
                owner.stdin.close()


@pytest.mark.nightly
def test_large_arrays_go_into_the_object_store_once(
    engine: Ray, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pickle has no array: this process copies none, and puts each once for both tasks."""
    import ray

    monkeypatch.setattr(call, "LARGE", 1 << 20)
    array: Any = np.arange(1 << 20, dtype=np.float32).reshape(1024, 1024)
    puts: list[tuple[int, int]] = []
    put = ray.put

    def counted(value: Any) -> Any:
        puts.append((value.nbytes, value.__array_interface__["data"][0]))
        return put(value)

    monkeypatch.setattr(ray, "put", counted)
    plain = {"TFMW_NO_INIT": "1"}
    job = tfmw.submit(sums, ({"x": array, "small": np.ones(3)},), 2, on=engine, env=plain)
    assert job.result(TIMEOUT_S) == [(float(array.sum()), 4.0, True)] * 2
    (pickled, _), *large = puts
    assert pickled < 100_000
    assert large == [(array.nbytes, array.__array_interface__["data"][0])]
    job.forget()


def sums(arrays: dict[str, Any]) -> tuple[float, float, bool]:
    """Both can be written to, as in one process; a task's changes are its own."""
    total = float(arrays["x"].sum())
    arrays["x"][0] = 0
    arrays["small"][0] = 2
    return total, float(arrays["small"].sum()), arrays["x"].flags.aligned


def visible() -> tuple[str, ...]:
    return os.environ["CUDA_VISIBLE_DEVICES"], os.environ["TFMW_TASK"]


@pytest.mark.nightly
def test_each_task_sees_its_own_gpu(engine: Ray) -> None:
    """Two tasks on the node with two GPUs, which only Ray believes to be there."""
    share = dataclasses.replace(engine, gpus_per_worker=1, resources={"CPU": 0.5})
    job = tfmw.submit(visible, workers=2, on=share, env={"TFMW_NO_INIT": "1"})
    devices = [devices for devices, _ in job.result(TIMEOUT_S)]
    assert sorted(devices) == ["0", "1"]
    assert job.details()["hosts"]
    whole = dataclasses.replace(engine, gpus_per_worker=2)
    other = tfmw.submit(visible, workers=1, on=whole, env={"TFMW_NO_INIT": "1"})
    # A job that has ended holds no resources, though its result can still be fetched.
    assert other.result(TIMEOUT_S) == [("0,1", "worker 0")]
    job.forget()
    other.forget()


@pytest.mark.nightly
def test_goes_on_with_fewer_nodes_and_grows(cluster: Any, engine: Ray, tmp_path: Path) -> None:
    """A node is removed from a job with workers=(1, 2); another joins the next one."""
    plain = {"TFMW_NO_INIT": "1"}
    options: dict[str, Any] = {"on": engine, "env": plain, "max_restarts": 2}
    gone = cluster.add_node(num_cpus=2, resources={"other": 1})
    here = cluster.add_node(num_cpus=2, resources={"other": 1})
    only_there = Ray(address=engine.address, resources={"CPU": 1, "other": 1})
    job = tfmw.submit(goes_on_alone, (str(tmp_path),), (1, 2), **{**options, "on": only_there})
    wait_for(lambda: len(list(tmp_path.glob("up_*"))) == 2)
    cluster.remove_node(gone)
    assert job.result(TIMEOUT_S) == [1]
    assert job.details()["workers"] == 1
    job.forget()

    job = tfmw.submit(leaves_when_asked, (str(tmp_path),), (1, 2), **{**options, "on": only_there})
    wait_for((tmp_path / "alone").exists)
    more = cluster.add_node(num_cpus=2, resources={"other": 1})
    assert job.result(TIMEOUT_S) == [(1, 2), (1, 2)]
    assert "tfmw: there is a place for more tasks" in job.logs()
    job.forget()
    for node in (here, more):
        cluster.remove_node(node)


def test_ray_without_the_name_of_its_dashboard(monkeypatch: pytest.MonkeyPatch) -> None:
    """The name is private to Ray: a job that has been started needs no dashboard."""
    context = SimpleNamespace(gcs_address="h0:6379")
    ray = SimpleNamespace(get_runtime_context=lambda: context)
    monkeypatch.setattr(Ray, "_connect", lambda self: ray)
    assert Ray().where("4711") == "job ray:4711 on the Ray cluster at h0:6379"


def test_without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match=r"on='ray' needs the package ray.*'\.\[ray\]'"):
        tfmw.submit(visible, on="ray")
