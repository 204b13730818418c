"""The state of a run that is alive, as JSON: what `tfmw status` shows.

    board = Board(directory, command)
    board.watch(attempt.tasks, 0)      # at the start of each attempt
    board.status()                     # {"run": ..., "tasks": [{"task": "worker 0", ...}, ...]}
    board.stacks()                     # {"worker 0": "Thread 0x... (most recent call first): ..."}

The tasks' files say it, so a task that hangs is asked nothing; except for stacks.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tfmw.cluster.addresses import split
from tfmw.launcher.exchanges import (
    Missing,
    ended_at,
    input_seconds,
    missing,
    own_seconds,
    straggler,
    waiting_share,
)
from tfmw.launcher.failure import describe_status
from tfmw.launcher.process import Task, task_name
from tfmw.runtime.progress import JOINED, NOT_UP, UP
from tfmw.runtime.recorder import NOBODY, Exchange
from tfmw.runtime.stacks import is_installed

STACKS_S = 2.0
"""Seconds in which a task writes its stacks."""

STRAGGLER_S = 10.0
"""Seconds between two looks for a straggler; a line names one that two looks have found."""

_STAGES = {NOT_UP: "starting", UP: "joining", JOINED: "before its first step"}
_SAMPLES = 30  # of the steps, one a second: the rate is of the last half minute
_SHOWN_FRAMES = 3
_FRAME = re.compile(r'  File "(?P<file>[^"]*)", line (?P<line>\d+) in (?P<function>.*)')


class Board:
    """What is known of a run, between its attempts too.

    Args:
        directory: of the run.
        command: the arguments of its tasks.
    """

    def __init__(self, directory: Path, command: Sequence[str]) -> None:
        self.directory = directory
        self._command = list(command)
        self._attempt = 0
        self._tasks: list[Task] = []
        self._elsewhere: dict[str, str] = {}  # task -> its host
        self._since = time.time()
        self._samples: collections.deque[tuple[float, int]] = collections.deque(maxlen=_SAMPLES)
        self._look_at = 0.0  # for a straggler
        self._slowest: str | None = None  # in the last look
        self._named: str | None = None  # the straggler that a line has named

    def watch(
        self,
        tasks: list[Task],
        attempt: int,
        cluster: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        """Begins with the tasks of an attempt.

        Args:
            tasks: on this host; those that replace them appear in the same list.
            attempt: its number.
            cluster: addresses of all tasks by kind, where some are on other hosts.
        """
        self._tasks, self._attempt = tasks, attempt
        own = {task.name for task in tasks}
        self._elsewhere = {
            name: split(address)[0]
            for kind, addresses in (cluster or {}).items()
            for index, address in enumerate(addresses)
            if (name := task_name(kind, index)) not in own
        }
        self._samples.clear()

    def sample(self) -> None:
        """Notes how far the run is; call it about once a second."""
        steps = [task.progress().step for task in list(self._tasks)]
        self._samples.append((time.monotonic(), max(steps, default=NOT_UP)))

    def exchanges(self) -> dict[str, list[Exchange]]:
        """The last exchanges of each task that makes some."""
        workers = [task for task in list(self._tasks) if task.kind in ("chief", "worker")]
        found = {task.name: task.exchanges() for task in workers}
        return found if any(found.values()) else {}

    def new_straggler(self) -> list[str]:
        """A log line that names the slowest worker, when it was the slowest in two looks."""
        if time.monotonic() < self._look_at:
            return []
        self._look_at = time.monotonic() + STRAGGLER_S
        found = straggler(self.exchanges())
        name = found.partition(" is ")[0] if found is not None else None
        again, self._slowest = name is not None and name == self._slowest, name
        if found is None or not again or name == self._named:
            return []
        self._named = name
        return [found]

    def killed(self, tasks: Sequence[Task]) -> list[str]:
        """Log lines: in or before which exchange tasks were killed, of those that a signal ended.

        Args:
            tasks: that failed by themselves.
        """
        by_task = self.exchanges()
        return [
            f"{where}; {describe_status(task.status).partition(' (')[0]} ended it"
            for task in tasks
            if task.status is not None
            and task.status < 0
            and (where := ended_at(task.name, by_task)) is not None
        ]

    def dump(self, path: Path) -> None:
        """Writes the last exchanges of all tasks as JSON: {task: [{"number": ..., ...}, ...]}."""
        found = self.exchanges()
        if found:
            text = json.dumps({task: [e._asdict() for e in made] for task, made in found.items()})
            with contextlib.suppress(OSError):  # a full disk must not hide the failure
                path.write_text(text)

    def status(self) -> dict[str, Any]:
        """The state of the run, and of each task."""
        by_task = self.exchanges()
        late = missing(by_task)
        return {
            "run": self.directory.name,
            "directory": str(self.directory),
            "pid": os.getpid(),
            "command": self._command[1:],
            "since": self._since,
            "attempt": self._attempt,
            "steps_per_s": self._rate(),
            "missing": None if late is None else {"sentence": str(late), "seconds": late.seconds},
            "straggler": straggler(by_task),
            "elsewhere": self._elsewhere,
            "tasks": [self._state(task, by_task.get(task.name, [])) for task in list(self._tasks)],
        }

    def stacks(self) -> dict[str, str]:
        """The stacks of each task's threads; of one that cannot write them, why."""
        found = {}
        for task in list(self._tasks):
            if not task.pid:
                found[task.name] = "it has not started yet"
            elif task.has_ended():
                found[task.name] = "it has ended"
            elif task.stopped():
                found[task.name] = "it is stopped by a signal; kill -CONT lets it go on"
            else:
                found[task.name] = task.stacks(STACKS_S) or "it writes no stacks"
        return found | {task: f"it runs on {host}" for task, host in self._elsewhere.items()}

    def _rate(self) -> float | None:
        training = [(at, step) for at, step in self._samples if step >= 0]
        if len(training) < 2 or training[-1][0] <= training[0][0]:
            return None
        (begin, first), (end, last) = training[0], training[-1]
        return (last - first) / (end - begin)

    def _state(self, task: Task, found: Sequence[Exchange]) -> dict[str, Any]:
        progress = task.progress()
        last = found[-1] if found else None
        inside = last is not None and not last.done
        return {
            "task": task.name,
            "pid": task.pid,
            "step": progress.step,
            "stage": _stage(task, progress.step, progress.blocked_in),
            "exchange": str(last) if last is not None and inside else None,
            "exchanges": last.number if last is not None else 0,
            "bytes": sum(exchange.nbytes for exchange in found),
            "seconds": time.monotonic() - last.begun if last is not None and inside else None,
            "waiting_for": (
                f"worker {last.waiting_for}"
                if last is not None and inside and last.waiting_for != NOBODY
                else None
            ),
            "own_s": own_seconds(found),
            "input_s": input_seconds(found),
            "waiting": waiting_share(found),
        }


