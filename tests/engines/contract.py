"""What every engine promises: tests that each engine's own test class inherits.

    @pytest.fixture(scope="module")
    def engine(): ...

    class TestSlurm(Contract): ...

Functions with TFMW_NO_INIT=1 import no TensorFlow, so these jobs cost little.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import signal
import subprocess
import sys
import time
import types
import uuid
from pathlib import Path
from typing import Any

import pytest

import tfmw
from tests.helpers.cluster import MARK, ONE_THREAD, PYTHONPATH, marked, wait_gone
from tfmw.engines import Engine, Job
from tfmw.errors import TaskFailed, UsageError

PLAIN = {"TFMW_NO_INIT": "1"}
TIMEOUT_S = 120


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


def wait_for(condition: Any, timeout_s: float = TIMEOUT_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def of_a_module_that_is_not_there() -> Any:
    """A function of a module that only this process has."""
    module = types.ModuleType("only_here")
    exec("def function():\n    return 1\n", module.__dict__)
    sys.modules["only_here"] = module
    return module.function


class Contract:
    """The promises; see the module."""

    attaches = True
    """Whether another process can attach to a job."""

    def submit(self, engine: Engine, fn: Any, *args: Any, **options: Any) -> Job:
        env = {**PLAIN, **options.pop("env", {})}
        return tfmw.submit(fn, args, 2, on=engine, env=env, **options)

    def test_two_jobs_at_once_and_from_another_process(self, engine: Engine) -> None:
        first = self.submit(engine, doubled, 21)
        second = self.submit(engine, doubled, 4)
        assert first.id.startswith(f"{engine.name}:")
        assert first.id != second.id
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
        if self.attaches:
            code = (
                "import sys, pickle, tfmw; from tests.engines import contract;"
                "job = tfmw.attach(sys.argv[1], on=pickle.loads(bytes.fromhex(sys.argv[2])));"
                "print(job.status(), job.result(60)[1][2])"
            )
            done = subprocess.run(
                [sys.executable, "-c", code, first.id, pickle.dumps(engine).hex()],
                env={**os.environ, "PYTHONPATH": PYTHONPATH},
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
            )
            assert done.stdout.split()[-2:] == ["done", "42"], done.stderr
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

    def test_killed_task_is_restarted(self, engine: Engine, tmp_path: Path) -> None:
        job = self.submit(engine, dies_once, str(tmp_path), max_restarts=1)
        assert job.result(TIMEOUT_S) == [1, 1]
        assert job.details()["restarts"] == 1
        assert "tfmw: restart 1 of 1 in 1 s: worker 1 on " in job.logs()
        job.forget()

    def test_missing_module_is_named(self, engine: Engine) -> None:
        job = self.submit(engine, of_a_module_that_is_not_there(), max_restarts=3)
        with pytest.raises(UsageError, match=r"need the module 'only_here', which worker \d on "):
            job.result(TIMEOUT_S)
        assert job.details()["attempt"] == 0, "no restart mends it"
        job.forget()

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

    def test_fit_equals_that_of_two_workers(
        self,
        engine: Engine,
        fit_on_two_workers: tuple[Any, Any],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        """Bit for bit, though a worker was killed: the job goes on from the backup it keeps."""
        from tests.engines import training
        from tfmw.engines import local

        for name, value in ONE_THREAD.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(local, "_BACKUP_OF_JOB_EVERY", "epoch")
        expected, twin = fit_on_two_workers
        thread = training.order_when_backed_up(engine, tmp_path)
        history, model = training.fit(engine, tmp_path)
        thread.join()
        assert history.history == expected.history
        for ours, theirs in zip(model.get_weights(), twin.get_weights(), strict=True):
            assert (ours == theirs).all()
        assert int(model.optimizer.iterations) == 3 * training.EPOCHS
        shown = capsys.readouterr()
        assert "tfmw: restart 1 of 3" in shown.out
        assert re.search(r"\[worker 0 on \S+\] .*restored step \d+ from", shown.out)
        assert "tfmw: " in shown.err, "where it runs"
