"""Open descriptors of this process: those of one test, as other threads open and close others."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def opened() -> list[str]:
    """Paths of open files, and names of sockets, one for each descriptor."""
    found = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed since
            found.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return found


def opened_below(folder: Path) -> list[str]:
    """Paths of open files below a folder, and of the folder itself."""
    return [path for path in opened() if f"{path}/".startswith(f"{folder}/")]
