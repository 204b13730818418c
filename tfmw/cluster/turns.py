"""Turns of the tasks of one machine, which run the same script and so make the same files.

    turns.begin("/run/directory/files")  # in each task, before the script
    turns.take("train.py:12")            # waits while another task has its turn
    with turns.operations() as made:     # what the tasks have done with files so far
        made.add("make", "/data/cats")
    turns.give()                         # before this task waits for others
    with turns.call(): ...               # a call that all tasks make, such as fit

A script is divided by the calls that all tasks make. Between two of them, the first task that takes
its turn keeps it until the next call. The others wait, and then continue without turns. So a task
that holds its turn must give it before it waits for another task.

One file has the operations of all tasks, a line of JSON each. Two POSIX record locks (fcntl(2)) of
it, for the turn and for the operations, are dropped by the kernel when their holder dies.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import fcntl
import json
import logging
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tfmw.observe.progress import blocking_call
from tfmw.storage import fence

FILE = "TFMW_SCRIPT_FILES"
"""Variable with the path of the file."""

_TURN, _OPERATIONS = 0, 1  # bytes of the file that are locked
_SAY_AFTER_S = 5.0
_MOST_QUESTIONS = 5  # for a missing file, before it is one of another task

logger = logging.getLogger("tfmw")


class Turns:
    """The turn of this task, and the operations on files of all tasks of this machine.

    Args:
        path: path of the file; it is created.
    """

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._read = 0  # bytes of the file
        self._attempt = fence.attempt()
        self._since = time.time()
        self._section = 0  # number of calls so far
        self._within_call = 0
        self._holds = False
        self._done = False  # whether this section has no turns any more, for this task
        # numbers of an attempt and a section, and an operation, as JSON -> how often it was made
        self._counts: collections.Counter[str] = collections.Counter()
        self._makers: dict[str, list[int]] = {}  # path -> attempt, section, process of the last one
        self._extracted: set[str] = set()  # directories
        self._own: collections.Counter[str] = collections.Counter()  # of this section
        self._asked: collections.Counter[str] = collections.Counter()  # of this section
        with self.operations():
            pass

    @property
    def is_over(self) -> bool:
        """Whether this section has no turns any more, for this task."""
        return self._done

    @property
    def usable(self) -> bool:
        """Whether operations of this process and thread are shared with other tasks."""
        in_main_thread = threading.current_thread() is threading.main_thread()
        return in_main_thread and not self._within_call

    # ---- turns ---------------------------------------------------------------------------------

    def take(self, place: str) -> None:
        """Waits while another task of this machine has its turn in this section.

        Args:
            place: line of the script that this task has come to, for a message to others.
        """
        if self._holds or self._done:
            return
        if not self._lock(_TURN, wait=False):
            said = threading.Timer(_SAY_AFTER_S, self._say_that_it_waits)
            said.daemon = True
            said.start()
            self._lock(_TURN)
            said.cancel()
        with self.operations():
            self._done = self.count("turn") > 0
            self._holds = not self._done
            if self._holds:
                self.add("place", f"{os.environ.get('TFMW_TASK', 'a task')}, at {place}")
        if self._done:
            self._unlock(_TURN)

    def is_of_another(self) -> bool:
        """Whether another task has its turn now."""
        if self._holds or self._done:
            return False
        if not self._lock(_TURN, wait=False):
            return True
        self._unlock(_TURN)
        return False

    def give(self, complete: bool = True) -> None:
        """Ends this task's turn in this section.

        Args:
            complete: whether the others need none in this section any more.
        """
        if not self._holds:
            return
        self._holds, self._done = False, True
        if complete:
            with self.operations():
                self.add("turn")
        self._unlock(_TURN)

    def is_waiting(self, missing: str) -> bool:
        """Whether the task that has its turn asks for a file again and again.

        Args:
            missing: the path of the file.
        """
        self._asked[missing] += 1
        return self._holds and self._asked[missing] > _MOST_QUESTIONS

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """A call that all tasks make, in which they share no files."""
        if not self._within_call:
            self.give()
        self._within_call += 1
        try:
            yield
        finally:
            self._within_call -= 1
            if not self._within_call:
                self._section, self._done = self._section + 1, False
                self._own.clear()
                self._asked.clear()

    def _say_that_it_waits(self) -> None:
        lines = os.pread(self._file, os.fstat(self._file).st_size, 0).splitlines()
        with contextlib.suppress(ValueError):  # written by a task that was killed
            for place in [entry[4] for entry in map(json.loads, lines) if entry[3] == "place"][-1:]:
                logger.warning("waits for %s, which may make files that this task reads", place)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """The context of an operation, whose own steps are none of the script."""
        self._within_call += 1
        try:
            yield
        finally:
            self._within_call -= 1

    # ---- operations ----------------------------------------------------------------------------

    @contextlib.contextmanager
    def operations(self) -> Iterator[Turns]:
        """The context in which this task alone reads and adds operations."""
        self._lock(_OPERATIONS)
        try:
            text = os.pread(self._file, os.fstat(self._file).st_size - self._read, self._read)
            self._read += len(text)
            for line in text.splitlines():
                with contextlib.suppress(ValueError):  # written by a task that was killed
                    self._note(*json.loads(line))
            yield self
        finally:
            self._unlock(_OPERATIONS)

    def add(self, *operation: Any) -> None:
        """Adds an operation of this section, which this task has made."""
        entry = [self._attempt, self._section, os.getpid(), *operation]
        line = json.dumps(entry).encode() + b"\n"
        os.write(self._file, line)
        self._read += len(line)
        self._note(*entry)

    def is_made(self, *operation: Any) -> bool:
        """Whether another task has made the operation that this one comes to, in this section.

        The second operation of this task on a path is the second of another one, too.
        """
        self._own[json.dumps(operation)] += 1
        return self.count(*operation) >= self._own[json.dumps(operation)]

    def count(self, *operation: Any) -> int:
        """The number of times that tasks have made an operation in this section."""
        return self._counts[json.dumps([self._attempt, self._section, *operation])]

    def is_of_run(self, path: str) -> bool:
        """Whether a task has made this directory, in this attempt or an earlier one."""
        return path in self._makers

    def is_new_of_another(self, path: str) -> bool:
        """Whether another task has made this directory in this section."""
        made = self._makers.get(path, [])
        return made[:2] == [self._attempt, self._section] and made[2] != os.getpid()

    def is_of_data(self, path: str) -> bool:
        """Whether a file is older than this task, or from an archive that a task has extracted."""
        if not self._extracted.isdisjoint(map(str, Path(path).parents)):
            return True
        return os.path.lexists(path) and os.lstat(path).st_mtime < self._since

    def _note(self, attempt: int, section: int, process: int, *operation: Any) -> None:
        self._counts[json.dumps([attempt, section, *operation])] += 1
        match operation:
            case ("make", path):
                self._makers[path] = [attempt, section, process]
            case ("extractall" | "unpack_archive", _, path):
                self._extracted.add(path)

    # ---- locks ---------------------------------------------------------------------------------

    def _lock(self, byte: int, wait: bool = True) -> bool:
        """Locks a byte of the file; returns whether it is locked."""
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
        except OSError as e:
            if e.errno not in (errno.EACCES, errno.EAGAIN):
                raise
            if wait:
                with blocking_call("files"):
                    fcntl.lockf(self._file, fcntl.LOCK_EX, 1, byte)
            return wait
        return True

    def _unlock(self, byte: int) -> None:
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, byte)


_turns: Turns | None = None


def begin(path: str) -> None:
    """Begins the turns of this process, if the file can be made and locked."""
    global _turns
    with contextlib.suppress(OSError):
        _turns = Turns(path)
        os.register_at_fork(after_in_child=_forget)


def end() -> None:
    """Ends the turns of this process, as its script knows of the other tasks."""
    give()
    _forget()


def _forget() -> None:
    global _turns
    _turns = None


def current() -> Turns | None:
    """The turns of this process; None if it has none."""
    return _turns


def give() -> None:
    """Ends this task's turn, before it waits for another task; does nothing in other threads."""
    if _turns is not None and threading.current_thread() is threading.main_thread():
        _turns.give()


def call() -> contextlib.AbstractContextManager[None]:
    """The context of a call that all tasks make."""
    return contextlib.nullcontext() if _turns is None else _turns.call()
