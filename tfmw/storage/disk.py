"""Local files, as opposed to URLs: flushes, whole replacements, and locks of directories.

    flush("/backups/run7/record.json")               # its bytes are on the disk now
    with replacing("/backups/run7/record.json") as temporary: ...    # it appears whole, or not
    with file_lock("/backups/run7/LOCK"):            # BlockingIOError if another process holds it
        ...
    holder_of("/backups/run7/LOCK")                  # "process 7 on host-a"

The system releases a `flock` when the process ends for any reason. It works on one machine, and on
network file systems that forward it to the server (NFS since Linux 2.6.12, unless mounted with
`local_lock=flock`).
Only the owner may open the file: a user who can open it could hold the lock and block the run.
A file system without `flock` (Lustre mounted with `noflock`) is refused.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import socket
import time
from collections.abc import Iterator

NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
"""Errors of a file system without locks, such as Lustre, or NFS without its lock server."""

# errors of CIFS and FUSE, for directories
_NO_FSYNC = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)
_OWNER_ONLY = 0o600
_POLL_S = 0.1


def is_local(path: str) -> bool:
    """Whether a path is not a URL."""
    return "://" not in path


def without_scheme(path: str) -> str:
    """A local path for "file:///path"; others as they are."""
    return path.removeprefix("file://")


def absolute(path: str) -> str:
    """Path for processes that run in other directories; a URL stays as it is."""
    return os.path.abspath(path) if is_local(path) else path


def flush(path: str | os.PathLike[str]) -> None:
    """Waits until a local file, or a directory's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as e:
        if e.errno not in _NO_FSYNC:
            raise
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[str]:
    """Yields the name of a file to write; at the end it replaces `path`, which others may read.

    After an error `path` is unchanged. The name has the ending of `path`, in the same directory.
    """
    directory, name = os.path.split(os.fspath(path))
    temporary = os.path.join(directory, f".{secrets.token_hex(6)}.{name}")
    try:
        yield temporary
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


@contextlib.contextmanager
def file_lock(path: str, patience_s: float = 0.0, owner: str = "") -> Iterator[None]:
    """Holds the exclusive lock of a file, which it creates.

    Args:
        path: path of the file.
        patience_s: seconds to wait for another process to release it.
        owner: further text that `holder_of` returns about this process.

    Raises:
        BlockingIOError: another process holds it.
        OSError: the file cannot be opened, it is a link or not a plain file, or its file system has
            no locks.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    lock = os.open(path, flags, _OWNER_ONLY)
    try:
        deadline = time.monotonic() + patience_s
        while not _try_lock(lock):
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


def _try_lock(lock: int) -> bool:
    """Tries to take the lock; returns False if another process holds it."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as e:
        if e.errno not in NO_LOCKS:
            raise
        raise OSError(
            e.errno, "its file system has no flock: mount it with flock, or use another or a bucket"
        ) from e
    return True


def holder_of(path: str) -> str:
    """The process that has locked a file, read from the file: "process 7 on host-a"."""
    try:
        with open(path, "rb") as file:
            return file.read(200).decode(errors="replace").strip()
    except OSError:
        return "unknown"
