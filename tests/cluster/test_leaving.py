"""The end of tasks that train together: all of them end, or an error names the missing one."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.helpers.cluster import PROGRAMS, children, tfmw_command
from tfmw.train.checkpoint.store import BackupStore

PROGRAM = PROGRAMS / "leaves.py"


def line_of(text: str) -> int:
    return next(i for i, line in enumerate(PROGRAM.read_text().splitlines(), 1) if text in line)


@pytest.mark.process
@pytest.mark.parametrize("collectives", ["auto", pytest.param("grpc", marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    ("what", "call", "line"),
    [("evaluate", "evaluate", "# only here"), ("exit", "fit", "callbacks=callbacks")],
)
def test_a_call_that_a_task_does_not_make(run_cluster, what, call, line, collectives):
    """Both tfmw's ring, which has time-outs, and TensorFlow's collectives are tested."""
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


@pytest.mark.process
def test_a_busy_task_disturbs_nobody(run_cluster):
    run = run_cluster("leaves.py", "busy", "auto")
    assert [result["done"] for result in run] == [True, True]
    assert "exits before" not in run.output
    assert "rror" not in run.output


PAUSE_S = 6.0  # longer than the heartbeats of the program, and than the launcher's patience
PATIENCE_S = 120.0


@pytest.mark.nightly
@pytest.mark.process
def test_a_pause_of_all_processes_loses_nothing(tmp_path):
    """A pause such as that of `docker pause`, or of a closed lid."""
    command = ["run", "--workers", "2", "--max-restarts", "1", "--log-dir", str(tmp_path / "logs")]
    program = [str(PROGRAM), "paused", "auto", str(tmp_path / "backups")]
    env = {"TFMW_RESULT": str(tmp_path), "TFMW_NO_INIT": "1"}
    with tfmw_command(*command, *program, env=env) as launcher:
        deadline = time.monotonic() + PATIENCE_S
        while len(list(tmp_path.glob("waits_*"))) < 2:
            assert time.monotonic() < deadline
            assert launcher.poll() is None, launcher.communicate()[0]
            time.sleep(0.1)
        everyone = [*children(launcher.pid), launcher.pid]
        for pid in everyone:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(PAUSE_S)
        (tmp_path / "was_paused").touch()
        for pid in everyone:
            os.kill(pid, signal.SIGCONT)
        output, _ = launcher.communicate(timeout=PATIENCE_S)
    assert launcher.returncode == 0, output
    assert "exits before" not in output
    assert len(list(tmp_path.glob("worker_*.json"))) == 2
    newest = BackupStore(tmp_path / "backups").newest()
    assert newest is not None
    assert newest.record["done"]
