"""A worker is lost, and the others continue with a new one in its place, from a copy in memory."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest

from tests.helpers.cluster import ClusterRun, run_cluster

pytestmark = pytest.mark.process

SAME = ("state", "history", "seen", "score")


@functools.cache
def trained(data: str, *ends: str) -> ClusterRun:
    options = ["--max-restarts", "5"] if ends else []
    return run_cluster("lost_workers.py", data, *ends, options=options)


def results(run: ClusterRun) -> list[dict[str, Any]]:
    return [{name: worker[name] for name in SAME} for worker in run]


def test_a_worker_and_then_the_chief_are_killed() -> None:
    undisturbed, disturbed = trained("arrays"), trained("arrays", "kill:1:1:2", "kill:0:2:4")
    assert results(disturbed) == results(undisturbed)
    # The second loss has traced nothing again in worker 1.
    assert [w["traces"] for w in disturbed] == [w["traces"] for w in undisturbed]
    restarts = re.findall(
        r"tfmw: restart (\d) of 5 at once, of (worker \d) alone", disturbed.output
    )
    assert restarts == [("1", "worker 1"), ("2", "worker 0")]
    assert len(re.findall("tfmw: the workers continue after step", disturbed.output)) == 2
    assert len(list(disturbed.log_dir.parent.glob("attempt_*"))) == 1


@pytest.mark.nightly
@pytest.mark.parametrize(
    "arguments",
    [
        ("arrays", "stop:1:1:2"),
        ("arrays", "stop:0:2:2"),
        ("arrays", "kill:0:0:0", "kill:1:1:6", "kill:1:3:0"),
        ("dataset", "kill:0:1:2", "kill:1:2:3"),
    ],
)
def test_workers_are_lost_in_any_step(arguments: tuple[str, ...]) -> None:
    assert results(trained(*arguments)) == results(trained(arguments[0]))
