"""Jobs on a real Slurm of this machine: two nodes, one task on each."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import tfmw
from tests.engines.contract import TIMEOUT_S, Contract, meet, runs_forever, wait_for
from tests.helpers.slurm import NODES, OneMachine
from tfmw.engines import Slurm
from tfmw.errors import PREEMPTED, UsageError
from tfmw.runtime.signals import LEAVE

pytestmark = [pytest.mark.slurm, pytest.mark.multiprocess]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OneMachine]:
    with OneMachine(tmp_path_factory.mktemp("slurm")) as one, pytest.MonkeyPatch.context() as patch:
        for name, value in one.env.items():
            patch.setitem(os.environ, name, value)
        yield one


@pytest.fixture(scope="module")
def engine(slurm: OneMachine, tmp_path_factory: pytest.TempPathFactory) -> Slurm:
    return Slurm(directory=tmp_path_factory.mktemp("jobs"), nodes=2, options=("--mem=0",))


def leaves_once(folder: str) -> str:
    """Both tasks leave once one is asked to; when the job starts again they return."""
    if os.environ.get("SLURM_RESTART_COUNT") == "1":
        return "again"
    asked = Path(folder, "asked")
    for number in LEAVE:
        signal.signal(number, lambda *_: asked.touch())
    meet(folder, "up")
    wait_for(asked.exists)
    sys.exit(PREEMPTED)


class TestSlurm(Contract):
    def test_queue_is_as_slurm_has_it(
        self, slurm: OneMachine, engine: Slurm, tmp_path: Path
    ) -> None:
        """A job per node, another that waits for one, and neither is left in the queue."""
        job = self.submit(engine, runs_forever, str(tmp_path))
        wait_for(lambda: len(list(tmp_path.glob("up_*"))) == 2)
        assert job.details()["hosts"] == list(NODES)
        exclusive = Slurm(directory=engine.directory, nodes=2, options=("--exclusive",))
        waiting = self.submit(exclusive, runs_forever, str(tmp_path))
        assert waiting.status() == "queued"
        number = waiting.id.partition(":")[2]
        listed = slurm.run("squeue", "--noheader", "--format=%i %T").stdout.split("\n")
        assert f"{number} PENDING" in listed
        waiting.cancel()
        assert waiting.status() == "cancelled"
        job.cancel()
        wait_for(lambda: not slurm.run("squeue", "--noheader").stdout.strip())

    def test_job_is_queued_again_once_its_tasks_have_saved_their_state(
        self, slurm: OneMachine, engine: Slurm, tmp_path: Path
    ) -> None:
        """The signal that Slurm sends before the time limit."""
        job = self.submit(engine, leaves_once, str(tmp_path), max_restarts=1)
        wait_for(lambda: len(list(tmp_path.glob("up_*"))) == 2)
        number = job.id.partition(":")[2]
        assert slurm.run("scancel", "--batch", "--signal=TERM", number).returncode == 0
        assert job.result(TIMEOUT_S) == ["again", "again"]
        assert (tmp_path / "asked").exists()
        job.forget()

    def test_refused_job_says_why(self, engine: Slurm) -> None:
        wrong = Slurm(directory=engine.directory, partition="none")
        with pytest.raises(UsageError, match=r"sbatch failed: .*[Ii]nvalid partition"):
            self.submit(wrong, runs_forever)
        assert not [n for n in wrong.numbers() if not n.isdecimal()]


def test_without_slurm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(os.environ, "PATH", str(tmp_path))
    with pytest.raises(UsageError, match="on='slurm' needs the command sbatch"):
        tfmw.submit(print, on=Slurm(directory=tmp_path))
