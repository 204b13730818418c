"""Files that another user may have written into a job's folder: never unpickled or executed."""

from __future__ import annotations

import os
import pickle
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

import tfmw
from tfmw.cluster.signals import Signals
from tfmw.engines import Local
from tfmw.errors import UsageError
from tfmw.launcher.engines import agent, own_files
from tfmw.launcher.engines.agent import CONTACT, PAYLOAD
from tfmw.launcher.engines.engine import Contact, JobSpec
from tfmw.launcher.engines.folder import SPEC, control, write_contact, write_job
from tfmw.launcher.engines.job import BACKUP, RESULT, STATUS, Job
from tfmw.launcher.engines.local_jobs import LocalJob, LocalTasks
from tfmw.launcher.options import RunOptions
from tfmw.launcher.remote.messages import Setup

OTHER = 54321  # a user without an account


class Trap:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return os.mkdir, (self.path,)


@pytest.fixture
def trap(tmp_path: Path) -> Path:
    return tmp_path / "sprung"


@pytest.fixture
def folder(tmp_path: Path, trap: Path) -> Path:
    """Folder of a job that has ended, in which every pickle is a trap."""
    spec = JobSpec(Setup(("call",), RunOptions()), (1, 1), facts={})
    folder = write_job(tmp_path / "local", spec, ())
    write_contact(folder, Contact(("127.0.0.1",), 1, "token", 0))
    for name in (SPEC, RESULT, PAYLOAD, BACKUP):
        own_files.write(folder / name, pickle.dumps(Trap(trap)))
    own_files.write(folder / STATUS, b'{"state": "done"}')
    own_files.write(folder / "pid", b"1")
    return folder


READERS: dict[str, Callable[[Path], object]] = {
    SPEC: lambda folder: control(folder, LocalTasks, Signals()),
    RESULT: lambda folder: job_of(folder).result(1),
    STATUS: lambda folder: job_of(folder).status(),
    BACKUP: lambda folder: job_of(folder).backup(),
    CONTACT: lambda folder: agent.main(folder, 0, None),
}


def job_of(folder: Path) -> Job:
    return LocalJob(Local(directory=folder.parent.parent), folder.name, folder)


def attach(folder: Path) -> Job:
    return tfmw.attach(f"local:{folder.name}", on=Local(directory=folder.parent.parent))


def give_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() == 0:
        os.chown(path, OTHER, OTHER)
    else:  # files cannot be given away, so this process becomes another user
        monkeypatch.setattr(os, "geteuid", lambda: OTHER)


def test_the_traps_work(folder: Path, trap: Path) -> None:
    assert attach(folder).status() == "done"
    with pytest.raises(TypeError):  # mkdir returns no result
        job_of(folder).result(1)
    assert trap.exists()


def test_folder_of_another_user_is_refused(
    folder: Path, trap: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_away(folder, monkeypatch)
    assert Local(directory=folder.parent.parent).numbers() == []
    for reader in (attach, *READERS.values()):
        with pytest.raises(
            UsageError, match=rf"{folder} is of user \d+, and you are user \d+: job"
        ):
            reader(folder)
    assert not trap.exists()


def test_folder_that_others_can_write_to_is_refused(folder: Path, trap: Path) -> None:
    for mode in (0o770, 0o707):
        folder.chmod(mode)
        assert Local(directory=folder.parent.parent).numbers() == []
        for reader in (attach, *READERS.values()):
            with pytest.raises(UsageError, match=rf"can be written by others \(mode {mode:o}\)"):
                reader(folder)
    assert not trap.exists()


@pytest.mark.parametrize("name", READERS)
def test_file_of_another_user_is_refused(
    folder: Path, trap: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_away(folder / name, monkeypatch)
    with pytest.raises(UsageError, match=r" is of user \d+, and you are user"):
        READERS[name](folder)
    assert not trap.exists()


def test_links_and_pipes_are_refused(folder: Path, trap: Path, tmp_path: Path) -> None:
    """A link may lead to a file of another user; opening a pipe waits."""
    elsewhere = tmp_path / "elsewhere"
    (folder / RESULT).rename(elsewhere)
    (folder / RESULT).symlink_to(elsewhere)
    with pytest.raises(UsageError, match=r"result\.pickle cannot be opened"):
        job_of(folder).result(1)
    (folder / RESULT).unlink()
    os.mkfifo(folder / RESULT, 0o600)
    with pytest.raises(UsageError, match=r"result\.pickle is no regular file"):
        job_of(folder).result(1)
    assert not trap.exists()


def test_what_a_job_writes_is_its_users_only(tmp_path: Path) -> None:
    """The files are private under any umask: many systems have 002, for groups of one user."""
    before = os.umask(0)
    try:
        spec = JobSpec(Setup(("call",), RunOptions()), (1, 1), facts={})
        folder = write_job(tmp_path / "local", spec, ())
        own_files.append(folder / "output.log").close()
    finally:
        os.umask(before)
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in (folder, *folder.iterdir())}
    assert modes.pop(folder) == 0o700
    assert set(modes.values()) == {0o600}
