"""The files of backups, in a local directory or in a bucket.

    files = files_of("/shared/run7")                  # or "s3://bucket/run7"
    with files.locked():                              # one run at a time
        begun = files.begin(1200)
        with files.writing(1200, begun) as directory: ...      # fill it; then it is the backup
    files.local(1200)                                 # a directory to read it from

In a directory, a backup appears by a rename. In a bucket, the object `backups.json` lists the
backups and their files: the write of this small object makes a backup complete, or removes it. The
same object is the run's lock (`tfmw.storage.leased_object`). So a run that was paused while another
one took over can change nothing that the other one relies on. The files are objects in
`data/step_<n>-<random>/`, written once. Those that `backups.json` does not list are leftovers of a
kill, which the next run removes.

Files for a bucket are written into a temporary directory first (TMPDIR), and read from there.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import shutil
import stat
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any

from tfmw.cluster import shared_directories
from tfmw.cluster.group import Group
from tfmw.data.bucket_files import BucketFile
from tfmw.errors import TfmwError, UsageError
from tfmw.storage import directories, disk, fence
from tfmw.storage.bucket import Bucket, is_bucket
from tfmw.storage.leased_object import BEAT_S, LeasedObject, Lost

logger = logging.getLogger("tfmw")

NAME = re.compile(r"step_(\d{12})")

_POLL_S = 0.5
_LIST = "backups.json"
_DATA = "data"
_OWN_NAME = re.compile(r"[\w.-]+")  # of a file or a directory of a backup, never a path


def files_of(path: str) -> LocalFiles | BucketFiles:
    """The files of a directory of backups.

    Raises:
        UsageError: a URL of another kind.
    """
    path = disk.without_scheme(path)
    if is_bucket(path):
        return BucketFiles(path)
    if not disk.is_local(path):
        raise UsageError(
            f"received the backup directory {path!r}; expected a local directory, or s3://, gs:// "
            "or az://."
        )
    return LocalFiles(path)


def _name_of(step: int) -> str:
    return f"step_{step:012d}"


class LocalFiles:
    """Backups in a local directory, each in one of its own.

    Args:
        path: of the directory.
    """

    def __init__(self, path: str):
        self.path = path

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Locks the directory for this run, and removes incomplete writes of killed runs.

        The lock is on the file `LOCK`, see `disk.file_lock`.

        Raises:
            UsageError: another process holds the lock, or it cannot be taken.
        """
        with directories.locked(self.path, "LOCK"):
            directories.clean_up(self.path, NAME)
            yield

    def steps(self) -> list[int]:
        """Steps of all backups, complete or not, in order."""
        if not os.path.exists(self.path):
            return []
        found = map(NAME.fullmatch, os.listdir(self.path))
        return sorted(int(match[1]) for match in found if match)

    def path_of(self, step: int) -> str:
        """Name of a backup in messages: its path or URL."""
        return os.path.join(self.path, _name_of(step))

    def local(self, step: int, only: str = "") -> str:
        """The directory of a backup. Raises ValueError if it has anything but plain files.

        Args:
            step: step of the backup.
            only: name of the one file that the caller reads; "" for all.
        """
        _refuse_all_but_files(self.path_of(step))
        return self.path_of(step)

    def forget(self) -> None:
        """Removes copies."""

    @contextlib.contextmanager
    def writing(self, step: int, begun: str) -> Iterator[str]:
        """Yields a directory to fill; at the end of the block it is the backup.

        Args:
            step: of the backup; one of the same step is replaced.
            begun: a result of `begin`.

        Raises:
            OSError: it could not be written; older backups are untouched.
        """
        with directories.atomic_directory(self.path_of(step), begun) as temporary:
            yield temporary

    def remove(self, step: int) -> None:
        """Removes a backup. An interruption leaves a leftover that the next run recognizes."""
        leftover = directories.name_beside(self.path_of(step))
        os.rename(self.path_of(step), leftover)
        directories.remove(leftover)

    def remove_folder(self, name: str) -> None:
        """Removes what another module keeps beside the backups."""
        shutil.rmtree(os.path.join(self.path, name), ignore_errors=True)

    # ------------------------------------------------------------ parts of several tasks

    def takes_parts(self, group: Group) -> bool:
        """Whether each task can write its part of a backup. All tasks must ask.

        Each task looks for the chief's file in the directory, and the chief for those of all.
        """
        with shared_directories.markers({"": self.path}) as (names, _):
            written = group.from_all(names[""])
            looked_for = written if group.is_chief else written[:1]
            seen = all(
                name is not None
                and shared_directories.find_marker("", self.path, name, "", 0.0) is None
                for name in looked_for
            )
            return all(group.from_all(seen))

    def begin(self, step: int) -> str:
        """Creates the directory of a backup, into which several tasks may write."""
        temporary = directories.name_beside(self.path_of(step))
        os.makedirs(temporary)
        return temporary

    def directory_of(self, begun: str) -> str:
        """The directory in which this task writes its part."""
        return begun

    def hand_over(self, begun: str, paths: Sequence[str]) -> dict[str, Any]:
        """Makes the files of this task's part readable for the chief, and durable."""
        for path in paths:
            disk.flush(path)
        return {}

    def drop(self, begun: str) -> None:
        """Removes the files of this task after an error, unless they were handed over."""

    def take_over(self, begun: str, files: dict[str, Any]) -> None:
        """Adopts the files that another task handed over; called on the chief."""

    def abandon(self, begun: str) -> None:
        """Removes the parts."""
        with contextlib.suppress(OSError):
            directories.remove(begun)


