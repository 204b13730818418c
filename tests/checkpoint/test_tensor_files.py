"""Backups with tables: slices that servers have written, read by them and by one process."""

from __future__ import annotations

import errno
import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.cluster import ONE_THREAD, PROGRAMS, PYTHONPATH
from tests.helpers.local_tables import LocalTables
from tests.helpers.records import reseal
from tfmw.errors import TfmwError, UsageError
from tfmw.train.checkpoint.store import Backup, BackupStore, Damaged, verify
from tfmw.train.checkpoint.tensor_files import FULL_EVERY, TableBackups

WEIGHTS: np.ndarray = np.ones(3, np.float32)
ENVIRON = {**os.environ, **ONE_THREAD, "PYTHONPATH": PYTHONPATH, "TF_CPP_MIN_LOG_LEVEL": "2"}


class Run:
    """Writes backups of a table, as `resume.Backups` does."""

    def __init__(self, folder: Path):
        self.store = BackupStore(folder / "backups")
        self.files = LocalTables()
        self.step = 0
        files: Any = self.files
        self._backups = TableBackups(files)

    def write(self, value: float | None = None) -> Path:
        """The next backup, in which one row has changed since the last."""
        self.step += 1
        self.files.set([self.step % 2], self.step if value is None else value)
        self._backups.write(
            functools.partial(self.store.write, self.step, {"w": WEIGHTS}, {}, None)
        )
        return Path(self.store.path_of(self.step))

    def newest(self) -> Backup:
        found = self.store.newest()
        assert found is not None
        return found


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def is_full(backup: Path) -> bool:
    """Whether it has files of tables that no earlier backup has."""
    return not list(backup.glob("tensors.data-00001-of-*"))


def damage(backup: Path, pattern: str) -> None:
    for file in backup.glob(pattern):
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)


def raising(number: int) -> Callable[..., None]:
    def call(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    return call


def test_backup_of_changed_rows_is_read_as_one_of_all_rows(run):
    run.write()
    full = run.write()
    first = run.newest().tensors()
    np.testing.assert_array_equal(first["table"], run.files.rows)
    changed = run.write()
    assert (is_full(full), is_full(changed)) == (True, False)
    assert (changed / "tables.index").samefile(full / "tables.index")
    found = run.newest().tensors()
    assert sorted(found) == ["table", "w"]
    np.testing.assert_array_equal(found["table"], run.files.rows)
    np.testing.assert_array_equal(found["w"], WEIGHTS)
    assert not np.array_equal(first["table"], found["table"])
    assert verify(run.store.path) == []


def test_all_rows_are_written_at_first_and_every_so_often(run):
    found = [is_full(run.write()) for _ in range(FULL_EVERY + 3)]
    assert found == [True, True, *[False] * (FULL_EVERY - 1), True, False]


def test_all_rows_are_written_where_many_have_changed(run):
    run.write(), run.write()
    run.files.set(list(range(6)), 8.0)
    assert is_full(run.write())
    assert not is_full(run.write()), "these rows have not changed since"


def test_all_rows_are_written_where_files_cannot_be_linked(run, monkeypatch):
    monkeypatch.setattr(os, "link", raising(errno.EPERM))
    assert all(is_full(run.write()) for _ in range(4))
    np.testing.assert_array_equal(run.newest().tensors()["table"], run.files.rows)
    assert not [name for name in os.listdir(run.store.path) if name.startswith(".")]


def test_failed_write_loses_no_change(run, monkeypatch):
    run.write(), run.write()
    run.files.set([10], 9.0)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", raising(errno.ENOSPC))
        with pytest.raises(OSError, match="No space"):
            run.write()
    assert not is_full(run.write())
    np.testing.assert_array_equal(run.newest().tensors()["table"], run.files.rows)


def test_damaged_files_that_backups_share_are_found_and_an_older_one_is_used(run):
    expected = None
    for number in range(5):
        last = run.write()
        if number == 0:
            expected = run.files.rows.copy()
    assert run.store.steps() == [1, 4, 5], "4 and 5 share the files of 2"
    damage(last, "tables.data-*")
    used = run.store.newest_intact(lambda backup: (backup.step, backup.tensors()["table"]))
    assert used is not None
    assert used[0] == 1
    np.testing.assert_array_equal(used[1], expected)


def test_damaged_index_is_found(run):
    for _ in range(3):
        last = run.write()
    damage(last, "tables.index")
    assert run.newest().step == 1, "2 has the same index"


@pytest.mark.parametrize(
    ("pattern", "servers"),
    [
        ("tables.data-00000-of-*", 0),
        ("tables.data-00000-of-*", 1),  # the first file that the server reads, which does not exist
        ("tables.data-00001-of-*", 0),
        ("tensors.data-00001-of-*", 0),
    ],
)
def test_damaged_rows_are_found(run, pattern, servers):
    for _ in range(3):
        last = run.write()
    damage(last, pattern)
    with pytest.raises(Damaged, match="damaged"):
        run.newest().tensors(servers)


def test_server_that_cannot_read_is_named_and_no_backup_is_called_damaged(run):
    """This process has no server: reading on one fails, as after its end or without its disk."""
    run.write()
    with pytest.raises(TfmwError, match=r"parameter server 0 cannot read .* coordinator can") as e:
        run.newest().tensors(servers=1)
    assert not isinstance(e.value, Damaged)


@pytest.mark.parametrize("number", [2, 4])
def test_tables_of_another_format_are_refused(run, number):
    backup = run.write()
    body = json.loads(json.loads((backup / "record.json").read_text())["body"])
    assert body["format"] == 3
    reseal(backup, format=number)
    with pytest.raises(UsageError, match=f"has format {number}, this version reads 3: resume with"):
        run.newest()


def test_missing_slice_is_found(run):
    run.write()
    backup = run.newest()
    backup.layout["table"] = [[0, 8]]
    with pytest.raises(Damaged, match="are not all of its"):
        backup.tensors()


@pytest.mark.nightly
def test_kill_during_a_write_of_changed_rows_leaves_a_complete_backup(tmp_path):
    """The process really ends before each change of the disk."""
    done = subprocess.run(
        [sys.executable, PROGRAMS / "backup_crash.py", tmp_path, "changed"],
        env=ENVIRON,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    points = int(done.stdout)
    assert points > 12
    found = []
    for number in range(points):
        store = BackupStore(tmp_path / str(number))
        with store.locked():
            backup = store.newest()
            assert backup is not None
            assert verify(store.path) == []
            rows = LocalTables()
            if backup.record["value"] == 2:
                rows.set([1, 5], 2.0)
            np.testing.assert_array_equal(backup.tensors()["table"], rows.rows)
            found.append(backup.record["value"])
    assert found == sorted(found)
    assert set(found) == {1, 2}
