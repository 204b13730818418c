"""Jobs of this machine: the contract of all engines, and the commands of the shell."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

import tfmw
from tests.engines.contract import (
    TIMEOUT_S,
    Contract,
    HasController,
    doubled,
    marked_copy,
    runs_forever,
    shell,
    wait_for,
)
from tests.helpers.cluster import MARK, ONE_THREAD, PROGRAMS, PYTHONPATH, marked, wait_gone
from tfmw.engines import Engine, Job, Local
from tfmw.errors import UsageError
from tfmw.launcher.engines import own_files
from tfmw.launcher.engines.folder import FolderJob
from tfmw.launcher.engines.standing_job import CALLER, SILENCE_S, Calls

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return Local(directory=tmp_path_factory.mktemp("jobs"))


class TestLocal(HasController, Contract):
    test_fit_equals_that_of_two_workers = None  # it is that
    test_fit_equals_that_of_two_workers_though_a_host_is_lost = None
    lost = r"local job \w+ was lost"
    # `make test` has it on Kubernetes.
    test_every_role = marked_copy(Contract.test_every_role, pytest.mark.nightly)

    def controller(self, engine: Engine, job: Job) -> int:
        assert isinstance(engine, Local)
        return int((engine.folder(job.id.partition(":")[2]) / "pid").read_text())


@pytest.mark.nightly
def test_fit_with_a_server_and_an_evaluator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The chief waits in each epoch for the evaluator; the script is that of `tfmw run --ps`."""
    for name, value in {**ONE_THREAD, "PYTHONPATH": PYTHONPATH}.items():
        monkeypatch.setenv(name, value)
    engine = Local(directory=tmp_path / "jobs")
    script = PROGRAMS / "evaluated.py"
    job = tfmw.submit(script, (str(tmp_path),), 1, on=engine, ps=1, evaluator=True)
    assert job.wait(TIMEOUT_S) == "done", job.logs()
    assert "evaluator watches" in job.logs()
    assert (tmp_path / "backups/best").exists()
    assert job.details()["step"] == 60


NOMAD = """
import dataclasses
from tfmw.launcher.engines.local_jobs import Local

@dataclasses.dataclass(frozen=True)
class Nomad(Local):
    name = "nomad"
"""


