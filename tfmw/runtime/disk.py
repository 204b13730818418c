"""Local files, as opposed to URLs: flushes, and locks by which one process uses a directory.

    flush("/backups/run7/record.json")               # its bytes are on the disk now
    with file_lock("/backups/run7/LOCK"):            # BlockingIOError if another process holds it
        ...
    holder_of("/backups/run7/LOCK")                  # "process 7 on host-a"

The system releases a `flock` when the process ends for any reason. It works on one machine, and on
network file systems that forward it to the server (NFS since Linux 2.6.12, unless mounted with
`local_lock=flock`).
Only the owner may open the file: a user who can open it could hold the lock and block the run.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import time
from collections.abc import Iterator

_OWNER_ONLY = 0o600
_POLL_S = 0.1


def is_local(path: str) -> bool:
    """Whether a path is not a URL."""
    return "://" not in path


def absolute(path: str) -> str:
    """A path for processes that run in other directories; a URL as it is."""
    return os.path.abspath(path) if is_local(path) else path


def flush(path: str | os.PathLike[str]) -> None:
    """Waits until a local file, or a directory's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def file_lock(path: str, patience_s: float = 0.0, owner: str = "") -> Iterator[None]:
    """Holds the exclusive lock of a file, which it creates.

    Args:
        path: of the file.
        patience_s: seconds to wait for another process to release it.
        owner: what more `holder_of` says of this process.

    Raises:
        BlockingIOError: another process holds it.
        OSError: the file cannot be opened, or it is a link or not a plain file.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    lock = os.open(path, flags, _OWNER_ONLY)
    try:
        deadline = time.monotonic() + patience_s
        while not _is_locked(lock):
            if time.monotonic() >= deadline:
                raise BlockingIOError(errno.EWOULDBLOCK, "another process holds the lock", path)
            time.sleep(_POLL_S)
        # The owner's name is only for messages, so a full disk is not an error.
        with contextlib.suppress(OSError):
            os.fchmod(lock, _OWNER_ONLY)  # the file may have existed already
            os.ftruncate(lock, 0)
            process = f"process {os.getpid()} on {socket.gethostname()}"
            os.pwrite(lock, f"{process}{owner and f', {owner}'}\n".encode(), 0)
        yield
    finally:
        os.close(lock)


def _is_locked(lock: int) -> bool:
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def holder_of(path: str) -> str:
    """The process that has locked a file, from the file: "process 7 on host-a"."""
    try:
        with open(path, "rb") as file:
            return file.read(200).decode(errors="replace").strip()
    except OSError:
        return "unknown"
