"""Descriptions of failures: the error of the task, and a hint if one is known."""

from __future__ import annotations

import math
import time
from types import SimpleNamespace
from typing import Any

import pytest

from tfmw.launcher.failure import REJOIN_S, why_all_restart
from tfmw.observe.progress import REJOINS, Progress


@pytest.mark.process
def test_a_script_that_builds_its_own_cluster_gets_a_hint(run_cluster):
    run = run_cluster("own_coordinator.py", workers=1, ps=1, status=1)
    (line,) = [line for line in run.output.splitlines() if "chief failed first" in line]
    assert "Could not start gRPC server" in line
    assert "train with tfmw.fit" in line
    assert "set TFMW_NO_INIT=1" in line


def a_task(status: int | None = None, *, waits: bool = False, **attributes: Any) -> Any:
    """A worker that trains, waits for a new one, or has ended with a status."""
    progress = Progress(blocked_in=REJOINS if waits else "", replaceable=True)
    return SimpleNamespace(
        kind="worker", status=status, ended=math.inf, error=dict, progress=lambda: progress,
        has_ended=lambda: status is not None, **attributes,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("failed", "others", "expected"),
    [
        ([a_task(-9)], [a_task(waits=True), a_task(waits=True)], None),
        ([a_task(-9), a_task(-9)], [a_task(waits=True)], None),
        ([a_task(-9)], [a_task(waits=True), a_task()], ""),  # it has not noticed yet
        ([a_task(-9)], [], "the other workers have ended, too"),
        ([a_task(-9)], [a_task(waits=True), a_task(0)], "the other workers have ended, too"),
    ],
)
def test_others_wait_for_a_new_task(failed: list[Any], others: list[Any], expected: Any) -> None:
    assert why_all_restart(failed, [*failed, *others]) == expected


def test_others_that_do_not_wait_in_time_are_not_waited_for() -> None:
    lost = a_task(-9)
    lost.ended = time.monotonic() - 60.0
    late = f"the others did not notice its end in {REJOIN_S:g} s"
    assert why_all_restart([lost], [lost, a_task()]) == late
    lost = a_task(-9)
    lost.progress = Progress  # its training needs all tasks to restart
    none = "the workers have no copy of the state in memory"
    assert why_all_restart([lost], [lost, a_task()]) == none
