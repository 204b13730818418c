"""Jobs on a real Ray cluster of two nodes on this machine."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tfmw
from tests.engines.contract import TIMEOUT_S, Contract, runs_forever, wait_for
from tests.helpers.cluster import ONE_THREAD
from tfmw.engines import Ray
from tfmw.errors import UsageError

pytestmark = [pytest.mark.multiprocess, pytest.mark.filterwarnings("ignore::ResourceWarning")]


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
                cluster.add_node(num_cpus=1)
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


class TestRay(Contract):
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


@pytest.mark.long
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


def test_without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match=r"on='ray' needs the package ray.*'tfmw\[ray\]'"):
        tfmw.submit(print, on="ray")
