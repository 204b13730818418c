"""Promises of every engine, as tests that each engine's own test class inherits.

    @pytest.fixture(scope="module")
    def engine(): ...

    class TestSlurm(Contract): ...

Functions with TFMW_NO_INIT=1 import no TensorFlow, so these jobs cost little.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import pickle
import re
import signal
import subprocess
import sys
import time
import types
import uuid
from collections.abc import Iterator
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any

import nbformat
import pytest

import tfmw
from notebooks.execute import execute
from tests.helpers.cluster import MARK, ONE_THREAD, PYTHONPATH, ROOT, marked, wait_gone
from tests.notebooks.test_notebooks import shows_on_a_cluster, text_of
from tfmw.engines import Engine, Job
from tfmw.errors import TaskFailed, UsageError
from tfmw.launcher.engines.agent import BACKUPS
from tfmw.launcher.engines.job import ENDED

OF_RAY = re.compile(r"import ray$|ray\.|os\.environ\[\"RAY_")
PLAIN = {"TFMW_NO_INIT": "1"}
TIMEOUT_S = 120


def marked_copy(test: Any, mark: pytest.MarkDecorator) -> Any:
    """A test of the contract for one engine's class, whose mark is not that of other engines."""

    @functools.wraps(test)
    def copy(*args: Any, **fixtures: Any) -> None:
        test(*args, **fixtures)

    return mark(copy)


def rank() -> int:
    return int(os.environ["TFMW_TASK"].removeprefix("worker "))


def doubled(value: int) -> tuple[int, str, int]:
    print(f"hello from {rank()}")
    return rank(), os.environ["TFMW_RUN_ID"], 2 * value


def raises_on_1() -> None:
    if rank() == 1:
        raise KeyError("no such key")
    wait_for(lambda: False)


def dies_once(folder: str) -> int:
    """Worker 1 is killed in the first attempt, once both are up."""
    attempt = int(os.environ["TFMW_ATTEMPT"])
    meet(folder, f"attempt_{attempt}")
    if attempt == 0:
        if rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        wait_for(lambda: False)
    return attempt


def runs_forever(folder: str) -> None:
    meet(folder, "up")
    wait_for(lambda: False)


def meet(folder: str, name: str) -> None:
    """Leaves a file, and waits for those of both tasks."""
    Path(folder, f"{name}_{rank()}").touch()
    wait_for(lambda: len(list(Path(folder).glob(f"{name}_*"))) == 2)


def saves_and_waits(folder: str) -> str:
    """Saves a state on the chief and waits, in the first attempt; later it returns that state."""
    backups = Path(os.environ[BACKUPS])
    if os.environ["TFMW_ATTEMPT"] != "0":
        return "".join(path.read_text() for path in backups.glob("step_7/state"))
    if rank() == 0:
        (backups / "new").mkdir(parents=True)
        (backups / "new/state").write_text("saved")
        (backups / "new").rename(backups / "step_7")
    tfmw.report_progress(7)
    Path(folder, f"pid_{rank()}").write_text(str(os.getpid()))
    wait_for(lambda: False)
    raise AssertionError


def in_its_role(folder: str) -> str:
    """Worker 0, the evaluator, the server and the chief are killed, in this order; all return."""
    name = os.environ["TFMW_TASK"]
    Path(folder, f"{name} {os.environ['TFMW_ATTEMPT']} {os.getpid()}").touch()

    def starts(task: str) -> int:
        return len(list(Path(folder).glob(f"{task} *")))

    start, after, its_start = {  # the start that ends so, and the other task's that comes before
        "worker 0": (1, "chief", 1),
        "evaluator": (1, "worker 0", 2),
        "ps 0": (1, "evaluator", 2),
        "chief": (2, "ps 0", 2),
    }[name]
    if starts(name) == start:
        wait_for(lambda: starts(after) == its_start)
        os.kill(os.getpid(), signal.SIGKILL)
    if name in ("chief", "evaluator"):
        wait_for(lambda: starts("chief") == starts("ps 0") == 3)
        Path(folder, f"done {name}").touch()
    wait_for(Path(folder, "done chief").exists)
    return name


