"""Open files of this process: those of one test, as other threads open and close others."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def opened_below(folder: Path) -> list[str]:
    """Paths of open files below a folder, and of the folder itself, one for each descriptor."""
    found = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed since
            path = os.readlink(f"/proc/self/fd/{descriptor}")
            if f"{path}/".startswith(f"{folder}/"):
                found.append(path)
    return found