def _stage(task: Task, step: int, blocked_in: str) -> str:
    if not task.pid:
        return _STAGES[NOT_UP]
    if task.has_ended():
        return f"ended with status {task.status}"
    if task.stopped():
        return "stopped by a signal"
    return f"in {blocked_in}" if blocked_in else _STAGES.get(step, "training")


def sentence(late: Missing, tasks: Sequence[Task], stacks_s: float = STACKS_S) -> str:
    """One sentence: which task the others wait for, and where it is."""
    task = next(task for task in tasks if task.name == late.task)
    if task.has_ended():
        return f"{late}; it has ended"
    if task.stopped():
        return f"{late}; it is stopped by a signal"
    where = innermost(task.stacks(stacks_s))
    return f"{late}; its stack: {where}" if where else str(late)


def innermost(stacks: str, frames: int = _SHOWN_FRAMES) -> str:
    """The innermost frames of the user's code: "train.py:31 in slow_map < train.py:40 in main".

    Args:
        stacks: as faulthandler writes them: of each thread, the most recent call first.
        frames: how many.
    """
    threads = [_frames(thread) for thread in stacks.split("\n\n")]
    # Most threads run TensorFlow or tfmw: the one that is nearest to the user's code tells most.
    depths = [_depth(thread) for thread in threads]
    nearest = threads[min(range(len(threads)), key=lambda i: depths[i])]
    own = [frame for frame in nearest if not is_installed(frame["file"])] or nearest
    return " < ".join(
        f"{os.path.basename(frame['file'])}:{frame['line']} in {frame['function']}"
        for frame in own[:frames]
    )


def _frames(thread: str) -> list[re.Match[str]]:
    return [match for line in thread.splitlines() if (match := _FRAME.match(line))]


def _depth(thread: Sequence[re.Match[str]]) -> int:
    """The number of frames above the user's innermost one."""
    found = (i for i, frame in enumerate(thread) if not is_installed(frame["file"]))
    return next(found, sys.maxsize)
