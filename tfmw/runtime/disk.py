"""Local paths, as opposed to URLs, and flushes of files and directories to the disk."""

from __future__ import annotations

import os


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
