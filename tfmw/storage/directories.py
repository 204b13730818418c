"""Atomic writes of directories, and checksums of files.

    with atomic_directory("/models/digits") as temporary:
        ...                                   # write files into `temporary`

The files are written under a temporary name beside the target, flushed to the disk and renamed.
All paths are local.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfmw.errors import UsageError
from tfmw.storage import fence
from tfmw.storage.disk import file_lock, flush, holder_of

logger = logging.getLogger("tfmw")

_PATIENCE_S = 15.0  # time to wait for the lock of an earlier attempt, on another host

# Names of a crash's leftovers beside `models/digits`: `models/.digits.writing-1f0c9e4b7a52`.
_WRITING, _REPLACED = "writing", "replaced"
_LEFTOVER = re.compile(rf"\.(.+)\.({_WRITING}|{_REPLACED})-[0-9a-f]{{12}}", re.DOTALL)

# Patterns that fnmatch(3) treats as more than themselves; `*` and `?` match themselves, too.
_PATTERN = re.compile(r"\\|\[[^/]+\]")


@contextlib.contextmanager
def atomic_directory(target: str, temporary: str | None = None) -> Iterator[str]:
    """Yields the name of a directory or file to create; at the end it replaces `target`.

    If the block raises, what has that name is removed and `target` is unchanged. The same
    holds if a later attempt of the run has begun (`tfmw.storage.fence`). A crash leaves the old
    directory, the new one or none, and leftovers, which `clean_up` removes.

    Args:
        target: an absolute path, without a slash at the end. Its parent is created.
        temporary: an earlier result of `name_beside(target)`, to fill that directory.
    """
    os.makedirs(os.path.dirname(target), exist_ok=True)
    temporary = temporary or name_beside(target)
    try:
        yield temporary
        _flush_tree(temporary)
        fence.check()
        replace(target, temporary)
    except BaseException:
        # The directory may not exist, and the error of the block matters more.
        with contextlib.suppress(OSError):
            remove(temporary)
        raise


@contextlib.contextmanager
def locked(directory: str, name: str) -> Iterator[None]:
    """Creates a directory and locks it for this run.

    Args:
        directory: its path.
        name: file name of the lock; see `disk.file_lock`.

    Raises:
        UsageError: the directory cannot be made, another process holds the lock, or it cannot be
            taken.
    """
    try:
        os.makedirs(directory, exist_ok=True)
    except OSError as error:  # a file has this name, or the parent is another user's
        raise UsageError(
            f"cannot create the directory {directory}: {error.strerror}; name one that this "
            "process may create."
        ) from None
    path = os.path.join(directory, name)
    # A host that was cut off ends its tasks by itself, a few seconds after the others detect it.
    with contextlib.ExitStack() as stack:
        try:
            owner = fence.owner()
            stack.enter_context(file_lock(path, _PATIENCE_S if owner else 0.0, owner))
        except BlockingIOError:
            holder = holder_of(path)
            if not fence.precedes(holder):
                raise in_use(directory, holder) from None
            # A task whose supervisor hangs may hold it, or a machine for which a file server still
            # waits.
            logger.warning(
                "%s is locked by an earlier attempt of this run (%s), which may write nothing any "
                "more; continuing without the lock",
                path,
                holder,
            )
        except OSError as e:
            raise UsageError(
                f"the directory {directory!r} cannot be locked ({e}): expected a directory that "
                f"this process may write to, and in it no {name} or a plain file of that name that "
                "this user owns."
            ) from e
        yield


def in_use(directory: str, holder: str) -> UsageError:
    """The error for a directory that another run has locked."""
    return UsageError(
        f"the directory {directory!r} is in use by another run ({holder}): wait for it, or give "
        "this run a directory of its own."
    )


def check_creatable(target: str) -> None:
    """Tests whether a directory can be created beside `target`, or in its first existing parent.

    Raises:
        OSError or ValueError: it cannot be created; nothing has changed.
    """
    if "\0" in target:
        raise ValueError("a path cannot contain a null byte")
    parent = os.path.dirname(target)
    while not os.path.exists(parent):
        parent = os.path.dirname(parent)
    os.rmdir(tempfile.mkdtemp(prefix=f".{os.path.basename(target)[:100]}.", dir=parent))


def replace(target: str, temporary: str) -> None:
    """Renames `temporary` to `target`; `target` is missing only between two renames."""
    replaced = None
    if os.path.lexists(target):
        replaced = name_beside(target, _REPLACED)
        os.rename(target, replaced)
    try:
        os.rename(temporary, target)
    except BaseException:
        if replaced is not None:
            os.rename(replaced, target)
        raise
    flush(os.path.dirname(target))
    if replaced is not None:
        remove(replaced)


def clean_up(parent: str, names: re.Pattern[str]) -> None:
    """Removes leftovers of interrupted writes in `parent`, or restores what they had replaced.

    Args:
        parent: a directory in which no other process is writing these names.
        names: matches the targets of the writes.
    """
    for entry in os.listdir(parent) if os.path.isdir(parent) else ():
        match = _LEFTOVER.fullmatch(entry)
        if match is None or not names.fullmatch(match[1]):
            continue
        leftover, target = os.path.join(parent, entry), os.path.join(parent, match[1])
        if match[2] == _REPLACED and not os.path.lexists(target):
            os.rename(leftover, target)  # the process died between the two renames of `replace`
        else:
            remove(leftover)


def remove(path: str) -> None:
    """Removes a file or a directory with all its content; of a link, only the link."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)  # unlike tf.io.gfile.rmtree, it follows no links
    else:
        os.unlink(path)


def _flush_tree(directory: str) -> None:
    """Flushes a file, or all in a directory."""
    if os.path.isfile(directory):
        flush(directory)
    for parent, _, files in os.walk(directory):
        for name in files:
            flush(os.path.join(parent, name))
        flush(parent)


def sha256(path: str) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def files_of(prefix: str) -> list[str]:
    """The paths of a directory's files that begin with `prefix`, which is no pattern."""
    directory, name = os.path.split(prefix)
    found = os.listdir(directory)
    return [os.path.join(directory, file) for file in found if file.startswith(name)]


def is_pattern(path: str) -> bool:
    """Whether TensorFlow treats a path as a pattern that does not match the path itself."""
    return _PATTERN.search(path) is not None


def check_name(path: str) -> None:
    """Raises UsageError for a path that TensorFlow cannot open."""
    try:
        path.encode()
    except UnicodeEncodeError:
        raise UsageError(
            f"received the path {path!r}, which is not UTF-8, and TensorFlow opens no other: name "
            "another directory."
        ) from None


@contextlib.contextmanager
def checkpoint_reader(prefix: str) -> Iterator[Any]:
    """Yields the reader of a TensorFlow checkpoint, whose directory may have any name.

    `tf.train.load_checkpoint` treats its argument as a pattern, and keeps files open until the
    process ends.
    """
    if not is_pattern(prefix):
        yield tf.train.load_checkpoint(prefix)
        return
    directory, name = os.path.split(os.path.abspath(prefix))
    with tempfile.TemporaryDirectory() as folder:
        link = os.path.join(folder, "checkpoint")
        os.symlink(directory, link)
        yield tf.train.load_checkpoint(os.path.join(link, name))


def name_beside(target: str, state: str = _WRITING) -> str:
    """A new name for the replacement of `target`; `clean_up` removes it after a crash."""
    parent, name = os.path.split(target)
    return os.path.join(parent, f".{name}.{state}-{secrets.token_hex(6)}")
