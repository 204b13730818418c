"""`tfmw status` and `tfmw stacks` where each host has one task, and no launcher.

The script imports no TensorFlow: it makes the records that a training makes.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from subprocess import PIPE

import pytest

from tests.helpers.cluster import tfmw_command
from tfmw.cli.main import main
from tfmw.launcher import run_files
from tfmw.launcher.run_status import RunStatus

PATIENCE_S = 60

SCRIPT = """
import sys
from tfmw.observe import progress, recorder

progress.report_progress(0)
for step in range(1, 21):
    recorder.begun("gradients", 4000)
    recorder.done()
    progress.report_progress(step)
recorder.begun("gradients", 4000)
recorder.waits_for(1 - int(sys.argv[1]))
print("waits", flush=True)
sys.stdin.read()
"""


def shown(*command: str) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        main(command)
    return out.getvalue()


def until(condition: Callable[[str], bool], *command: str) -> str:
    deadline, last = time.monotonic() + PATIENCE_S, ""
    while time.monotonic() < deadline:
        if condition(last := shown(*command)):
            return last
        time.sleep(0.1)
    raise AssertionError(last)


def test_each_host_shows_its_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, script = tmp_path / "runtime", tmp_path / "train.py"
    script.write_text(SCRIPT)
    monkeypatch.setenv(run_files.RUNTIME_DIRECTORY, str(runtime))
    env = {run_files.RUNTIME_DIRECTORY: str(runtime), "TFMW_NO_INIT": "1"}
    command = ["run", "--hosts", "127.0.0.1:2222,127.0.0.2:2222", "--host-index"]
    with (
        tfmw_command(*command, "0", str(script), "0", env=env, stdin=PIPE) as first,
        tfmw_command(*command, "1", str(script), "1", env=env, stdin=PIPE) as second,
    ):
        status = until(lambda text: text.count("waits for worker") == 2, "status")
        for rank, pid in enumerate([first.pid, second.pid]):
            lines = shown("status", str(pid)).splitlines()
            assert lines[0].endswith(f"-{pid}, attempt 0: {script} {rank}")
            other = f"worker {1 - rank} on 127.0.0.{2 - rank}"
            assert lines[1].startswith(f"worker {rank} | step      20 | training | ")
            assert " steps/s | " in lines[1]
            assert " | in exchange 21 (gradients of step 21) for " in lines[1]
            assert lines[1].endswith(f", waits for {other}")
            assert lines[2].startswith(("goodput ", "took "))
            assert lines[3:] == [f"on other hosts: {other}"]
            stacks = shown("stacks", str(pid))
            assert f'File "{script}", line 13 in <module>' in stacks
            assert f"== worker {1 - rank}\nit runs on 127.0.0.{2 - rank}" in stacks
        assert status.count("\nrun ") == 1
        second.kill()
        second.communicate()
        assert "worker 1 |" not in shown("status")
        assert len(list(runtime.iterdir())) == 1  # the killed run has left nothing
        output, _ = first.communicate("")
    assert re.search(r"^tfmw: (?:goodput|took) .* s: ", output, re.MULTILINE)  # the chief
    assert list(runtime.iterdir()) == []


def test_runs_of_another_version_of_tfmw(tmp_path, monkeypatch):
    """A field that it does not have, and one that this version does not know; or another form."""
    monkeypatch.setenv(run_files.RUNTIME_DIRECTORY, str(tmp_path / "runtime"))
    with (
        run_files.published(RunStatus(tmp_path / "older", ["script"])),
        run_files.published(RunStatus(tmp_path / "other", ["script"])),
    ):
        (older,) = (tmp_path / "runtime").glob("*-older/run.json")
        (other,) = (tmp_path / "runtime").glob("*-other/run.json")
        described = json.loads(older.read_text())
        del described["clock_zero"]
        older.write_text(json.dumps({**described, "new": 1}))
        other.write_text(json.dumps({**described, "tasks": 3}))
        assert [status.name for status in run_files.runs()] == ["older"]
