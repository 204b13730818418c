"""A job's controller with tasks that only exist here."""

from __future__ import annotations

import json
import os
from pathlib import Path

from tests.engines.test_job_attempt import FakeTasks
from tfmw.launcher.engines.controller import Controller
from tfmw.launcher.engines.engine import JobSpec
from tfmw.launcher.engines.job import OUTPUT, STATUS
from tfmw.launcher.options import RunOptions
from tfmw.launcher.remote.messages import Setup


def test_a_job_that_is_queued_again_has_the_restarts_that_it_had_left(tmp_path: Path) -> None:
    """The next controller continues in the folder of the one before, as after Slurm's requeue."""
    os.chmod(tmp_path, 0o700)
    tasks = FakeTasks()
    tasks.gone = {0: "SIGKILL"}
    spec = JobSpec(Setup(("call",), RunOptions(max_restarts=1)), (1, 1))
    assert Controller(spec, tasks, tmp_path).run() == "failed"
    before = json.loads((tmp_path / STATUS).read_text())
    assert (before["attempt"], before["restarts"]) == (1, 1)
    assert Controller(spec, tasks, tmp_path).run() == "failed"
    after = json.loads((tmp_path / STATUS).read_text())
    assert (after["attempt"], after["restarts"]) == (2, 1)
    assert (tmp_path / OUTPUT).read_text().count("no restart is left of 1") == 2
