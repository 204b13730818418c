"""Jobs on a real Slurm of this machine: two nodes, one task on each."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import tfmw
from tests.engines.contract import Contract, runs_forever, wait_for
from tests.helpers.slurm import NODES, OneMachine
from tfmw.engines import Slurm
from tfmw.errors import UsageError

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

    def test_refused_job_says_why(self, engine: Slurm) -> None:
        wrong = Slurm(directory=engine.directory, partition="none")
        with pytest.raises(UsageError, match=r"sbatch failed: .*[Ii]nvalid partition"):
            self.submit(wrong, runs_forever)
        assert not [n for n in wrong.numbers() if not n.isdecimal()]


def test_without_slurm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(os.environ, "PATH", str(tmp_path))
    with pytest.raises(UsageError, match="on='slurm' needs the command sbatch"):
        tfmw.submit(print, on=Slurm(directory=tmp_path))