def test_engine_of_another_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its entry point is its name: for `on=`, for `attach`, and for the commands."""
    (tmp_path / "nomad_engine.py").write_text(NOMAD)
    package = tmp_path / "tfmw_nomad-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: tfmw-nomad\nVersion: 1.0\n")
    entries = "nomad = nomad_engine:Nomad\nother = nomad_engine:Nomad\n"
    (package / "entry_points.txt").write_text(f"[tfmw.engines]\n{entries}")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(os.environ, "HOME", str(tmp_path))
    job = tfmw.submit(doubled, (4,), 1, on="nomad", env={"TFMW_NO_INIT": "1"})
    assert job.id.startswith("nomad:")
    assert [row[2] for row in tfmw.attach(job.id).result(TIMEOUT_S)] == [8]
    assert [found.id for found in tfmw.jobs("nomad")] == [job.id]
    job.forget()
    with pytest.raises(
        UsageError, match=r"'other', which is nomad_engine:Nomad: expected a subcla"
    ):
        tfmw.jobs("other")
    with pytest.raises(
        UsageError, match=r"on='slrum': expected .*'spark', 'nomad', 'other', or an"
    ):
        tfmw.jobs("slrum")


def test_commands(tmp_path: Path) -> None:
    """Submitted, listed, read and cancelled from four processes."""
    script = tmp_path / "train.py"
    script.write_text(
        "import os, sys, time, tfmw\n"
        "tfmw.report_progress(3)\n"
        "print('up', *sys.argv[1:], flush=True)\n"
        "while sys.argv[1] == '--forever': time.sleep(0.1)\n"
    )
    place = f"directory={tmp_path}"
    options = ("submit", "--on=local", "--workers", "2", "--set", place)
    followed = shell(*options, "--follow", str(script), "--once")
    job_id, *lines = followed.splitlines()
    assert sorted(line.partition("] ")[2] for line in lines[:2]) == ["up --once"] * 2
    assert lines[2].startswith(("tfmw: goodput ", "tfmw: took "))
    forever = shell(*options, str(script), "--forever").strip()
    job = tfmw.attach(forever, on=Local(directory=tmp_path))
    try:
        wait_for(lambda: job.logs().count("up --forever") == 2)
        listed = [
            line.split()[:2] for line in shell("jobs", "--on=local", "--set", place).splitlines()
        ]
        assert listed == [[job_id, "done"], [forever, "running"]]
        wait_for(lambda: job.details().get("steps") == [3, 3])
        shown = shell("status", forever, "--set", place).splitlines()
        host = job.details()["hosts"][0]
        assert shown[0] == f"job {forever}: running, attempt 0"
        assert shown[2:4] == [f"worker {i} on {host} | step       3" for i in (0, 1)]
        assert shown[4].startswith(("goodput ", "took "))
        told = json.loads(shell("status", "--json", job_id, "--set", place))
        assert (told["job"], told["state"]) == (job_id, "done")
        assert shell("logs", job_id, "--set", place) == "".join(f"{line}\n" for line in lines)
        assert shell("cancel", forever, "--set", place) == f"{forever} cancelled\n"
    finally:
        with contextlib.suppress(UsageError):
            job.cancel()
    assert "has no jobs" not in shell("jobs", "--on=local", "--set", place)


def test_wrong_use(tmp_path: Path) -> None:
    for command, said in [
        (("submit", "--on=nomad", "x.py"), "received on='nomad': expected 'kubernetes', 'local'"),
        (
            ("submit", "--on=local", "--set", "colour=red", "x.py"),
            "expected NAME=VALUE with a setti",
        ),
        (("submit", "--on=local", "--workers=2,x", "x.py"), "received --workers 2,x: expected"),
        (("submit", "--on=local"), "received no script to submit"),
        (("logs", "4711"), "received the job '4711': expected an engine and a number"),
        (("cancel", "local:none", "--set", f"directory={tmp_path}"), "there is no job local:none"),
    ]:
        assert said in shell(*command, status=2)
    for workers in (0, (3, 2), (1, 2, 3), True, "2"):
        with pytest.raises(UsageError, match="expected a number of processes, such as 2, or"):
            tfmw.submit(print, workers=workers, on="local")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"workers is \(2, 3\); expected an integer of at least"):
        tfmw.launch(print, workers=(2, 3))
    only_here: list[dict[str, Any]] = [{"log_dir": "logs"}, {"grace_s": 9}, {"isolate": "on"}]
    for option in only_here:
        with pytest.raises(UsageError, match=f"{next(iter(option))}= is for on='local' alone: "):
            tfmw.launch(print, on=tfmw.engines.Slurm(directory=tmp_path), **option)


class Own(Local):
    """An engine that tfmw does not know."""

    name = "own"
    fails = ""

    def where(self, number: str) -> str:
        if self.fails == "where":
            raise RuntimeError("no dashboard")
        return f"own job {number}"

    def attach(self, number: str) -> FolderJob:
        if self.fails == "attach":
            raise PermissionError(errno.EACCES, "Permission denied", "pid")
        return super().attach(number)


@pytest.mark.parametrize(
    ("fails", "error", "said"),
    [
        ("where", RuntimeError, "no dashboard"),
        ("attach", UsageError, "the job cannot be started from .*own: .*Permission denied"),
    ],
)
def test_job_whose_submission_fails_is_ended(
    fails: str, error: type, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = os.urandom(8).hex()
    monkeypatch.setenv(MARK, mark)
    monkeypatch.setattr(Own, "fails", fails)
    with pytest.raises(error, match=said):
        tfmw.submit(runs_forever, (str(tmp_path),), on=Own(directory=tmp_path / "jobs"))
    monkeypatch.undo()
    assert wait_gone(list(marked(mark)), timeout_s=30) == []
    assert list((tmp_path / "jobs/own").iterdir()) == []


@pytest.mark.nightly
def test_workers_that_stay(
    tmp_path: Path, fit_on_two_workers: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tasks of a job, on every engine but `local`; see `Contract`."""
    from tests.engines import training

    for name, value in {**ONE_THREAD, "PYTHONPATH": PYTHONPATH}.items():
        monkeypatch.setenv(name, value)
    engine = Own(directory=tmp_path / "jobs")
    training.fits_in_workers_that_stay(engine, tmp_path, fit_on_two_workers)
    assert tfmw.jobs(engine) == []
    with pytest.raises(UsageError, match="workers that stay do not restart"):
        tfmw.Workers(2, on=Own(max_restarts=1))


def test_job_whose_caller_is_gone_ends(tmp_path: Path) -> None:
    now = [0.0]
    folder = tmp_path / "job"
    folder.mkdir(mode=0o700)
    calls = Calls(folder, clock=lambda: now[0])
    for beat in range(3):
        own_files.write(folder / CALLER, str(beat).encode())
        assert not calls.caller_gone
        now[0] += SILENCE_S
    assert not calls.caller_gone
    now[0] += 0.1
    assert calls.caller_gone


def test_job_of_an_engine_that_tfmw_does_not_know(tmp_path: Path) -> None:
    engine = Own(directory=tmp_path)
    job = tfmw.submit(doubled, (3,), 1, on=engine, env={"TFMW_NO_INIT": "1"})
    assert job.id.startswith("own:")
    assert tfmw.attach(job.id, on=engine).result(TIMEOUT_S) == job.result(TIMEOUT_S)
    for job_id, on in ((job.id, None), ("local:1", engine)):
        with pytest.raises(UsageError, match=r"expected an engine and a number.* by on="):
            tfmw.attach(job_id, on=on)