class BucketFiles:
    """Backups in a bucket; the methods are those of `LocalFiles`.

    Args:
        path: "s3://bucket/run7".
    """

    def __init__(self, path: str):
        self.path = path.rstrip("/")
        self._bucket = Bucket(self.path)
        self._staged: dict[str, str] = {}  # temporary directories, by the name in the bucket
        self._uploaded: dict[int, str] = {}  # the objects of other tasks' parts, by inode here
        self._remove_copy: Callable[[], Any] = lambda: None  # of the backup that was read last

    @cached_property
    def _list(self) -> LeasedObject:
        return LeasedObject(self._bucket, _LIST, fence.owner())

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            try:
                self._acquire()
                stack.callback(self._list.release)
                ended = threading.Event()
                keeper = threading.Thread(target=self._keep, args=(ended,), name="tfmw-lease")
                keeper.daemon = True
                keeper.start()
                stack.callback(keeper.join)
                stack.callback(ended.set)
                listed = {entry["directory"] for entry in self._known().values()}
                found = self._bucket.names(_DATA)
                self._bucket.remove([name for name in found if name.split("/")[1] not in listed])
            except OSError as error:
                raise UsageError(f"the backup directory cannot be used: {error}.") from error
            yield

    def _acquire(self) -> None:
        seen = None
        while not self._list.acquire(fence.precedes):
            if seen not in (None, self._list.since):  # its holder is there
                raise directories.in_use(self.path, self._list.holder)
            seen = self._list.since
            time.sleep(_POLL_S)
        if self._list.data is None and any(
            NAME.fullmatch(name.partition("/")[0]) for name in self._bucket.names()
        ):
            self._list.release()
            raise UsageError(
                f"{self.path!r} has backups of an earlier version of tfmw, or copies of a local "
                "directory, which are not read from a bucket: copy them to a local directory, or "
                "use another backup_dir."
            )

    def _keep(self, ended: threading.Event) -> None:
        while not ended.wait(BEAT_S):
            try:
                self._list.renew()
            except Lost as error:
                logger.warning("%s: this run writes no more backups", error)
                return
            except OSError as error:  # the next renewal, or write, may succeed
                logger.info("%s", error)

    def _known(self) -> dict[int, dict[str, Any]]:
        """The backups by step: {"directory": its name, "files": {name: [object, bytes]}}."""
        found, data = {}, self._list.data if self._list.held_until else self._list.look()
        try:
            for step, entry in (data or {"backups": {}})["backups"].items():
                names = [entry["directory"], *entry["files"]]
                names += [name for name, size in entry["files"].values() if int(size) >= 0]
                if not all(map(_OWN_NAME.fullmatch, names)):
                    raise ValueError("it lists a file that is none of a backup")
                found[int(step)] = entry
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise TfmwError(f"{self.path}/{_LIST} is damaged: {error}") from error
        return found

    def steps(self) -> list[int]:
        return sorted(self._known())

    def path_of(self, step: int) -> str:
        return f"{self.path}/{_name_of(step)}"

    def local(self, step: int, only: str = "") -> str:
        """A copy of a backup.

        Raises:
            ValueError: a file is missing, or shorter.
            TfmwError: it cannot be read now.
        """
        entry = self._known()[step]
        self.forget()
        copy = tempfile.mkdtemp(prefix="tfmw-backup-")
        self._remove_copy = weakref.finalize(self, shutil.rmtree, copy, ignore_errors=True)
        try:
            for own, (name, _) in entry["files"].items():
                if only in ("", own):
                    file = BucketFile(f"{self.path}/{_DATA}/{entry['directory']}/{name}")
                    file.copy_to(os.path.join(copy, own))
        except (UsageError, OSError, RuntimeError) as error:  # RuntimeError: no thread can start
            self.forget()
            kind = ValueError if isinstance(error, UsageError) else TfmwError
            raise kind(str(error)) from error
        return copy

    def forget(self) -> None:
        """Removes the copy of the backup that was read last."""
        self._remove_copy()

    @contextlib.contextmanager
    def writing(self, step: int, begun: str) -> Iterator[str]:
        staged = self.directory_of(begun)
        try:
            yield staged
            files = {}
            for name in sorted(os.listdir(staged)):
                path = os.path.join(staged, name)
                there = self._uploaded.get(os.stat(path).st_ino)
                if there is None:
                    self._bucket.upload(path, f"{_DATA}/{begun}/{name}")
                files[name] = there or name, os.path.getsize(path)
            fence.check()
        except BaseException:
            self.abandon(begun)
            raise
        self.drop(begun)
        entries = self._known()
        replaced = entries.pop(step, None)
        # If this fails, the backup may be complete, and a run that takes over may rely on it.
        self._write({**entries, step: {"directory": begun, "files": files}})
        if replaced is not None:
            self._remove_data(replaced["directory"])

    def _write(self, entries: dict[int, dict[str, Any]]) -> None:
        self._list.write({"backups": {str(step): entry for step, entry in entries.items()}})

    def remove(self, step: int) -> None:
        entries = self._known()
        removed = entries.pop(step)
        self._write(entries)
        self._remove_data(removed["directory"])

    def remove_folder(self, name: str) -> None:
        self._bucket.remove(list(self._bucket.names(name)))

    def _remove_data(self, directory: str) -> None:
        with contextlib.suppress(OSError):  # the next run removes what is left
            self.remove_folder(f"{_DATA}/{directory}")

    # ------------------------------------------------------------ parts of several tasks

    def begin(self, step: int) -> str:
        return f"{_name_of(step)}-{secrets.token_hex(6)}"

    def directory_of(self, begun: str) -> str:
        if begun not in self._staged:
            self._staged[begun] = tempfile.mkdtemp(prefix="tfmw-backup-")
        return self._staged[begun]

    def hand_over(self, begun: str, paths: Sequence[str]) -> dict[str, Any]:
        for path in paths:
            self._bucket.upload(path, f"{_DATA}/{begun}/{os.path.basename(path)}")
        files = {os.path.basename(path): os.path.getsize(path) for path in paths}
        self.drop(begun)
        return files

    def drop(self, begun: str) -> None:
        self._uploaded.clear()
        shutil.rmtree(self._staged.pop(begun, ""), ignore_errors=True)

    def take_over(self, begun: str, files: dict[str, Any]) -> None:
        """Fetches the indices, which are merged; data that was uploaded gets empty files."""
        for name, size in files.items():
            path = os.path.join(self.directory_of(begun), name)
            with open(path, "wb") as file:
                if name.endswith(".index"):
                    file.write(self._bucket.read_range(f"{_DATA}/{begun}/{name}", 0, size) or b"")
                else:
                    file.truncate(size)  # takes no space
                    self._uploaded[os.fstat(file.fileno()).st_ino] = name

    def abandon(self, begun: str) -> None:
        self.drop(begun)
        self._remove_data(begun)

    def takes_parts(self, group: Group) -> bool:
        return True


def _refuse_all_but_files(path: str) -> None:
    """Raises ValueError unless `path` is a directory that contains only plain files."""
    if not stat.S_ISDIR(os.lstat(path).st_mode):
        raise ValueError("it is not a directory")
    for name in os.listdir(path):
        if not stat.S_ISREG(os.lstat(os.path.join(path, name)).st_mode):
            raise ValueError(f"{name!r} in it is not a plain file")
