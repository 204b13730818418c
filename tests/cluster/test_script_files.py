"""Files that a script makes, although each task runs it: as if one process ran it."""

from __future__ import annotations

import zipfile
from typing import Any

import pytest

from tests.helpers.cluster import run_cluster
from tests.helpers.events import running_server

FILES = ["a.txt", "b.txt", "c.txt", "d.txt"]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Results of both tasks, by kind."""
    folder = tmp_path_factory.mktemp("script_files")
    for name in ("old_logs", "archive", "validation"):
        (folder / name).mkdir()
    (folder / "old_logs" / "old").touch()
    (folder / "history.csv").touch()
    for name in FILES:
        (folder / "archive" / name).touch()
    with zipfile.ZipFile(folder / "files.zip", "w") as archive:
        for name in FILES:
            archive.writestr(name, name)
    with running_server() as server:
        return run_cluster("script_files.py", server.address, str(folder)), folder


EXPECTED = {
    "asked_for": ["a.txt"],
    "removed_by_both": ["worker_0", "worker_1"],
    "removed_if_there": ["worker_0", "worker_1"],
    "file_removed": False,
    "used_for_a_while": [False] * 3,
    "extracted": ["a.txt", "c.txt", "d.txt"],
    "moved": [FILES[2:], FILES[:2]],
    "moved_its_own": True,
    "written_with_a_lock": True,
    "directory_alone": True,
    "made_by_another": True,
    "asked_in_callbacks": [2, 2],
    "exported": True,
}


@pytest.mark.process
@pytest.mark.parametrize("kind", EXPECTED)
def test_both_tasks_find_what_one_process_finds(results, kind):
    run, _ = results
    assert [task[kind] for task in run] == [EXPECTED[kind]] * 2


@pytest.mark.process
def test_a_copy_has_its_path(results):
    run, folder = results
    assert [task["copied"] for task in run] == [[str(folder / "copy"), FILES]] * 2
