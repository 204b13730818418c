"""Descriptions of failures: the error of the task, and a hint if one is known."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tfmw.launcher.failure import why_all_restart
from tfmw.observe.progress import Progress


@pytest.mark.process
def test_a_script_that_builds_its_own_cluster_gets_a_hint(run_cluster):
    run = run_cluster("own_coordinator.py", workers=1, ps=1, status=1)
    (line,) = [line for line in run.output.splitlines() if "chief failed first" in line]
    assert "Could not start gRPC server" in line
    assert "train with tfmw.fit" in line
    assert "set TFMW_NO_INIT=1" in line


def a_task(status: int | None = None, replaceable: bool = True) -> Any:
    """A worker that trains, or has ended with a status."""
    return SimpleNamespace(
        kind="worker",
        progress=lambda: Progress(replaceable=replaceable),
        has_ended=lambda: status is not None,
    )


ENDED = "the other workers have ended, too"


@pytest.mark.parametrize(
    ("failed", "others", "expected"),
    [
        ([a_task(-9)], [a_task(), a_task()], None),
        ([a_task(-9), a_task(-9)], [a_task()], None),
        ([a_task(-9)], [], ENDED),
        ([a_task(-9)], [a_task(), a_task(0)], ENDED),
        ([a_task(-9, False)], [a_task(), a_task(None, False)], None),
        ([a_task(-9)], [a_task(None, False)], "the workers have no copy of the state in memory"),
    ],
)
def test_others_wait_for_a_new_task(failed: list[Any], others: list[Any], expected: Any) -> None:
    assert why_all_restart(failed, [*failed, *others]) == expected
    if expected == ENDED and not others:
        assert why_all_restart(failed, failed, elsewhere=True) is None