def waits_for_a_file(path: str) -> tuple[int, str, int]:
    wait_for(Path(path).exists)
    return doubled(21)


def wait_for(condition: Any, timeout_s: float = TIMEOUT_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def process_of(*words: str) -> int:
    """The only process that has these words in its command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            command = path.read_text().replace("\0", " ")
            if all(word in command for word in words):
                found.append(int(path.parent.name))
    (pid,) = found
    return pid


def ancestor(pid: int, program: str) -> int:
    """The nearest process above, with this in its command line."""
    while True:
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        assert pid > 1, f"no {program}"
        if program in Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " "):
            return pid


SUBMIT_AND_DIE = """
import os, pickle, signal, sys
import tfmw
from tests.engines import contract

engine = pickle.loads(bytes.fromhex(sys.argv[1]))
job = tfmw.submit(contract.waits_for_a_file, (sys.argv[2],), 2, on=engine, env=contract.PLAIN)
print(job.id, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def submitted_by_a_process_that_dies(engine: Engine, path: Path) -> Job:
    """A job that returns once there is the file."""
    done = subprocess.run(
        [sys.executable, "-c", SUBMIT_AND_DIE, pickle.dumps(engine).hex(), str(path)],
        env={**os.environ, "PYTHONPATH": PYTHONPATH},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    return tfmw.attach(done.stdout.split()[-1], on=engine)


def shell(*command: str, status: int = 0) -> str:
    """Output of a command of tfmw."""
    done = subprocess.run(
        [sys.executable, "-m", "tfmw", *command],
        env={**os.environ, **PLAIN, "PYTHONPATH": PYTHONPATH},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == status, done.stderr
    return done.stdout if status != 2 else done.stderr


def of_a_module_that_is_not_there() -> Any:
    """A function of a module that only this process has."""
    module = types.ModuleType("only_here")
    exec("def function():\n    return 1\n", module.__dict__)
    sys.modules["only_here"] = module
    return module.function


class Contract:
    """The promises; see the module."""

    attaches = True
    """Whether a job outlives the process that submits it, and another can attach to it."""

    host = "tfmw.launcher.engines.agent"
    """A word of the command line that runs a task in the engine, above the task's process."""

    def lose(self, job: Job, pid: int) -> None:
        """Kills the actor, executor or other process in which the engine runs a task."""
        os.kill(ancestor(pid, self.host), signal.SIGKILL)

    @contextlib.contextmanager
    def tasks_that_find(self, engine: Engine, path: Path) -> Iterator[Engine]:
        """An engine whose tasks look for packages in this folder first."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(os.environ, "PYTHONPATH", f"{path}{os.pathsep}{PYTHONPATH}")
            yield engine

    def submit(self, engine: Engine, fn: Any, *args: Any, **options: Any) -> Job:
        env = {**PLAIN, **options.pop("env", {})}
        return tfmw.submit(fn, args, 2, on=engine, env=env, **options)

    @pytest.mark.nightly
    def test_two_jobs_at_once_one_of_a_process_that_died(
        self, engine: Engine, tmp_path: Path
    ) -> None:
        path = tmp_path / "go"
        first = (
            submitted_by_a_process_that_dies(engine, path)
            if self.attaches
            else self.submit(engine, waits_for_a_file, str(path))
        )
        second = self.submit(engine, doubled, 4)
        assert first.id.startswith(f"{engine.name}:")
        assert first.id != second.id
        assert first.status() not in ENDED
        path.touch()
        assert [row[::2] for row in second.result(TIMEOUT_S)] == [(0, 8), (1, 8)]
        assert [row[::2] for row in first.result(TIMEOUT_S)] == [(0, 42), (1, 42)]
        runs = [{row[1] for row in job.result()} for job in (first, second)]
        assert [len(ids) for ids in runs] == [1, 1], "trackers know a run by it"
        assert runs[0] != runs[1]
        assert first.status() == "done"
        lines = sorted(first.logs().splitlines())
        hosts = first.details()["hosts"]
        assert lines == [f"[worker {i} on {hosts[i]}] hello from {i}" for i in (0, 1)]
        assert {job.id for job in tfmw.jobs(engine)} >= {first.id, second.id}
        first.forget()
        second.forget()
        with pytest.raises(UsageError, match="there is no job"):
            tfmw.attach(first.id, on=engine)

    def test_error_of_a_task(self, engine: Engine) -> None:
        job = self.submit(engine, raises_on_1)
        with pytest.raises(KeyError, match="no such key") as raised:
            job.result(TIMEOUT_S)
        assert isinstance(raised.value.__cause__, TaskFailed)
        assert "in raises_on_1" in str(raised.value.__cause__)
        assert job.status() == "failed"
        assert "KeyError" in job.details()["problem"]
        assert job.logs().splitlines()[-1].startswith("tfmw: worker 1 on ")
        job.forget()

    @pytest.mark.nightly  # a fit whose worker is killed, and a lost host, are below
    def test_killed_task_is_restarted(self, engine: Engine, tmp_path: Path) -> None:
        job = self.submit(engine, dies_once, str(tmp_path), max_restarts=1)
        assert job.result(TIMEOUT_S) == [1, 1]
        assert job.details()["restarts"] == 1
        assert "tfmw: restart 1 of 1 in 1 s: worker 1 on " in job.logs()
        job.forget()

    def roomy(self, engine: Engine) -> Engine:
        """The engine, with room for two tasks on each of its machines."""
        return engine

    def test_every_role(self, engine: Engine, tmp_path: Path) -> None:
        """A worker and an evaluator restart alone, the others with all; servers have no result."""
        job = tfmw.submit(
            in_its_role,
            (str(tmp_path),),
            1,
            on=self.roomy(engine),
            env=PLAIN,
            max_restarts=4,
            ps=1,
            evaluator=True,
        )
        assert job.result(TIMEOUT_S) == ["chief", "evaluator"]
        details = job.details()
        assert details["tasks"] == ["chief", "worker 0", "ps 0", "evaluator"]
        assert (details["attempt"], details["restarts"]) == (2, 4)
        logs = job.logs()
        assert "tfmw: restart 1 of 4 at once, of worker 0 alone: it failed" in logs
        assert "tfmw: restart 2 of 4 at once, of evaluator alone: it failed" in logs
        assert re.search("tfmw: restart 3 of 4 .*: ps 0 on .* failed in attempt 0", logs)
        assert re.search("tfmw: restart 4 of 4 .*: chief on .* failed in attempt 1", logs)
        job.forget()

    @pytest.mark.nightly
    def test_lost_host_of_a_task_costs_nothing(self, engine: Engine, tmp_path: Path) -> None:
        """The job resumes from the newest backup, which it keeps itself."""
        job = self.submit(engine, saves_and_waits, str(tmp_path), max_restarts=1)
        wait_for(lambda: job.details().get("backup") == "step_7")
        wait_for((tmp_path / "pid_1").exists)
        self.lose(job, int((tmp_path / "pid_1").read_text()))
        assert job.result(TIMEOUT_S) == ["saved", ""]
        assert job.details()["attempt"] >= 1
        job.forget()

    def test_other_versions_are_refused(self, engine: Engine, tmp_path: Path) -> None:
        metadata = tmp_path / "keras-0.0.1.dist-info/METADATA"
        metadata.parent.mkdir()
        metadata.write_text("Metadata-Version: 2.1\nName: keras\nVersion: 0.0.1\n")
        ours = version_of("keras")
        expected = rf"keras is 0\.0\.1 on \S+, and {ours} where the job was submitted: install"
        with self.tasks_that_find(engine, tmp_path) as other:
            job = self.submit(other, doubled, 1, max_restarts=3)
            with pytest.raises(TaskFailed, match=expected):
                job.result(TIMEOUT_S)
        assert job.details()["attempt"] == 0, "no restart mends it"
        assert "hello" not in job.logs(), "before the first step"
        job.forget()

    def test_missing_module_is_named(self, engine: Engine) -> None:
        job = self.submit(engine, of_a_module_that_is_not_there(), max_restarts=3)
        with pytest.raises(UsageError, match=r"need the module 'only_here', which worker \d on "):
            job.result(TIMEOUT_S)
        assert job.details()["attempt"] == 0, "no restart mends it"
        job.forget()

    @pytest.mark.nightly
    def test_cancelled_job_leaves_nothing(self, engine: Engine, tmp_path: Path) -> None:
        mark = uuid.uuid4().hex
        job = self.submit(engine, runs_forever, str(tmp_path), env={MARK: mark})
        try:
            wait_for(lambda: len(list(tmp_path.glob("up_*"))) == 2)
            tasks = list(marked(mark))
            assert job.status() == "running"
            job.cancel()
            assert job.status() == "cancelled"
            assert wait_gone(tasks, timeout_s=20) == []
            with pytest.raises(TaskFailed, match="it was cancelled"):
                job.result(TIMEOUT_S)
        finally:
            for pid in marked(mark):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        job.forget()

    @pytest.fixture
    def _backup_each_epoch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A fit on few cores, whose job keeps a backup of each epoch."""
        from tfmw.train import on_workers

        for name, value in ONE_THREAD.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(on_workers, "_BACKUP_OF_JOB_EVERY", "epoch")

    @pytest.mark.usefixtures("_backup_each_epoch")
    def test_fit_equals_that_of_two_workers(
        self,
        engine: Engine,
        fit_on_two_workers: tuple[Any, Any],
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        """Results are equal bit for bit though a worker was killed: a new one takes its place."""
        from tests.engines import training

        order = tmp_path / "order"
        thread = training.once_backed_up(engine, lambda _: order.touch())
        again = dataclasses.replace(engine, max_restarts=3)
        history, model = training.fit(again, training.DiesOnce(str(order)))
        thread.join()
        assert_equal((history, model), fit_on_two_workers)
        shown = capsys.readouterr()
        assert "tfmw: worker 1 is replaced (not counted as a restart)" in shown.out
        continued = r"\[worker 0 on \S+\] .*workers continue after step \d+"
        assert re.search(continued, shown.out), shown.out
        assert "restored step" not in shown.out
        assert re.search(r"^tfmw: (?:goodput|took) ", shown.out, re.MULTILINE)
        assert "tfmw: " in shown.err, "where it runs"

    @pytest.mark.nightly
    @pytest.mark.usefixtures("_backup_each_epoch")
    def test_workers_that_stay(
        self, engine: Engine, fit_on_two_workers: tuple[Any, Any], tmp_path: Path
    ) -> None:
        """The calls of `tfmw.Workers` have the results of this machine's workers.

        Ctrl-C ends a call, and the processes stay. After an error the next call has new ones.
        """
        from tests.engines import training

        training.fits_in_workers_that_stay(engine, tmp_path, fit_on_two_workers)

    @pytest.mark.nightly
    @pytest.mark.usefixtures("_backup_each_epoch")
    def test_files_are_read_by_the_workers(self, engine: Engine, tmp_path: Path) -> None:
        """The files stay where they are: this process neither reads nor sends them."""
        from tests.engines import training

        fitted: list[tuple[Any, Any]] = []
        for on in (engine, "local"):
            folder = tmp_path / str(len(fitted))
            folder.mkdir()
            fitted.append(training.fit_of_files(on, folder))
            found = {path.name for path in folder.iterdir()} - {f"{n}.records" for n in range(4)}
            assert found == {"worker 0", "worker 1"}
        assert_equal(*fitted)

    @pytest.mark.nightly
    @pytest.mark.usefixtures("_backup_each_epoch")
    def test_fit_equals_that_of_two_workers_though_a_host_is_lost(
        self,
        engine: Engine,
        fit_on_two_workers: tuple[Any, Any],
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        """The host is an actor, an executor or a node; the job resumes from its own backup."""
        from tests.engines import training

        waits = tmp_path / "pid"

        def lose(job: Job) -> None:
            wait_for(waits.exists)
            self.lose(job, int(waits.read_text()))

        thread = training.once_backed_up(engine, lose)
        again = dataclasses.replace(engine, max_restarts=3)
        history, model = training.fit(again, training.WaitsForDeath(str(waits)))
        thread.join()
        assert_equal((history, model), fit_on_two_workers)
        assert re.search(r"\[worker 0 on \S+\] .*restored step \d+ from", capsys.readouterr().out)


class HasController:
    """A job whose controller is a process of its own, beside the one that submitted the job.

    Attributes:
        lost: pattern of the reason that the job has once its controller was killed.
        forgets: whether the engine forgets such a job, so that nobody can attach to it.
    """

    lost: str
    forgets = False

    def controller(self, engine: Engine, job: Job) -> int:
        """The process that controls a job."""
        raise NotImplementedError

    def test_killed_controller_takes_its_tasks_with_it(
        self, engine: Engine, tmp_path: Path
    ) -> None:
        mark = uuid.uuid4().hex
        env = {**PLAIN, MARK: mark}
        job = tfmw.submit(runs_forever, (str(tmp_path),), on=engine, env=env, max_restarts=1)
        wait_for(lambda: len(list(tmp_path.glob("up_*"))) == 2)
        tasks = list(marked(mark))
        os.kill(self.controller(engine, job), signal.SIGKILL)
        assert wait_gone(tasks, timeout_s=30) == []
        assert job.wait(TIMEOUT_S) == "lost"
        with pytest.raises(TaskFailed, match=f"has no result: {self.lost}"):
            job.result()
        if self.forgets:
            with pytest.raises(UsageError, match="there is no job"):
                tfmw.attach(job.id, on=engine)
        else:
            assert tfmw.attach(job.id, on=engine).status() == "lost"
        job.forget()


class FromAShell:
    """Actions of other processes on a job that outlives the process which submitted it.

    Attributes:
        setting: setting of the engine, which such a process needs to find its jobs.
        place: pattern that `Job.where` matches.
    """

    setting: str
    place: str

    def environment(self, engine: Engine, home: Path) -> dict[str, str]:
        """Variables with which `on=engine.name` means the engine."""
        return {"HOME": str(home)}

    @pytest.mark.nightly  # the commands are the same for all engines: see test_local_jobs.py
    def test_commands(self, engine: Engine, tmp_path: Path) -> None:
        setting = f"--set={self.setting}={getattr(engine, self.setting)}"
        job = tfmw.submit(runs_forever, (str(tmp_path),), 2, on=engine, env=PLAIN)
        try:
            wait_for(lambda: len(list(tmp_path.glob("up_*"))) == 2)
            listed = shell("jobs", f"--on={engine.name}", setting).splitlines()
            assert [job.id, "running"] in [line.split()[:2] for line in listed]
            assert shell("status", job.id, setting).startswith(f"job {job.id}: running, attempt 0")
            assert shell("logs", job.id, setting) == job.logs()
            assert shell("cancel", job.id, setting) == f"{job.id} cancelled\n"
            assert job.status() == "cancelled"
        finally:
            job.cancel()
        job.forget()

    @pytest.mark.nightly
    def test_cells_of_the_notebook(
        self, engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The cells of `on_a_cluster` run as they are; only Ray's own lines and its name differ."""
        notebook = nbformat.read(ROOT / "notebooks/on_a_cluster.ipynb", as_version=4)
        for cell in notebook.cells:
            lines = [line for line in cell.source.splitlines() if not OF_RAY.match(line)]
            cell.source = re.sub(r"(['\"])ray\1", repr(engine.name), "\n".join(lines))
        nbformat.write(notebook, tmp_path / "cells.ipynb")
        here = {**ONE_THREAD, "PYTHONPATH": PYTHONPATH, **self.environment(engine, tmp_path)}
        for name, value in here.items():
            monkeypatch.setenv(name, value)
        shows_on_a_cluster(text_of(execute(tmp_path / "cells.ipynb")), self.place)


def assert_equal(one: tuple[Any, Any], other: tuple[Any, Any]) -> None:
    """Two results of `training.fit`, bit for bit."""
    from tests.engines import training

    (history, model), (history2, model2) = one, other
    assert history.history == history2.history
    for ours, theirs in zip(model.get_weights(), model2.get_weights(), strict=True):
        assert (ours == theirs).all()
    assert int(model.optimizer.iterations) == 3 * training.EPOCHS
