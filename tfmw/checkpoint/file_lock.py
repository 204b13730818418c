"""Advisory locks on local files: which process uses a directory now.

    with file_lock("/backups/run7/LOCK"):            # BlockingIOError where another process has it
        ...
    holder_of("/backups/run7/LOCK")                  # "process 7 on host-a"

`flock` ends with the process, however that ends. It works on one machine, and on network file
systems that pass it to the server (NFS since Linux 2.6.12, unless mounted with `local_lock=flock`).
Only the owner may open the file: a user who can open it could hold the lock and block the run.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from collections.abc import Iterator

_OWNER_ONLY = 0o600


@contextlib.contextmanager
def file_lock(path: str) -> Iterator[None]:
    """Holds the exclusive lock of a file, which it creates.

    Raises:
        BlockingIOError: another process holds it.
        OSError: the file cannot be opened, or it is a link or no plain file.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    lock = os.open(path, flags, _OWNER_ONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The owner's name is a help for others, so a full disk is no reason to stop.
        with contextlib.suppress(OSError):
            os.fchmod(lock, _OWNER_ONLY)  # of a file that was there already
            os.ftruncate(lock, 0)
            os.pwrite(lock, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        yield
    finally:
        os.close(lock)


def holder_of(path: str) -> str:
    """What the process that locked a file has written into it, such as "process 7 on host-a"."""
    try:
        with open(path, "rb") as file:
            return file.read(200).decode(errors="replace").strip()
    except OSError:
        return "unknown"
