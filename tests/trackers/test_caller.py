"""`tfmw.fit(workers=2)` logs to the runs of the process that calls it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.cluster import ONE_THREAD, PROGRAMS, PYTHONPATH
from tests.trackers.test_trackers import QUIET, Tracked

PROGRAM = str(PROGRAMS / "trackers_of_caller.py")


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.process
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of MLflow
def test_the_chief_logs_to_the_callers_runs(tmp_path: Path) -> None:
    env = {**ONE_THREAD, **QUIET, "PYTHONPATH": PYTHONPATH, "HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, PROGRAM, str(tmp_path)],
        env=env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = Tracked(tmp_path, done.stdout, {})
    (run,) = found.runs()
    assert run.info.status == "FINISHED"
    assert len(found.wandb_files()) == 1
    rows = found.rows()
    assert [row["_step"] for row in rows] == [0, 1, 2]
    assert [row.get("epoch/epoch") for row in rows] == [0, 1, None]
    assert rows[2]["after"] == 1  # the caller's own
    assert [row.get("own") for row in rows] == [None, 0, 1]
    losses = found.client.get_metric_history(run.info.run_id, "loss")
    assert [(m.step, m.value) for m in losses] == [
        (row["epoch/epoch"], row["epoch/loss"]) for row in rows[:2]
    ]
    assert run.data.params["batch_size"] == "8"
