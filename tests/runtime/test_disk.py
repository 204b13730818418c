"""Locks of files: one holder, and nobody else who could hold them."""

from __future__ import annotations

import os
import stat
import subprocess
import sys

import pytest

from tfmw.runtime.disk import file_lock, holder_of


def test_another_process_is_refused_while_the_lock_is_held(tmp_path):
    path = str(tmp_path / "LOCK")
    program = """import sys
from tfmw.runtime.disk import file_lock
with file_lock(sys.argv[1]):
    pass
"""
    command = [sys.executable, "-c", program, path]
    with file_lock(path):
        assert holder_of(path).startswith(f"process {os.getpid()} on ")
        refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "BlockingIOError" in refused.stderr
    subprocess.run(command, check=True)


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
