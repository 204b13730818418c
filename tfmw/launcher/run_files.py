"""The runs of this user that are alive, as files: what `tfmw status` and `tfmw stacks` read.

    with published(status): ...                    # in the launcher, as long as the run is alive
    environ |= keep_files(cluster, command)        # a task without a launcher, before it begins
    found = runs()                                 # in another terminal: [RunStatus(...), ...]
    found[0].status()

Each run has a folder, <process id>-<run>, in a directory of the user alone (mode 0700). `run.json`
describes it; the tasks' own files are where that says. A task without a launcher has its files
beside it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tfmw.cluster import Cluster
from tfmw.errors import UsageError
from tfmw.launcher.process import TaskFiles
from tfmw.launcher.run_status import RunStatus
from tfmw.storage.disk import replacing

RUNTIME_DIRECTORY = "TFMW_RUNTIME_DIR"
"""Variable: another directory for the folders."""

OWN_FILES = "TFMW_OWN_FILES"
"""Variable with the folder of a task without a launcher."""

_RUN = "run.json"


def directory(make: bool = False) -> Path:
    """The directory of this user's runs.

    Args:
        make: whether to create it.

    Raises:
        UsageError: it belongs to somebody else, or others may use it.
    """
    chosen = os.environ.get(RUNTIME_DIRECTORY)
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if chosen:
        path = Path(chosen)
    elif os.path.isdir(runtime) and os.access(runtime, os.W_OK):
        path = Path(runtime, "tfmw")
    else:
        path = Path(f"/tmp/tfmw-{os.getuid()}")
    if make:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    with contextlib.suppress(FileNotFoundError):
        found = os.lstat(path)
        alone = found.st_uid == os.getuid() and not stat.S_IMODE(found.st_mode) & 0o077
        if not (stat.S_ISDIR(found.st_mode) and alone):
            raise UsageError(
                f"{path} is not a directory of this user alone: remove it, or name another one in "
                f"{RUNTIME_DIRECTORY}."
            )
    return path


@contextlib.contextmanager
def published(status: RunStatus) -> Iterator[None]:
    """Lets other processes of this user read the state of a run, inside a `with`."""
    with contextlib.suppress(OSError, UsageError):  # it runs without `tfmw status` then
        status.published_in = _new_folder(status.name)
    try:
        update(status)
        yield
    finally:
        if status.published_in is not None:
            shutil.rmtree(status.published_in, ignore_errors=True)


def update(status: RunStatus) -> None:
    """Writes what has changed: another attempt, or a task that was started again."""
    if status.published_in is not None:
        with contextlib.suppress(OSError):
            _write(status.published_in, status)


def keep_files(cluster: Cluster, command: Sequence[str]) -> dict[str, str]:
    """Makes the files of this process's task; returns the variables that name them.

    Args:
        cluster: which task of which cluster this process is.
        command: the arguments of `task.py`.

    Raises:
        OSError, UsageError: they cannot be made.
    """
    folder = _new_folder(f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}")
    task = TaskFiles(cluster.task, cluster.index, folder, pid=os.getpid())
    task.make()
    addresses = cluster.as_tf_config().get("cluster") or {}
    _write(folder, RunStatus(folder, command, cluster=addresses, tasks=[task]))
    return {**{name: str(path) for name, path in task.files.items()}, OWN_FILES: str(folder)}


def remove_files(environ: Mapping[str, str]) -> None:
    """Removes the files, if this process is the one that keeps them."""
    folder = environ.get(OWN_FILES, "")
    if os.path.basename(folder).startswith(f"{os.getpid()}-"):
        shutil.rmtree(folder, ignore_errors=True)


def runs() -> list[RunStatus]:
    """The runs of this user, oldest first. The folders of those that were killed are removed.

    Raises:
        UsageError: as in `directory`.
    """
    found = []
    for path in directory().glob("*-*"):
        # It begins, or ends, just now; or a version of tfmw wrote it that describes runs otherwise.
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            described = json.loads((path / _RUN).read_text())
            own, process = _process(os.getpid()), _process(described["pid"])
            if process == described["process"]:
                found.append(RunStatus.of(described))
            elif own["namespace"] == described["process"]["namespace"]:
                shutil.rmtree(path, ignore_errors=True)
    return sorted(found, key=lambda status: status.since)


def _new_folder(name: str) -> Path:
    folder = directory(make=True) / f"{os.getpid()}-{name}"
    runs()  # forgets those that were killed
    folder.mkdir(mode=0o700)
    return folder


def _write(folder: Path, status: RunStatus) -> None:
    text = json.dumps({**status.described(), "process": _process(status.pid)})
    with replacing(folder / _RUN) as temporary:
        Path(temporary).write_text(text)


def _process(pid: int) -> dict[str, Any]:
    """The mark that tells a process from another one with its number, later or in a container."""
    try:
        # proc_pid_stat(5): the 22nd field is when it began; the name in brackets may have spaces.
        began = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[19]
        return {"namespace": os.readlink(f"/proc/{pid}/ns/pid"), "began": began}
    except (OSError, IndexError):
        return {"namespace": "", "began": ""}
