"""How tasks that train together end: all of them, or with a sentence on the missing one."""

from __future__ import annotations

import pytest

from tests.helpers.cluster import PROGRAMS

PROGRAM = PROGRAMS / "leaves.py"


def line_of(text: str) -> int:
    return next(i for i, line in enumerate(PROGRAM.read_text().splitlines(), 1) if text in line)


@pytest.mark.multiprocess
@pytest.mark.parametrize("collectives", ["auto", pytest.param("ring", marks=pytest.mark.thorough)])
@pytest.mark.parametrize(
    ("what", "call", "line"),
    [("evaluate", "evaluate", "# only here"), ("exit", "fit", "callbacks=callbacks")],
)
def test_a_call_that_a_task_does_not_make(run_cluster, what, call, line, collectives):
    """Over tfmw's ring, which has time-outs, and over TensorFlow's collectives, which have none."""
    run = run_cluster("leaves.py", what, collectives, status=2)
    sentence = (
        "worker 1 has ended without a call in which worker 0 waits for it, "
        f"tfmw.{call} at {PROGRAM}:{line_of(line)}: let every task"
    )
    last = run.output.splitlines()[-1]
    assert last.startswith("tfmw: worker 0 failed")
    assert sentence in last
    assert "UnavailableError" not in run.output
    assert "Traceback" not in run.output


@pytest.mark.multiprocess
def test_a_busy_task_disturbs_nobody(run_cluster):
    run = run_cluster("leaves.py", "busy", "auto")
    assert [result["done"] for result in run] == [True, True]
    assert "exits before" not in run.output
    assert "rror" not in run.output
