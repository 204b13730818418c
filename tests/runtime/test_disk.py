"""Local files: locks with one holder, and files that are replaced as a whole."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import subprocess
import sys

import pytest

from tests.helpers.backup_points import lacking
from tests.helpers.open_files import opened_below
from tfmw.errors import UsageError
from tfmw.launcher.hosts.lease import lease_of
from tfmw.storage import disk
from tfmw.storage.disk import file_lock, holder_of
from tfmw.train.checkpoint.store import BackupStore


def test_another_process_is_refused_while_the_lock_is_held(tmp_path):
    path = str(tmp_path / "LOCK")
    program = """import sys
from tfmw.storage.disk import file_lock
with file_lock(sys.argv[1]):
    pass
"""
    command = [sys.executable, "-c", program, path]
    with file_lock(path):
        assert holder_of(path).startswith(f"process {os.getpid()} on ")
        refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "BlockingIOError" in refused.stderr
    subprocess.run(command, check=True)


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    path = tmp_path / "a model[1].keras"
    path.write_text("before")

    def half() -> None:
        with disk.replacing(path) as temporary:
            assert temporary.endswith(".keras")
            with open(temporary, "w") as file:
                file.write("half")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        half()
    assert path.read_text() == "before"
    with disk.replacing(path) as temporary:
        with open(temporary, "w") as file:
            file.write("after")
        assert path.read_text() == "before"
    assert path.read_text() == "after"
    assert os.listdir(tmp_path) == [path.name]


@pytest.mark.parametrize("before", [None, 0o644, 0o666])
def test_only_the_owner_can_open_the_file_and_so_lock_it(tmp_path, before):
    path = tmp_path / "LOCK"
    if before is not None:
        path.touch()
        path.chmod(before)
    umask = os.umask(0)
    try:
        with file_lock(str(path)):
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
    finally:
        os.umask(umask)


def test_a_link_in_its_place_is_not_followed(tmp_path):
    (tmp_path / "other").touch()
    (tmp_path / "LOCK").symlink_to(tmp_path / "other")
    with pytest.raises(OSError, match="symbolic link"), file_lock(str(tmp_path / "LOCK")):
        pass
    assert (tmp_path / "other").read_text() == ""


# ---------------------------------------------------------------- file systems that lack calls


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
def test_a_file_system_without_flock_is_refused(tmp_path, monkeypatch, number):
    monkeypatch.setattr(fcntl, "flock", lacking(number))
    with pytest.raises(OSError, match="has no flock: mount it"), file_lock(str(tmp_path / "LOCK")):
        raise AssertionError("it is not locked")
    with pytest.raises(UsageError, match=r"cannot be locked .* has no flock"):
        BackupStore(tmp_path).locked().__enter__()
    with pytest.raises(UsageError, match=r"cannot agree on a leader .* has no flock"):
        lease_of(f"dir:{tmp_path}", 0)
    assert opened_below(tmp_path) == []


def test_another_error_of_flock_is_raised(tmp_path, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", lacking(errno.EIO))
    with pytest.raises(OSError, match="Input/output"), file_lock(str(tmp_path / "LOCK")):
        pass
    monkeypatch.undo()
    with file_lock(str(tmp_path / "LOCK")):
        pass


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EIO])
def test_only_an_error_of_the_disk_is_raised_by_flush(tmp_path, monkeypatch, number):
    """CIFS and FUSE do not flush directories."""
    monkeypatch.setattr(os, "fsync", lacking(number))
    with contextlib.ExitStack() as stack:
        if number == errno.EIO:
            stack.enter_context(pytest.raises(OSError, match="Input/output"))
        disk.flush(tmp_path)
    assert opened_below(tmp_path) == []
