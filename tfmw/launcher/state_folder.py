"""A folder in memory for the state of workers, which outlives them and ends with the launcher.

    with state_folder(tell_reaper) as folder: ...    # "/dev/shm/tfmw-..."; "" if there is none

A launcher that is killed, with its reaper, leaves its folder. The next one removes it: a live
launcher has a lock on its own.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

_MEMORY = Path("/dev/shm")  # a file system in memory on every Linux; see shm_overview(7)
_PREFIX = "tfmw-state-"
_NEW_S = 60.0  # age up to which a folder may not be locked yet


@contextlib.contextmanager
def state_folder(tell_reaper: Callable[[str], None], memory: Path = _MEMORY) -> Iterator[str]:
    """Creates the folder, and removes it at the end.

    Args:
        tell_reaper: registers the folder, so that it is removed after a kill of the launcher.
    """
    try:
        _remove_left(memory)
        folder = tempfile.mkdtemp(prefix=_PREFIX, dir=memory)
    except OSError:
        yield ""
        return
    tell_reaper(folder)
    lock = _locked(folder)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def _remove_left(memory: Path) -> None:
    """Removes folders of this user whose launchers are gone."""
    for path in memory.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            found = path.lstat()
            if found.st_uid != os.getuid() or time.time() - found.st_ctime < _NEW_S:
                continue
            if (lock := _locked(str(path))) is not None:
                shutil.rmtree(path, ignore_errors=True)
                os.close(lock)


def _locked(folder: str) -> int | None:
    """A descriptor with the lock of a folder; None if another process has it."""
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        return None
    return file
