"""The memory that this process may use: the machine's, or less in a container."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

# The file with the limit of a control group, by the type of its file system: cgroups(7). "max", or
# in version 1 a number above all memory, is no limit.
_LIMITS = {"cgroup2": "memory.max", "cgroup": "memory.limit_in_bytes"}


def usable_bytes(proc: Path = Path("/proc/self")) -> int:
    """The least of the machine's memory and the limits of all control groups of the process."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([machine, *_limits(proc)])


def _limits(proc: Path) -> Iterator[int]:
    """The limits of the process's control groups; each group lies within the next one."""
    with contextlib.suppress(OSError):
        # "4:memory:/docker/4f1c", or "0::/user.slice" for all controllers of version 2.
        groups = [line.split(":", 2)[1:] for line in (proc / "cgroup").read_text().splitlines()]
        for line in (proc / "mountinfo").read_text().splitlines():
            # Format of proc_pid_mountinfo(5): "31 23 0:28 / /sys/fs/cgroup rw - TYPE SOURCE
            # OPTIONS", with TYPE cgroup2.
            mount, _, system = line.partition(" - ")
            kind, _, options = system.split(" ", 2)
            if kind not in _LIMITS or (kind == "cgroup" and "memory" not in options.split(",")):
                continue
            root, mounted_at = mount.split(" ")[3:5]
            for controllers, group in groups:
                if ("memory" in controllers.split(",")) if kind == "cgroup" else not controllers:
                    yield from _limits_above(group, root, Path(mounted_at), _LIMITS[kind])


def _limits_above(group: str, root: str, mounted_at: Path, name: str) -> Iterator[int]:
    """The limits of a group, and of those around it up to the root of the mount."""
    try:
        inner = PurePosixPath(group).relative_to(root)
    except ValueError:  # a container that sees only its own group, as the root
        inner = PurePosixPath()
    for path in (inner, *inner.parents):
        with contextlib.suppress(OSError, ValueError):
            yield int((mounted_at / path / name).read_text())
