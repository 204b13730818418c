"""Faults of one worker, as `tfmw status`, `tfmw stacks` and the run's own output report them.

docs/stands-still.md shows these lines; the tests compare, with N for every number.
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
from tfmw.cli import main
from tfmw.launcher import status_socket

pytestmark = pytest.mark.multiprocess

PROGRAM = str(PROGRAMS / "stands_still.py")
PAGE = (ROOT / "docs/stands-still.md").read_text()
PATIENCE_S = 120


def shown(*command: str) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        main(command)
    return out.getvalue()


def until(condition: Callable[[str], bool], run: subprocess.Popen[str]) -> str:
    """What `tfmw status` shows once it shows something."""
    deadline, last = time.monotonic() + PATIENCE_S, ""
    while time.monotonic() < deadline:
        assert run.poll() is None, run.communicate()[0]
        if condition(last := shown("status")):
            return last
        time.sleep(0.2)
    raise AssertionError(f"status shows no such thing:\n{last}")


def numbers_aside(line: str) -> str:
    return re.sub(r" *\d[\d.,]*", " N", line).replace("worker N", "worker 1")


def assert_documented(line: str) -> None:
    """The page has the line, up to numbers."""
    page = PAGE.replace("\\|", "|")
    assert numbers_aside(line) in page, numbers_aside(line)


def line_of(text: str, part: str) -> str:
    (found,) = [line for line in text.splitlines() if part in line]
    return found


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(status_socket.RUNTIME_DIRECTORY, str(tmp_path / "runtime"))


@contextlib.contextmanager
def started(tmp_path: Path, fault: str, *options: str) -> Iterator[subprocess.Popen[str]]:
    env = {status_socket.RUNTIME_DIRECTORY: os.environ[status_socket.RUNTIME_DIRECTORY]}
    command = ["run", "--workers", "2", "--log-dir", str(tmp_path / "logs"), *options]
    with tfmw_command(*command, PROGRAM, fault, str(tmp_path), env=env) as run:
        yield run
        run.terminate()
        run.communicate(timeout=60)


def test_a_slow_worker_and_one_that_is_stopped(tmp_path: Path, runtime: None) -> None:
    with started(tmp_path, "slow") as run:
        text = until(lambda text: "is the slowest" in text, run)
        assert_documented(line_of(text, "is the slowest"))
        assert line_of(text, "is the slowest").startswith("worker 1 is")

        assert "in slowly" in (stacks := shown("stacks")) or "in wait" in stacks
        assert stacks.index("== worker 0") < stacks.index("== worker 1")
        assert "stands_still.py" in stacks.partition("== worker 1")[2]

        (state,) = json.loads(shown("status", "--json"))
        pid = state["tasks"][1]["pid"]
        os.kill(pid, signal.SIGSTOP)
        text = until(lambda text: "worker 1 never entered" in text or "not go on" in text, run)
        stopped = line_of(text, "stopped by a signal")
        assert_documented(stopped.partition(" | own")[0])
        if "never entered" in text:  # it depends on where the signal finds it
            assert_documented(text.splitlines()[3])
        # TensorFlow ends the others ten seconds after a stop.
        assert "stopped by a signal" in shown("stacks").partition("== worker 1")[2]
    assert "no run of this user is alive" in shown("status")


def test_a_worker_that_does_not_enter_an_exchange(tmp_path: Path, runtime: None) -> None:
    with started(tmp_path, "skips", "--hang-timeout", "6") as run:
        text = until(lambda text: "never entered" in text, run)
        assert_documented(line_of(text, "never entered"))
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
