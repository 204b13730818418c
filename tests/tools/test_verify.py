"""`tfmw check PATH`: row 32, an export (or a backup) that is damaged later is found."""

from __future__ import annotations

import shutil
from pathlib import Path

import keras
import numpy as np
import pytest

from tests.helpers.cases import each
from tests.helpers.cluster import run_command
from tfmw.cli.reports import problems_of
from tfmw.train.checkpoint.store import BackupStore
from tfmw.train.saved_model import export


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    export(keras.Sequential([keras.Input([3]), keras.layers.Dense(1)]), path)
    return path


@pytest.fixture
def backups(tmp_path: Path) -> Path:
    path = tmp_path / "backups"
    store = BackupStore(path)
    with store.locked():
        for step in (1, 2):
            store.write(step, {"weights": np.arange(100, dtype=np.float32)}, {"epoch": step})
    return path


def flip_a_bit(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def test_intact_directories_are_reported(exported: Path, backups: Path) -> None:
    assert problems_of(str(exported)) == []
    assert problems_of(str(backups)) == []
    assert problems_of(str(backups / "step_000000000002")) == []


def test_backups_of_each_call_of_model_fit_are_checked(tmp_path: Path, backups: Path) -> None:
    """A directory of `tfmw run --backup-dir` has a folder of each call."""
    calls = [tmp_path / "run7" / f"fit-927caa9cda42-{n}" for n in (1, 2)]
    for call in calls:
        shutil.copytree(backups, call)
    assert problems_of(str(tmp_path / "run7")) == []
    flip_a_bit(calls[1] / "step_000000000001" / "record.json")
    (problem,) = problems_of(str(tmp_path / "run7"))
    assert "fit-927caa9cda42-2/step_000000000001" in problem


def test_row_32_every_damaged_file_of_an_export_is_found(exported: Path) -> None:
    files = [f for f in exported.rglob("*") if f.is_file() and f.stat().st_size]
    assert len(files) >= 4
    for file in files:
        whole = file.read_bytes()
        flip_a_bit(file)
        assert problems_of(str(exported)), f"a flipped bit in {file.name} was not found"
        file.write_bytes(whole)
    assert problems_of(str(exported)) == []


def test_every_damaged_file_of_a_backup_is_found(backups: Path) -> None:
    for file in each((backups / "step_000000000001").iterdir()):
        whole = file.read_bytes()
        flip_a_bit(file)
        assert any("step_000000000001" in p for p in problems_of(str(backups))), file.name
        file.write_bytes(whole)


def test_other_directories_are_not_called_intact(tmp_path: Path) -> None:
    assert problems_of(str(tmp_path)) == [
        f"not known: {tmp_path} contains neither an export of tfmw nor a backup."
    ]
    gone = str(tmp_path / "gone")
    assert problems_of(gone) == [f"not found: {gone}: expected a backup_dir or an export_dir."]


@pytest.mark.process
def test_the_command_ends_with_1_where_something_is_damaged(exported: Path, backups: Path) -> None:
    flip_a_bit(backups / "step_000000000002" / "record.json")
    status, output = run_command("tfmw", "check", exported, backups)
    assert status == 1
    lines = output.splitlines()
    assert lines[0] == f"intact: {exported}"
    assert lines[1].startswith("damaged: ")
    assert "step_000000000002" in lines[1]
