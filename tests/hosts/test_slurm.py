"""recipes/schedulers/slurm-hosts.sbatch under a real Slurm: nodes are drained, and go down.

`make nightly` runs it, and `make test` does not (conftest.py).
"""

from __future__ import annotations

import csv
import re
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.cluster import PROGRAMS, ROOT
from tests.helpers.slurm import NODES, OneMachine

pytestmark = [pytest.mark.nightly, pytest.mark.process, pytest.mark.timeout(400)]

SCRIPT = str(ROOT / "recipes" / "schedulers" / "slurm-hosts.sbatch")
EPOCHS = 6


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OneMachine]:
    with OneMachine(tmp_path_factory.mktemp("slurm")) as one:
        yield one


class Log:
    """Output of a job."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen = 0

    def wait_for(self, pattern: str, timeout_s: float = 120.0) -> re.Match[str]:
        """Waits for text that matches, after what was found before."""
        deadline = time.monotonic() + timeout_s
        while True:
            text = self.text()
            if found := re.compile(pattern).search(text, self._seen):
                self._seen = found.end()
                return found
            assert time.monotonic() < deadline, f"no {pattern!r} in\n{text}"
            threading.Event().wait(0.1)

    def text(self) -> str:
        return self._path.read_text() if self._path.exists() else ""


def test_a_supervisor_comes_back_on_a_drained_node_and_a_node_that_is_down_is_left_out(
    slurm, tmp_path
):
    log, go = Log(tmp_path / "log"), tmp_path / "go"
    program = [str(PROGRAMS / "hosts_fit.py"), f"--backup_dir={tmp_path}/backup"]
    program += [f"--log={tmp_path}", f"--epochs={EPOCHS}", "--pause=0.3", f"--go={go}"]
    path = f"{Path(sys.executable).parent}:{slurm.env['PATH']}"
    job = slurm.begin(
        *("--nodes=2", "--no-kill", f"--output={tmp_path}/log", SCRIPT, *program),
        env={"PATH": path, "TFMW_MIN_HOSTS": "1", "TFMW_RESULT": str(tmp_path)},
    )
    log.wait_for("attempt 0 on 127.0.0.1, 127.0.0.2")
    log.wait_for(r"\] step \d+ at")

    # A node is drained: no other job starts there, and this one stays. Its step is killed, starts
    # again, and joins. The node is given back.
    slurm.run("scontrol", "update", f"NodeName={NODES[1]}", "State=DRAIN", "Reason=test")
    steps = slurm.run("squeue", "--steps", "--noheader", f"--job={job}", "--format=%i %N").stdout
    on_node = {node: step for step, node in map(str.split, steps.splitlines())}
    slurm.run("scancel", "--signal=KILL", on_node[NODES[1]])
    log.wait_for(rf"{NODES[1]}(, which leads,)? is lost")
    log.wait_for(f"attempt [12] on {NODES[0]}, {NODES[1]}\n")
    log.wait_for(r"\] step \d+ at")
    slurm.run("scontrol", "update", f"NodeName={NODES[1]}", "State=RESUME")

    # A node goes down: Slurm takes it out of the job, which has --no-kill.
    slurm.run("scontrol", "update", f"NodeName={NODES[1]}", "State=DOWN", "Reason=test")
    log.wait_for(f"attempt [1-4] on {NODES[0]}, without {NODES[1]}")
    log.wait_for(r"\] step \d+ at")
    slurm.run("scontrol", "update", f"NodeName={NODES[1]}", "State=RESUME")
    go.touch()
    assert slurm.wait_for_end(job) == 0, log.text()
    with open(tmp_path / "anew.csv", newline="") as file:
        assert [int(row["epoch"]) for row in csv.DictReader(file)] == list(range(EPOCHS))
