"""Hosts come and go: real supervisors, real training. Each launch shows several rows.

The hosts are addresses of loopback or, where a link is cut, network namespaces.
"""

from __future__ import annotations

import pytest

from tests.helpers.cluster import run_cluster
from tests.helpers.hosts import Hosts
from tfmw.export import verify

pytestmark = pytest.mark.multiprocess

EPOCHS, STEPS = 3, 12


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """The result of a worker of two, without hosts and without deaths."""
    folder = tmp_path_factory.mktemp("undisturbed")
    done = run_cluster("restart_fit.py", "--backup_dir", str(folder / "backup"), workers=2)
    return done[0]


def test_a_task_that_dies_at_any_point_restarts_all_hosts(undisturbed, tmp_path):
    """In a step, in a backup, in validation, at the end of an epoch and in the export."""
    deaths = ["1:step:7", "0:step:6", "0:backup:1", "1:validation:2", "1:epoch:1", "0:export:1"]
    export = tmp_path / "export"
    flags = ["--backup_dir", str(tmp_path / "backup"), "--export_dir", str(export)]
    flags += ["--die", ",".join(deaths)]
    with Hosts(tmp_path, 2, "--max-restarts", str(len(deaths)), flags=flags) as hosts:
        assert hosts.end() == [0, 0], hosts.output()
        for worker in hosts.results():
            assert worker["attempt"] == len(deaths), hosts.output()
            assert worker["seen"] == [EPOCHS] * len(worker["seen"])
            assert worker["weights"] == undisturbed["weights"]
            assert worker["history"] == undisturbed["history"]
    assert len(hosts.results()) == 2
    assert verify(export) == []
    assert hosts.record()["status"] == 0
    said = "\n".join(hosts.said(0) + hosts.said(1))
    assert said.count("tfmw: restart ") == len(deaths)
    assert "failed in attempt 0" in said
    assert "SIGKILL" in said
