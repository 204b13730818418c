"""Jobs on Slurm: two nodes, one task on each; `make nightly` has the real daemons."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
import uuid
from pathlib import Path

import pytest

import tfmw
from tests.engines.contract import (
    TIMEOUT_S,
    Contract,
    FromAShell,
    HasController,
    marked_copy,
    meet,
    process_of,
    runs_forever,
    wait_for,
)
from tests.helpers.cluster import MARK, marked, wait_gone
from tests.helpers.slurm import NODES, OneMachine
from tfmw.cluster.signals import LEAVE
from tfmw.engines import Engine, Job, Slurm
from tfmw.errors import PREEMPTED, TaskFailed, UsageError
from tfmw.launcher.engines import own_files
from tfmw.launcher.engines import slurm as slurm_engine
from tfmw.launcher.engines.engine import JobSpec
from tfmw.launcher.engines.folder import write_job
from tfmw.launcher.engines.job import STATUS
from tfmw.launcher.engines.slurm import SlurmTasks
from tfmw.launcher.options import RunOptions
from tfmw.launcher.remote.messages import Setup

pytestmark = pytest.mark.process


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


def needs_two(folder: str) -> int:
    """Waits for ever in the first attempt and on one worker; returns on two, later."""
    if os.environ["TFMW_ATTEMPT"] == "0":
        runs_forever(folder)
    if len(json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"]) == 1:
        for number in LEAVE:
            signal.signal(number, lambda *_: sys.exit(PREEMPTED))
        tfmw.report_progress(7)
        Path(folder, "alone").touch()
        wait_for(lambda: False)
    return 2


class TestSlurm(FromAShell, HasController, Contract):
    setting = "directory"
    place = r"Slurm job \d+, its files in "
    lost = r"Slurm ended job \d+: FAILED"
    test_fit_equals_that_of_two_workers = marked_copy(  # a minute of both cores
        Contract.test_fit_equals_that_of_two_workers, pytest.mark.nightly
    )
    # `make test` has it on Kubernetes.
    test_every_role = marked_copy(Contract.test_every_role, pytest.mark.nightly)

    @pytest.fixture(autouse=True)
    def _knows(self, slurm: OneMachine) -> None:
        self.slurm = slurm

    def lose(self, job: Job, pid: int) -> None:
        """A node is lost; Slurm queues the job again, which has a place once the node is back."""
        self.slurm.lose(NODES[1])
        wait_for(lambda: job.status() == "queued")
        self.slurm.bring_back(NODES[1])

    def controller(self, engine: Engine, job: Job) -> int:
        assert isinstance(engine, Slurm)
        folder = (engine.root / job.id.partition(":")[2]).resolve()
        return process_of("-m tfmw.launcher.engines.slurm control", str(folder))

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

    def test_scancel_ends_a_job_with_its_controller(
        self, slurm: OneMachine, engine: Slurm, tmp_path: Path
    ) -> None:
        mark = uuid.uuid4().hex
        job = self.submit(engine, runs_forever, str(tmp_path), env={MARK: mark}, max_restarts=1)
        wait_for(lambda: len(list(tmp_path.glob("up_*"))) == 2)
        tasks = list(marked(mark))
        assert slurm.run("scancel", job.id.partition(":")[2]).returncode == 0
        assert wait_gone(tasks, timeout_s=30) == []
        assert job.wait(TIMEOUT_S) == "cancelled"
        assert tfmw.attach(job.id, on=engine).status() == "cancelled"
        job.forget()

    @pytest.mark.nightly
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

    @pytest.mark.nightly
    def test_goes_on_without_a_lost_node_and_grows(
        self, slurm: OneMachine, engine: Slurm, tmp_path: Path
    ) -> None:
        """workers=(1, 2): a node is lost; once it is back, the job is queued again to have both."""
        alone = dataclasses.replace(engine, nodes=None)
        env = {"TFMW_NO_INIT": "1"}
        job = tfmw.submit(needs_two, (str(tmp_path),), (1, 2), on=alone, env=env, max_restarts=2)
        wait_for(lambda: len(list(tmp_path.glob("up_*"))) == 2)
        slurm.lose(NODES[1])
        wait_for((tmp_path / "alone").exists)
        assert job.details()["workers"] == 1
        assert job.details()["hosts"] == [NODES[0]]
        slurm.bring_back(NODES[1])
        assert job.result(TIMEOUT_S) == [2, 2]
        assert "tfmw: there is a place for more tasks" in job.logs()
        job.forget()

    def test_node_range_has_one_task_on_each_node(self, engine: Slurm) -> None:
        with pytest.raises(UsageError, match="received nodes=2 and a range of 1 to 2 tasks: "):
            tfmw.submit(print, (), (1, 2), on=engine)

    def test_refused_job_says_why(self, engine: Slurm) -> None:
        wrong = Slurm(directory=engine.directory, partition="none")
        with pytest.raises(UsageError, match=r"sbatch failed: .*[Ii]nvalid partition"):
            self.submit(wrong, runs_forever)
        assert not [n for n in wrong.numbers() if not n.isdecimal()]


def test_slurm_that_cannot_be_asked_has_not_lost_a_job(
    engine: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its controller may be away for a while, or be busy."""
    scontrol = tmp_path / "scontrol"
    monkeypatch.setitem(os.environ, "PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    shown = {
        "slurm_load_jobs error: Unable to contact slurm controller (connect failure)": "running",
        "slurm_load_jobs error: Socket timed out on send/recv operation": "running",
        "slurm_load_jobs error: Invalid job id specified": "lost",
    }
    folder = write_job(engine.root, JobSpec(Setup(("call",), RunOptions()), (1, 1)), ())
    own_files.write(folder / STATUS, b'{"state": "running"}')
    for message, state in shown.items():
        scontrol.write_text(f"#!/bin/sh\necho '{message}' >&2\nexit 1\n")
        scontrol.chmod(0o755)
        job = engine.attach(folder.name)
        assert job._state() == ("" if state == "running" else "lost")
        assert job.status() == state
    scontrol.write_text("#!/bin/sh\necho JobId=1 JobState=NODE_FAIL Reason=None\n")
    job = engine.attach(folder.name)
    assert job.details()["problem"] == f"Slurm ended job {folder.name}: NODE_FAIL"
    with pytest.raises(TaskFailed, match=r"has no result: Slurm ended job \w+: NODE_FAIL\."):
        job.result()
    job.forget()


