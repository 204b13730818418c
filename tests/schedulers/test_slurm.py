"""Training under a real Slurm of this machine (tests/helpers/slurm.py), through recipes/schedulers.

Marked `slurm`: `make test` leaves these out, and says so, where Slurm is not installed.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.cluster import PROGRAMS, ROOT
from tests.helpers.slurm import NODES, OneMachine

pytestmark = [pytest.mark.nightly, pytest.mark.process]

SCRIPT = str(ROOT / "recipes" / "schedulers" / "slurm.sbatch")
ENVIRONMENT = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}  # has `tfmw`


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OneMachine]:
    with OneMachine(tmp_path_factory.mktemp("slurm")) as one:
        yield one


def test_each_task_of_a_step_finds_its_rank(slurm: OneMachine) -> None:
    """Three tasks on two nodes: `srun` and tfmw count them alike."""
    program = str(PROGRAMS / "print_cluster.py")
    result = slurm.run("srun", "--nodes=2", "--ntasks=3", "--label", sys.executable, program)
    assert result.returncode == 0, result.stderr
    found = dict(line.split(": ", 1) for line in result.stdout.splitlines())
    clusters = {int(rank): json.loads(text) for rank, text in found.items()}
    assert [clusters[rank]["task"]["index"] for rank in range(3)] == [0, 1, 2]
    (port,) = {a.rpartition(":")[2] for a in clusters[0]["cluster"]["worker"][::2]}
    workers = [f"{NODES[0]}:{port}", f"{NODES[0]}:{int(port) + 1}", f"{NODES[1]}:{port}"]
    for rank in range(3):
        assert clusters[rank]["cluster"] == {"worker": workers}


def sbatch(slurm: OneMachine, log: Path, *args: str, **environ: str) -> int:
    """Submits the script of the recipes and waits for the job's end: its exit status."""
    # Both tasks on one node: tf.distribute's servers take their ports on all addresses of the
    # machine, and this machine is both nodes.
    options = ["--nodes=1", "--ntasks-per-node=2", f"--output={log}"]
    return slurm.submit(*options, SCRIPT, *args, env={**ENVIRONMENT, **environ})


def test_a_check_that_fails_ends_the_job(slurm: OneMachine, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    log = tmp_path / "log"
    status = sbatch(
        slurm, log, "recipes/digits.py", TFMW_CHECK_OPTIONS=f"--export-dir={tmp_path}/file/model"
    )
    text = log.read_text()
    assert status == 1, text
    assert "failed: --export_dir" in text
    assert "accuracy" not in text


@pytest.mark.nightly
def test_preempted_job_is_requeued(slurm: OneMachine, tmp_path: Path) -> None:
    """The script checks the cluster and trains; the signal that Slurm sends before the time limit
    makes both tasks write a backup, and the job is queued again and resumes.
    """
    log = tmp_path / "log"
    program = [str(PROGRAMS / "train_requeued.py"), str(tmp_path)]
    options = f"--backup-dir={tmp_path}/backups"
    status = sbatch(slurm, log, *program, TFMW_CHECK_OPTIONS=options)
    text = log.read_text()
    assert status == 0, text
    assert text.count("all is well") == 4  # two tasks, two starts
    assert "told to leave: back into the queue" in text
    assert (tmp_path / "restarts").read_text().split() == ["0", "1"]
    assert "0: restored step 6 from" in text  # after the second epoch of three steps
    assert json.loads((tmp_path / "done").read_text()) == {"iterations": 30}
