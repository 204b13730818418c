"""Files of this user's live runs, which `tfmw status` and `tfmw stacks` read.

    with published(status): ...                    # in the launcher, while the run is alive
    environ |= keep_files(cluster, command)        # a task without a launcher, before it begins
    found = runs()                                 # in another terminal: [RunStatus(...), ...]
    found[0].status()

Each run has a folder, <process id>-<run>, in a private directory of the user (mode 0700).
`run.json` describes the run, and has the paths of the tasks' own files. A task without a launcher
has its files in the same folder.
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
"""Variable with another directory for the folders."""

OWN_FILES = "TFMW_OWN_FILES"
"""Variable with the folder of a task without a launcher."""

_RUN = "run.json"


def directory(make: bool = False) -> Path:
    """The directory of this user's runs.

    Args:
        make: whether to create it.

    Raises:
        UsageError: another user owns it, or others may access it.
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
    with contextlib.suppress(OSError, UsageError):  # in this case it runs without `tfmw status`
        status.published_in = _new_folder(status.name)
    try:
        update(status)
        yield
    finally:
        if status.published_in is not None:
            shutil.rmtree(status.published_in, ignore_errors=True)


def update(status: RunStatus) -> None:
    """Writes changes of the status: another attempt, or a task that was started again."""
    if status.published_in is not None:
        with contextlib.suppress(OSError):
            _write(status.published_in, status)


def keep_files(cluster: Cluster, command: Sequence[str]) -> dict[str, str]:
    """Creates the files of this process's task; returns the variables with their paths.

    Args:
        cluster: cluster and task of this process.
        command: the arguments of `task.py`.

    Raises:
        OSError, UsageError: they cannot be created.
    """
    folder = _new_folder(f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}")
    task = TaskFiles(cluster.task, cluster.index, folder, pid=os.getpid())
    task.make()
    addresses = cluster.as_tf_config().get("cluster") or {}
    _write(folder, RunStatus(folder, command, cluster=addresses, tasks=[task]))
    return {**{name: str(path) for name, path in task.files.items()}, OWN_FILES: str(folder)}


def remove_files(environ: Mapping[str, str]) -> None:
    """Removes the files, if this process created them."""
    folder = environ.get(OWN_FILES, "")
    if os.path.basename(folder).startswith(f"{os.getpid()}-"):
        shutil.rmtree(folder, ignore_errors=True)


def runs() -> list[RunStatus]:
    """The runs of this user, oldest first. Removes the folders of killed runs.

    Raises:
        UsageError: see `directory`.
    """
    found = []
    for path in directory().glob("*-*"):
        # The run begins or ends just now, or another version of tfmw describes runs differently.
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
    runs()  # removes those that were killed
    folder.mkdir(mode=0o700)
    return folder


def _write(folder: Path, status: RunStatus) -> None:
    text = json.dumps({**status.described(), "process": _process(status.pid)})
    with replacing(folder / _RUN) as temporary:
        Path(temporary).write_text(text)


def _process(pid: int) -> dict[str, Any]:
    """Identity of a process, which a later process or one in a container with its id lacks."""
    try:
        # proc_pid_stat(5): the 22nd field is the start time; the name in brackets may have spaces
        began = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[19]
        return {"namespace": os.readlink(f"/proc/{pid}/ns/pid"), "began": began}
    except (OSError, IndexError):
        return {"namespace": "", "began": ""}
