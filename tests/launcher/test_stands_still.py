"""Faults of one worker, as `tfmw status`, `tfmw stacks` and the run's own output report them.

docs/howto/debug.md shows these lines; the tests compare, with N for every number.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.cluster import PROGRAMS, ROOT, tfmw_command
from tfmw.cli.main import main
from tfmw.launcher import run_files

pytestmark = pytest.mark.process

PROGRAM = str(PROGRAMS / "stands_still.py")
PAGE = (ROOT / "docs/howto/debug.md").read_text()
PATIENCE_S = 120


def shown(*command: str) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        main(command)
    return out.getvalue()


def until(
    condition: Callable[[str], object], run: subprocess.Popen[str], command: str = "status"
) -> str:
    """Output of `tfmw status`, or of another command, once it meets a condition."""
    deadline, last = time.monotonic() + PATIENCE_S, ""
    while time.monotonic() < deadline:
        assert run.poll() is None, run.communicate()[0]
        if condition(last := shown(command)):
            return last
        time.sleep(0.2)
    raise AssertionError(f"{command} shows no such thing:\n{last}")


def numbers_aside(line: str) -> str:
    """Replaces numbers by N; a signal may find the worker in either of several ring operations."""
    line = re.sub(r" *\d[\d.,]*", " N", line).replace("worker N", "worker 1")
    return line.replace("(metrics)", "(gradients of step N)")


def assert_documented(fault: str, line: str) -> None:
    """The page has the line, up to numbers, in its table's row of the fault."""
    (row,) = [row for row in PAGE.splitlines() if row.startswith(f"| {fault} ")]
    assert f"`{numbers_aside(line)}`" in row.replace("\\|", "|"), numbers_aside(line)


def line_of(text: str, part: str) -> str:
    (found,) = [line for line in text.splitlines() if part in line]
    return found


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(run_files.RUNTIME_DIRECTORY, str(tmp_path / "runtime"))


@contextlib.contextmanager
def started(tmp_path: Path, fault: str, *options: str) -> Iterator[subprocess.Popen[str]]:
    (tmp_path / "fault").write_text(fault)
    env = {run_files.RUNTIME_DIRECTORY: os.environ[run_files.RUNTIME_DIRECTORY]}
    command = ["run", "--workers", "2", "--log-dir", str(tmp_path / "logs"), *options]
    with tfmw_command(*command, PROGRAM, str(tmp_path), env=env) as run:
        yield run
        run.terminate()
        run.communicate(timeout=600)


@pytest.mark.nightly
def test_what_is_reported_of_one_worker(tmp_path: Path, runtime: None) -> None:
    """Its map is slow, then its steps are; then it is stopped, and killed."""
    with started(tmp_path, "slow map") as run:
        text = until(lambda text: "for its input" in text, run)
        data = r"^(?:goodput|took) .* training .*; worker 1 waited [\d.]+ s for data$"
        until(lambda text: re.search(data, text, re.M), run)
        assert_documented("its input is slow", line_of(text, "is the slowest"))
        assert re.search(r"worker 1 \|.* own [\d.]+ ms/step \| input [\d.]+ \|", text)
        (log,) = tmp_path.glob("logs/*/attempt_0/worker_1/output.log")
        until(lambda text: "waits for its input" in log.read_text(), run)
        (named,) = [x for x in log.read_text().splitlines() if "waits for its input" in x]
        assert_documented("its input is slow", named[named.index("training waits") :])
        assert "waits for its input" not in (log.parents[1] / "worker_0/output.log").read_text()

        (tmp_path / "fault").write_text("slow")
        text = until(lambda text: re.search(r"slowest: .* the others \d+ ms$", text, re.M), run)
        assert_documented("its steps are slow", line_of(text, "is the slowest"))
        assert line_of(text, "is the slowest").startswith("worker 1 is")

        # A worker is between two slow steps at times.
        stacks = until(lambda text: "in slowly" in text or "in wait" in text, run, "stacks")
        assert stacks.index("== worker 0") < stacks.index("== worker 1")
        assert "stands_still.py" in stacks.partition("== worker 1")[2]

        (state,) = json.loads(shown("status", "--json"))
        pid = state["tasks"][1]["pid"]
        os.kill(pid, signal.SIGSTOP)
        text = until(lambda text: "worker 1 never entered" in text or "not go on" in text, run)
        stopped = line_of(text, "stopped by a signal")
        assert_documented("it is stopped (SIGSTOP)", stopped.partition(" | own")[0])
        assert_documented("it is stopped (SIGSTOP)", text.splitlines()[3])
        # TensorFlow ends the others ten seconds after a stop.
        assert "stopped by a signal" in shown("stacks").partition("== worker 1")[2]

        os.kill(pid, signal.SIGKILL)
        output, _ = run.communicate(timeout=PATIENCE_S)
    (line,) = re.findall("tfmw: (worker 1 (?:never entered|ended in) .*)", output)
    assert_documented("it is killed (SIGKILL)", line)
    assert "no run of this user is alive" in shown("status")


@pytest.mark.nightly
def test_a_worker_on_a_slow_core(tmp_path: Path, runtime: None) -> None:
    """Each worker has a core, and that of worker 1 has other work."""
    with started(tmp_path, "slow core") as run:
        text = until(lambda text: "is the slowest" in text, run)
        assert_documented("its core is slow", line_of(text, "is the slowest"))
        assert line_of(text, "is the slowest").startswith("worker 1 is")


@pytest.mark.nightly
def test_a_worker_that_does_not_enter_an_exchange(tmp_path: Path, runtime: None) -> None:
    with started(tmp_path, "skips", "--hang-timeout", "6") as run:
        text = until(lambda text: "never entered" in text, run)
        assert_documented("the user's code does not return", line_of(text, "never entered"))
        assert re.search(r"worker 0 \|.* in exchange \d+ .*, waits for worker 1", text)
        output, _ = run.communicate(timeout=PATIENCE_S)
    assert run.returncode == 1
    sentence = r"tfmw: worker 1 never entered exchange \d+ \(gradients of step 40\); its stack: "
    assert re.search(sentence + r"stands_still.py:\d+ in sleeping_in_the_users_code", output)
    # The watchdog alone would have named worker 0, which was silent for as long.
    assert re.search(
        r"worker 1 failed .*no progress for \d+ s after step 39; it never entered exchange \d+ "
        r"\(gradients of step 40\)\n",
        output,
    )
    (dump,) = tmp_path.glob("logs/*/attempt_0/exchanges.json")
    made: dict[str, list[dict[str, Any]]] = json.loads(dump.read_text())
    assert made["worker 0"][-1]["number"] == made["worker 1"][-1]["number"] + 1
    assert made["worker 0"][-1]["waiting_for"] == 1
