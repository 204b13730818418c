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

A file system without `flock` (Lustre mounted with `noflock`) gets a lease in its place: a file
`LOCK.<number>` which its holder rewrites every few seconds. After a kill the next process watches
it for LEASE_S seconds before it takes over.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import logging
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

logger = logging.getLogger("tfmw")

LEASE_S = 20.0
"""Seconds without a change after which a lease is free."""

NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
"""Errors of a file system without locks, such as Lustre, or NFS without its lock server."""

# errors of CIFS and FUSE, for directories
_NO_FSYNC = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)
_OWNER_ONLY = 0o600
_POLL_S = 0.1
_BEAT_S = 2.0
_RELEASED = b"released"


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
def file_lock(path: str, patience_s: float = 0.0, owner: str = "") -> Iterator[Callable[[], bool]]:
    """Holds the exclusive lock of a file, which it creates.

    Args:
        path: path of the file.
        patience_s: seconds to wait for another process to release it.
        owner: further text that `holder_of` returns about this process.

    Yields:
        A function that returns whether the lock is still held: a process that was stopped may have
        lost a lease.

    Raises:
        BlockingIOError: another process holds it.
        OSError: the file cannot be opened, or it is a link or not a plain file.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    with contextlib.ExitStack() as stack:
        lock = os.open(path, flags, _OWNER_ONLY)
        stack.callback(os.close, lock)
        deadline = time.monotonic() + patience_s
        while (held := _taken(lock, path, stack)) is None:
            if time.monotonic() >= deadline:
                raise BlockingIOError(errno.EWOULDBLOCK, "another process holds the lock", path)
            time.sleep(_POLL_S)
        # The owner's name is only for messages, so a full disk is not an error.
        with contextlib.suppress(OSError):
            os.fchmod(lock, _OWNER_ONLY)  # the file may have existed already
            os.ftruncate(lock, 0)
            process = f"process {os.getpid()} on {socket.gethostname()}"
            os.pwrite(lock, f"{process}{owner and f', {owner}'}\n".encode(), 0)
        yield held


def _taken(lock: int, path: str, stack: contextlib.ExitStack) -> Callable[[], bool] | None:
    """Takes the lock until `stack` is closed; None if another process holds it."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return None
    except OSError as e:
        if e.errno not in NO_LOCKS:
            raise
        return _lease(path, stack)
    return lambda: True


def _lease(path: str, stack: contextlib.ExitStack) -> Callable[[], bool] | None:
    """Takes the lease of a file until `stack` is closed; None if another process holds it.

    The file with the highest number is the lease. Only one process can create the next one, and the
    highest is never removed. So a process that slept after reading the number finds a higher one.
    """
    last = _last_number(path)
    if last and not _is_free(f"{path}.{last}"):
        return None
    own = f"{path}.{last + 1}"
    try:
        os.close(os.open(own, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _OWNER_ONLY))
    except FileExistsError:
        return None

    def is_held() -> bool:
        return _last_number(path) == last + 1

    if not is_held():
        os.unlink(own)
        return None
    with contextlib.suppress(FileNotFoundError):
        os.unlink(f"{path}.{last}")
    ended = threading.Event()

    def keep() -> None:
        beat = 0
        while not ended.wait(_BEAT_S if beat else 0.0):
            beat += 1
            _rewrite(own, b"%d" % beat)

    def release() -> None:
        ended.set()
        thread.join()
        _rewrite(own, _RELEASED)

    thread = threading.Thread(target=keep, name="tfmw-lease", daemon=True)
    thread.start()
    stack.callback(release)
    _warn_of_lease(path)
    return is_held


@functools.cache
def _warn_of_lease(path: str) -> None:
    logger.warning(
        "%s: this file system has no flock, so tfmw renews a lease beside it instead; after a kill "
        "the next run waits for %.0f s before it begins",
        path,
        LEASE_S,
    )


def _last_number(path: str) -> int:
    """The highest number of a lease; 0 if there is none."""
    directory, name = os.path.split(path)
    pattern = re.compile(re.escape(name) + r"\.([1-9]\d*)")
    found = map(pattern.fullmatch, os.listdir(directory or "."))
    return max((int(match[1]) for match in found if match), default=0)


def _is_free(lease: str) -> bool:
    """Whether the lease's holder has released it, or has not renewed it for LEASE_S seconds."""
    deadline = time.monotonic() + LEASE_S
    first = content = _content(lease)
    while time.monotonic() < deadline:
        if content != first or first in (None, _RELEASED):
            return content == _RELEASED
        time.sleep(_POLL_S)
        content = _content(lease)
    return content in (first, _RELEASED)


def _content(lease: str) -> bytes | None:
    try:  # Opened each time, because only then a network file system asks its server.
        return Path(lease).read_bytes()
    except FileNotFoundError:
        return None  # a higher number exists


def _rewrite(lease: str, content: bytes) -> None:
    # a higher number exists, or the file system does not respond
    with contextlib.suppress(OSError):
        descriptor = os.open(lease, os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW)
        try:
            os.write(descriptor, content)
        finally:
            os.close(descriptor)


def holder_of(path: str) -> str:
    """The process that has locked a file, read from the file: "process 7 on host-a"."""
    try:
        with open(path, "rb") as file:
            return file.read(200).decode(errors="replace").strip()
    except OSError:
        return "unknown"
