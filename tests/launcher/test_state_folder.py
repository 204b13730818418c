"""The folder in memory for the state of workers."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tfmw.launcher import state_folder as module
from tfmw.launcher.state_folder import state_folder


def test_it_is_private_and_ends_with_the_launcher(tmp_path: Path) -> None:
    told: list[str] = []
    with state_folder(told.append, tmp_path) as folder:
        assert told == [folder]
        assert os.stat(folder).st_mode & 0o777 == 0o700
        Path(folder, "0-0-0").write_bytes(b"state")
    assert not list(tmp_path.iterdir())


def test_without_a_file_system_in_memory_there_is_none(tmp_path: Path) -> None:
    told: list[str] = []
    with state_folder(told.append, tmp_path / "missing") as folder:
        assert folder == ""
    assert told == []


def test_the_folder_of_a_killed_launcher_is_removed_and_that_of_a_live_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed = tmp_path / "tfmw-state-killed"
    killed.mkdir()
    (killed / "0-0-0").write_bytes(b"state")
    (tmp_path / "of_another_program").mkdir()
    with state_folder(lambda _: None, tmp_path) as live:
        assert killed.exists(), "its launcher may be about to lock it"
        later = time.time() + 2 * module._NEW_S
        monkeypatch.setattr(time, "time", lambda: later)
        with state_folder(lambda _: None, tmp_path):
            assert not killed.exists()
            assert Path(live).exists()
    assert [path.name for path in tmp_path.iterdir()] == ["of_another_program"]
