"""Files of a job that only this user can have written.

    write(folder / "result.pickle", data)     # in the controller
    read(folder, "result.pickle")             # in any process that holds the job

The readers of a job's folder unpickle or execute its files. So `read` takes a file
only if it and its folder belong to this user, and no other user can write to the folder. The checks
are made on what is open, not on a name that may mean something else a moment later.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path
from typing import TextIO

from tfmw.errors import UsageError
from tfmw.storage.disk import replacing

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def read(folder: Path, name: str, offset: int = 0, size: int = -1) -> bytes:
    """A file of a folder, from `offset` on; b"" if there is none.

    Args:
        folder: the folder.
        name: name of the file in it.
        offset: position of the first byte.
        size: number of bytes at most; negative: up to the end.

    Raises:
        UsageError: another user may have written it, or it cannot be opened.
    """
    with contextlib.ExitStack() as stack:
        try:
            directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            stack.callback(os.close, directory)
            if problem := _problem_of_folder(os.fstat(directory)):
                raise _refused(folder, problem)
            # Links are not followed, and opening a pipe does not wait.
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            file = stack.enter_context(open(os.open(name, flags, dir_fd=directory), "rb"))
        except FileNotFoundError:
            return b""
        except OSError as error:  # for example ELOOP for a link
            raise _refused(folder / name, f"cannot be opened ({error.strerror})") from error
        found = os.fstat(file.fileno())
        if found.st_uid != os.geteuid():
            raise _refused(folder / name, f"is of user {found.st_uid}")
        if not stat.S_ISREG(found.st_mode):
            raise _refused(folder / name, "is no regular file")
        file.seek(offset)
        return file.read(size)


def is_own(folder: Path) -> bool:
    """Whether a folder exists, belongs to this user, and no other user can write to it."""
    try:
        return not _problem_of_folder(folder.stat())
    except OSError:
        return False


def write(path: Path, data: bytes | memoryview) -> None:
    """Replaces a file atomically, as others may be reading it; only this user can read it."""
    with replacing(path) as temporary, open(temporary, "wb", opener=private) as file:
        file.write(data)


def append(path: Path) -> TextIO:
    """Opens a text file that only this user can read, to append to it."""
    return open(path, "a", encoding="utf-8", opener=private)  # the caller closes it


def private(path: str, flags: int) -> int:
    """An `opener` for `open`: only this user can read the file that it creates."""
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def _problem_of_folder(found: os.stat_result) -> str:
    if found.st_uid != os.geteuid():
        return f"is of user {found.st_uid}"
    if found.st_mode & _OTHERS_WRITE:
        return f"can be written by others (mode {stat.S_IMODE(found.st_mode):o})"
    return ""


def _refused(path: Path, problem: str) -> UsageError:
    return UsageError(
        f"{path} {problem}, and you are user {os.geteuid()}: job results are unpickled, so tfmw "
        "reads only files that no other user can write. Attach as the user that submitted the job, "
        "and submit the job again if its folder was changed."
    )