def test_job_that_cannot_be_found_again_is_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(os.environ, "PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    cancelled = tmp_path / "cancelled"
    for command, line in (("sbatch", "echo 4711"), ("scancel", f"echo $@ > '{cancelled}'")):
        (tmp_path / command).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / command).chmod(0o755)
    root = tmp_path / "jobs/slurm"
    (root / "4711").mkdir(parents=True)
    with pytest.raises(UsageError, match=r"cannot be started from .*jobs/slurm: .*File exists"):
        tfmw.submit(runs_forever, (str(tmp_path),), on=Slurm(directory=tmp_path / "jobs"))
    assert cancelled.read_text() == "4711\n"
    assert [path.name for path in root.iterdir()] == ["4711"]


def test_attempt_of_all_tasks_waits_for_a_silent_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm has it in the job for SlurmdTimeout, and its restarts would be used up by then."""
    environ = {"SLURM_JOB_NODELIST": "h[1-2]", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_ID": "4711"}
    environ["PATH"] = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    for name, value in environ.items():
        monkeypatch.setitem(os.environ, name, value)
    monkeypatch.setattr(slurm_engine, "_LOOK_EVERY_S", 0.0)

    def shows(second: str) -> None:
        for command, line in (("sinfo", f"echo h1 mix; echo h2 {second}"), ("scontrol", REQUEUED)):
            (tmp_path / command).write_text(f"#!/bin/sh\n{line}\n")
            (tmp_path / command).chmod(0o755)

    tasks = SlurmTasks(tmp_path)
    shows("mix*")
    assert tasks.available(2, 2) == 2, "the first attempt has what Slurm has just given"
    tasks._count = 2
    assert tasks.available(2, 2) == 0
    shows("mix")
    assert tasks.available(2, 2) == 2
    shows("mix*")
    monkeypatch.setattr(slurm_engine, "_SHORT_S", -1.0)
    assert tasks.available(2, 2) == 0
    assert (tmp_path / "requeued").read_text() == "requeue 4711\n", "to get other nodes"


REQUEUED = 'echo "$@" > "$(dirname "$0")/requeued"'


def test_what_sbatch_is_asked_for() -> None:
    engine = Slurm(partition="gpu", time="02:00:00", gpus_per_worker=2, options=("--qos=high",))
    named = ["--partition=gpu", "--time=02:00:00", "--qos=high"]
    one = ["--ntasks=4", "--cpus-per-task=1", "--gpus-per-task=2", *named]
    assert engine._options((4, 4)) == one
    # sbatch(1): --gpus-per-task needs a number of tasks, and with one it grants the fewest nodes
    each = ["--nodes=2-8", "--no-kill", "--cpus-per-task=1", "--gpus-per-node=2", *named]
    assert engine._options((2, 8)) == each


def test_without_slurm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(os.environ, "PATH", str(tmp_path))
    with pytest.raises(UsageError, match="on='slurm' needs the command sbatch"):
        tfmw.submit(print, on=Slurm(directory=tmp_path))
