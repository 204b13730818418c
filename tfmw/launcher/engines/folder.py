"""Engines whose controller is a process and whose files are in a folder: Slurm and local.

    folder = write_job(root / "3fa9c2", spec, payload)     # in the submitting process
    control(folder, tasks)                                 # in the controller's process
    FolderJob(engine, number, folder).read("status.json")   # in any process that sees the folder

Only its owner can access the folder, as it holds the job's token, and pickles (`own_files.py`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pickle
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from tfmw.cluster.signals import Signals
from tfmw.errors import UsageError
from tfmw.launcher import call
from tfmw.launcher.call import Payload
from tfmw.launcher.engines import own_files
from tfmw.launcher.engines.agent import CONTACT, PAYLOAD
from tfmw.launcher.engines.controller import Controller
from tfmw.launcher.engines.engine import Contact, Engine, JobSpec, Tasks
from tfmw.launcher.engines.job import Job

SPEC = "spec.pickle"


@dataclasses.dataclass(frozen=True)
class FolderEngine(Engine):
    """An engine whose jobs have a folder.

    Args:
        directory: parent of each job's folder, shared by all of its hosts; by default `.tfmw` in
            the home directory.
    """

    directory: str | os.PathLike[str] | None = None

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
    """Creates the folder of a job; returns it.

    Raises:
        UsageError: it cannot be written.
    """
    folder = root / secrets.token_hex(4)
    try:
        folder.mkdir(parents=True, mode=0o700)
        with open(folder / PAYLOAD, "wb", opener=own_files.private) as file:
            call.write(payload, file)
        own_files.write(folder / SPEC, pickle.dumps(spec))
    except OSError as error:
        raise UsageError(
            f"the job's folder {folder} cannot be written ({error.strerror}): name another one "
            "by directory=, which all hosts of the job share."
        ) from error
    return folder


@contextlib.contextmanager
def submitting(folder: Path) -> Iterator[contextlib.ExitStack]:
    """Removes a job's folder after an error.

    Yields:
        A stack of callbacks that end the started parts of the job after an error.

    Raises:
        UsageError: a file cannot be written, or a process cannot be started.
    """
    with contextlib.ExitStack() as undo:
        undo.callback(shutil.rmtree, folder, ignore_errors=True)
        try:
            yield undo
        except OSError as error:
            raise UsageError(f"the job cannot be started from {folder.parent}: {error}.") from error
        undo.pop_all()


def write_contact(folder: Path, contact: Contact) -> None:
    """Writes the controller's addresses and token into the folder, for the tasks."""
    own_files.write(folder / CONTACT, json.dumps(dataclasses.asdict(contact)).encode())


def control(folder: Path, make_tasks: Callable[[Path], Tasks]) -> str:
    """Runs the controller of the job in a folder, in this process; returns its last state."""
    spec: JobSpec = pickle.loads(own_files.read(folder, SPEC))
    with Signals() as stop:
        return Controller(spec, make_tasks(folder), folder, stop).run()


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
