"""A task's own error, recorded in a file for the launcher.

    try:
        train()
    except Exception as error:
        record_error(error)
        raise

A task that loses its peer fails with TensorFlow's `UnavailableError`, often before the task that
caused it has exited. So each task records its error and the time. The launcher then reports the
earliest error that is not secondary.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import time
import traceback
from collections.abc import Iterable, Iterator

from tfmw.errors import UsageError, printable
from tfmw.observe.task_process import own_path
from tfmw.storage.disk import replacing

ERROR_FILE = "TFMW_ERROR_FILE"
"""Variable with the path of a task's file: <attempt>/<task>/error.json."""

# TensorFlow's errors in the tasks that survive the loss of another one: never the root cause.
SECONDARY = {"UnavailableError", "AbortedError", "DeadlineExceededError", "CancelledError"}
# Prefix of an error that another task reported, of any type: "Error reported from /job:worker/
# task:1: ..." (coordination_service.cc).
ECHO = "Error reported from /job:"

_files_of_chief: set[str] = set()  # patterns of their paths


def record_error(error: BaseException, *, fatal: bool = False) -> None:
    """Records this task's error for the launcher, which reports the earliest one as the cause.

    Does nothing in a process that no launcher started. An error that was already recorded keeps
    its first time, and so does an error raised from it.

    Args:
        fatal: whether the error ends the task.
    """
    path = own_path(ERROR_FILE)
    if not path:
        return
    chain = list(_chain(error))
    now = time.monotonic()
    since = min(getattr(link, "_tfmw_recorded", now) for link in chain)
    with contextlib.suppress(AttributeError):
        error._tfmw_recorded = since  # type: ignore[attr-defined]
    record = {
        "time": time.time(),
        "monotonic": since,
        "type": type(error).__name__,
        "message": printable("\n".join([str(error), *getattr(error, "__notes__", ())])),
        "traceback": printable("".join(traceback.format_exception(error))),
        "secondary": is_secondary(error),
        "usage": isinstance(error, UsageError),
        "fatal": fatal,
    }
    try:
        with replacing(path) as temporary, open(temporary, "w", encoding="utf-8") as file:
            json.dump(record, file)
    except OSError as problem:
        # A failure to record the error must not hide the error itself.
        print(f"tfmw: could not write {path}: {problem}", file=sys.stderr)


def forget_error() -> None:
    """Removes the record of an error after which this task continues."""
    if path := own_path(ERROR_FILE):
        with contextlib.suppress(OSError):
            os.unlink(path)


def is_secondary(error: BaseException) -> bool:
    """Whether an error only reports the loss of another task, or the error of another task."""
    *_, root = _chain(error)
    return type(root).__name__ in SECONDARY or ECHO in str(root)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error, its cause, the cause of that, and so on."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)


def add_files_of_chief(paths: Iterable[str]) -> None:
    """Notes files that callbacks write on the chief only, such as "runs/{epoch}.keras"."""
    for path in paths:
        _files_of_chief.add(".*".join(map(re.escape, re.split(r"\{[^{}]*\}", path))))


def misses_file_of_chief(error: BaseException) -> bool:
    """Whether an error names a missing file of `add_files_of_chief`."""
    is_missing = isinstance(error, FileNotFoundError) or "File not found" in str(error)
    return is_missing and any(re.search(path, str(error)) for path in _files_of_chief)
