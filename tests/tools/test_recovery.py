"""Many real workers on this machine: `bench.recovery`, as it fills its table."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bench import recovery


@pytest.mark.nightly
@pytest.mark.process
def test_48_workers_train_and_resume_when_one_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tfmw", "run", "--workers", "48", "--max-restarts", "1"]
    command += [recovery.__file__, "--train", "tfmw", "--backup_dir", str(tmp_path)]
    found = recovery.measure(command, killed=1, new=1)
    assert 0 < found["detected"] <= found["restarted"] < found["first new step"]
