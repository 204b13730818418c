"""Descriptions of failures: the error of the task, and a hint if one is known."""

from __future__ import annotations

import pytest


@pytest.mark.process
def test_a_script_that_builds_its_own_cluster_gets_a_hint(run_cluster):
    run = run_cluster("own_coordinator.py", workers=1, ps=1, status=1)
    (line,) = [line for line in run.output.splitlines() if "chief failed first" in line]
    assert "Could not start gRPC server" in line
    assert "train with tfmw.fit" in line
    assert "set TFMW_NO_INIT=1" in line
