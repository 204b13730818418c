"""Backups of each format that is read, in `stored/FORMAT`.

`programs/stored_backup.py 1 DIR` has written them, with two servers if they have tables.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tfmw.train.checkpoint.store import verify

STORED = Path(__file__).with_name("stored")
WITH_TABLES = "3-with-tables"


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A copy, as a training that resumes writes into the directory."""
    return shutil.copytree(STORED, tmp_path / "stored")


@pytest.mark.parametrize("name", ["3", WITH_TABLES])
def test_it_is_of_that_format_and_intact(name):
    (record,) = STORED.glob(f"{name}/step_*/record.json")
    body = json.loads(json.loads(record.read_text())["body"])
    assert str(body["format"]) == name[0]
    assert bool(body["tables"]) == ("tables" in name)
    assert verify(STORED / name) == []


@pytest.mark.process
def test_one_process_resumes(run_cluster, copied):
    run = run_cluster("stored_backup.py", "2", str(copied / "3"), workers=1)
    assert run[0]["began_at"] == [5]
    assert run[0]["off_by"][0] < 1e-6


@pytest.mark.process
@pytest.mark.nightly
def test_parameter_servers_resume(run_cluster, copied):
    run = run_cluster("stored_backup.py", "2", str(copied / WITH_TABLES), workers=1, ps=1)
    assert run.chief["began_at"] == [5]
    assert max(run.chief["off_by"]) < 1e-6
