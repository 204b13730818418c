"""Checks of shared directories: the chief writes a marker file, other tasks look for it.

    with markers({"--backup_dir": "/shared"}) as (names, problems): ...       # on the chief
    problem = find_marker("--backup_dir", "/shared", name, "worker 0", 10.0)   # on other tasks

A directory that does not exist is created, and removed afterwards. URLs are places in buckets.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from tfmw.errors import UsageError
from tfmw.storage.bucket import Bucket
from tfmw.storage.disk import is_local

_RETRY_S = 0.1


@contextlib.contextmanager
def markers(directories: Mapping[str, str]) -> Iterator[tuple[dict[str, str | None], list[str]]]:
    """Keeps a marker file in each directory while the body runs.

    Args:
        directories: option -> directory.

    Yields:
        (option -> name of the file, or None if it cannot be written; one clause for each such
        directory).
    """
    with contextlib.ExitStack() as stack:
        names: dict[str, str | None] = {}
        problems = []
        for option, path in directories.items():
            names[option] = None
            try:
                marker = _local_marker if is_local(path) else _remote_marker
                name = f".tfmw-check-{secrets.token_hex(8)}"
                names[option] = stack.enter_context(marker(path, name))
            except (OSError, UsageError) as error:
                reason = getattr(error, "strerror", None) or str(error)
                problems.append(
                    f"{option} {path} cannot be written ({reason}): make it, give this user the "
                    "right to write there, or name another one"
                )
        yield names, problems


def find_marker(option: str, path: str, name: str, chief: str, patience_s: float) -> str | None:
    """Looks for the chief's marker file, for `patience_s` seconds: NFS caches listings.

    Returns:
        None, or one clause if the directory is another one.
    """
    deadline = time.monotonic() + patience_s
    while _read(os.path.join(path, name)) != name:
        if time.monotonic() > deadline:
            return (
                f"{option} {path} is not the same here as on {chief}: mount one file system there "
                "on all machines (NFS, Lustre), or name a place in a bucket"
            )
        time.sleep(_RETRY_S)
    return None


@contextlib.contextmanager
def _local_marker(path: str, name: str) -> Iterator[str]:
    whole = Path(os.path.abspath(path))
    missing = [directory for directory in (whole, *whole.parents) if not directory.exists()]
    os.makedirs(path, exist_ok=True)
    try:
        with open(os.path.join(path, name), "x") as file:
            file.write(name)
            file.flush()
            os.fsync(file.fileno())
        yield name
    finally:
        with contextlib.suppress(OSError):
            os.remove(os.path.join(path, name))
        for directory in missing:
            with contextlib.suppress(OSError):
                os.rmdir(directory)


@contextlib.contextmanager
def _remote_marker(path: str, name: str) -> Iterator[str]:
    bucket = Bucket(path, quick=True)
    bucket.replace(name, name.encode(), None)
    try:
        yield name
    finally:
        with contextlib.suppress(OSError):
            bucket.remove([name])


def _read(path: str) -> str | None:
    try:
        if is_local(path):
            return Path(path).read_text()
        folder, _, name = path.rpartition("/")
        found = Bucket(folder, quick=True).read(name)
        return found[0].decode() if found is not None else None
    except (OSError, UsageError):
        return None
