"""A task without a launcher: `tfmw run --hosts`, or in a scheduler's pod. It keeps its own files.

    environ |= keep_files(directory, cluster, command)      # before the task's process begins
    remove_files(environ)                                   # when it ends
    LoneRun(path).ask("status")                             # in another terminal, as of a launcher

The files are what a launcher's task has (progress, exchanges, stacks): a task that hangs is asked
nothing here either.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tfmw.cluster import Cluster
from tfmw.launcher.exchanges import step_rate
from tfmw.launcher.process import Task
from tfmw.launcher.snapshot import Board
from tfmw.runtime.progress import PROGRESS_FILE, Progress, ProgressFile
from tfmw.runtime.recorder import EXCHANGES_FILE, make_file
from tfmw.runtime.signals import STACKS_FILE

OWN_FILES = "TFMW_OWN_FILES"
"""Variable with the directory of these files, <process id>-<run>."""

_ABOUT = "task.json"


def keep_files(directory: Path, cluster: Cluster, command: Sequence[str]) -> dict[str, str]:
    """Makes the files of this process's task; returns the variables that name them.

    Args:
        directory: where this user's runs are found.
        cluster: which task of which cluster this process is.
        command: the arguments of `task.py`.
    """
    pid = os.getpid()
    folder = directory / f"{pid}-{time.strftime('%Y%m%d-%H%M%S')}-{pid}"
    for path in directory.glob("*-*"):
        if path.is_dir():
            LoneRun(path).about()  # forgets those that were killed
    folder.mkdir(mode=0o700)
    task = Task(cluster.task, cluster.index, folder, {})
    task.directory.mkdir()
    ProgressFile(Path(task.env[PROGRESS_FILE])).close()
    make_file(Path(task.env[EXCHANGES_FILE]))
    about = {
        "kind": cluster.task,
        "index": cluster.index,
        "cluster": cluster.as_tf_config().get("cluster"),
        "command": list(command),
        "process": _process(pid),
        "since": time.time(),
    }
    (folder / _ABOUT).write_text(json.dumps(about))
    named = {name: task.env[name] for name in (PROGRESS_FILE, EXCHANGES_FILE, STACKS_FILE)}
    return {**named, OWN_FILES: str(folder)}


def remove_files(environ: Mapping[str, str]) -> None:
    """Removes the files, if this process is the one that keeps them."""
    folder = environ.get(OWN_FILES, "")
    if os.path.basename(folder).startswith(f"{os.getpid()}-"):
        shutil.rmtree(folder, ignore_errors=True)


class LoneRun:
    """The run of a task that keeps its own files.

    Args:
        path: their directory.
    """

    def __init__(self, path: Path) -> None:
        pid, _, self.name = path.name.partition("-")
        self.pid = int(pid)
        self._path = path

    def ask(self, question: str) -> Any:
        """What a launcher replies to "status" or "stacks"; None if the task has ended."""
        about = self.about()
        if about is None:
            return None
        task = _LoneTask(about["kind"], about["index"], self._path, self.pid)
        board = Board(self._path, about["command"])
        board.watch([task], 0, about["cluster"])
        if question == "stacks":
            return board.stacks()
        rate = step_rate(task.exchanges())
        own = {"run": self.name, "pid": self.pid, "since": about["since"], "steps_per_s": rate}
        return board.status() | own

    def about(self) -> dict[str, Any] | None:
        """What the task wrote about itself. The files of one that has ended are removed."""
        try:
            about: dict[str, Any] = json.loads((self._path / _ABOUT).read_text())
        except (OSError, ValueError):
            return None  # it begins, or ends, at this moment
        own, found = _process(os.getpid()), _process(self.pid)
        if found == about["process"]:
            return about
        if own["namespace"] == about["process"]["namespace"]:
            shutil.rmtree(self._path, ignore_errors=True)
        return None


class _LoneTask(Task):
    """The task as another process sees it."""

    def __init__(self, kind: str, index: int, directory: Path, pid: int) -> None:
        super().__init__(kind, index, directory, {})
        self._pid = pid

    @property
    def pid(self) -> int:
        return self._pid

    def progress(self) -> Progress:
        with contextlib.suppress(OSError):
            return Progress.unpacked(Path(self.env[PROGRESS_FILE]).read_bytes())
        return Progress()

    def has_ended(self) -> bool:
        return False  # as of the moment when it was found


def _process(pid: int) -> dict[str, str]:
    """What tells a process from a later one, or one of another container, with its number."""
    try:
        # proc_pid_stat(5): the 22nd field is when it began; the name in brackets may have spaces.
        began = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[19]
        return {"namespace": os.readlink(f"/proc/{pid}/ns/pid"), "began": began}
    except (OSError, IndexError):
        return {"namespace": "", "began": ""}
