"""Engines whose jobs are processes, and whose files are in a folder: Slurm and local.

    folder = write_job(root, spec, payload)                 # in the submitting process
    control(folder, tasks)                                 # in the controller's process
    FolderJob(engine, number, folder).read("status.json")   # in any process that sees the folder

Only its owner can access the folder, as it holds the job's token, and pickles (`own_files.py`).
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import json
import os
import pickle
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from tfmw.cluster.signals import Signals
from tfmw.errors import UsageError
from tfmw.launcher import call
from tfmw.launcher.call import Payload
from tfmw.launcher.engines import own_files
from tfmw.launcher.engines.agent import CONTACT, PAYLOAD
from tfmw.launcher.engines.controller import Controller
from tfmw.launcher.engines.engine import Contact, Engine, JobSpec, Tasks
from tfmw.launcher.engines.job import Job
from tfmw.launcher.failure import describe_status, tail

SPEC = "spec.pickle"

_END_S = 10.0  # time for processes to end by themselves, and after SIGTERM


class FolderJob(Job):
    """A job with a folder; subclasses add `_state` and `_kill`."""

    def __init__(self, engine: Engine, number: str, folder: Path) -> None:
        super().__init__(engine, number)
        self.folder = folder

    def read(self, name: str, offset: int = 0) -> bytes:
        return own_files.read(self.folder, name, offset)

    def write(self, name: str, data: bytes | memoryview) -> None:
        own_files.write(self.folder / name, data)

    def forget(self) -> None:
        target = self.folder.resolve()
        if self.folder.is_symlink():
            self.folder.unlink()
        shutil.rmtree(target, ignore_errors=True)


@dataclasses.dataclass(frozen=True)
class FolderEngine(Engine):
    """An engine whose jobs have a folder. Subclasses add `_start`, and the class of their jobs.

    Args:
        directory: parent of each job's folder, shared by all of its hosts; by default `.tfmw` in
            the home directory.
    """

    directory: str | os.PathLike[str] | None = None

    _job: ClassVar[type[FolderJob]]

    @abc.abstractmethod
    def _start(self, folder: Path, spec: JobSpec, undo: contextlib.ExitStack) -> str:
        """Starts the controller of the job in a folder; returns the job's number.

        After an error `undo` has to end everything that was started.
        """

    def submit(self, spec: JobSpec, payload: Payload) -> FolderJob:
        with contextlib.ExitStack() as undo:
            try:
                folder = write_job(self.root, spec, payload)
                undo.callback(shutil.rmtree, folder, ignore_errors=True)
                job = self.attach(self._start(folder, spec, undo))
            except OSError as error:
                raise UsageError(
                    f"the job cannot be started from {self.root}: {error}. If this folder cannot "
                    "be used, name another one by directory=, which all hosts of the job share."
                ) from error
            undo.pop_all()
            return job

    def attach(self, number: str) -> FolderJob:
        return self._job(self, number, self.folder(number))

    @property
    def root(self) -> Path:
        """The folder of all jobs of this engine."""
        root = Path(self.directory) if self.directory is not None else Path.home() / ".tfmw"
        return root.absolute() / self.name

    def numbers(self) -> list[str]:
        """Numbers of this user's jobs whose folders are there, the oldest first."""
        folders = [p for p in self.root.glob("*") if own_files.is_own(p) and (p / SPEC).exists()]
        return [p.name for p in sorted(folders, key=lambda p: (p / SPEC).stat().st_mtime)]

    def folder(self, number: str) -> Path:
        """The folder of a job.

        Raises:
            UsageError: it does not exist, or other users may have written to it.
        """
        folder = self.root / number
        if not own_files.read(folder, SPEC):
            raise self.unknown_job(number, f"in {self.root}")
        return folder


def write_job(root: Path, spec: JobSpec, payload: Payload) -> Path:
    """Creates the folder of a job; returns it."""
    folder = root / secrets.token_hex(4)
    folder.mkdir(parents=True, mode=0o700)
    with open(folder / PAYLOAD, "wb", opener=own_files.private) as file:
        call.write(payload, file)
    own_files.write(folder / SPEC, pickle.dumps(spec))
    return folder


def write_contact(folder: Path, contact: Contact) -> None:
    """Writes the controller's addresses and token into the folder, for the tasks."""
    own_files.write(folder / CONTACT, json.dumps(dataclasses.asdict(contact)).encode())


def control(folder: Path, make_tasks: Callable[[Path], Tasks], stop: Signals) -> str:
    """Runs the controller of the job in a folder, in this process; returns its last state."""
    spec: JobSpec = pickle.loads(own_files.read(folder, SPEC))
    return Controller(spec, make_tasks(folder), folder, stop).run()


class FolderTasks(Tasks):
    """Tasks in processes that the controller starts; several may be in one."""

    process_name = ""
    """Name of such a process in reasons, as "srun"; "": it is the task's own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._running: dict[int, tuple[subprocess.Popen[bytes], Path]] = {}  # by rank, with its log

    def run(
        self,
        ranks: Iterable[int],
        command: Sequence[str],
        log: str,
        env: Mapping[str, str] | None = None,
    ) -> None:
        """Starts the process of some tasks, whose own output is in a file of the folder."""
        with open(self.folder / log, "wb") as file:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=env
            )
        self._running |= dict.fromkeys(ranks, (process, self.folder / log))

    def lost(self) -> dict[int, str]:
        who = self.process_name and f"{self.process_name} has ended: "
        return {
            rank: who + " ".join((describe_status(process.returncode), *tail(log, 1)))
            for rank, (process, log) in self._running.items()
            if process.poll() is not None
        }

    def end(self) -> None:
        processes = {process for process, _ in self._running.values()}
        for number in (0, signal.SIGTERM, signal.SIGKILL):
            deadline = time.monotonic() + _END_S
            for process in processes:
                process.send_signal(number)  # does nothing once it has ended
            for process in processes:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, deadline - time.monotonic()))
        self._running = {}
