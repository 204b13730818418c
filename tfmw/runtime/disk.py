"""Flushes of files and directories to the disk."""

from __future__ import annotations

import os


def flush(path: str | os.PathLike[str]) -> None:
    """Waits until a local file, or a directory's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
