"""The state of a live run as JSON, which `tfmw status` shows.

    status = RunStatus(directory, command, tasks=attempt.tasks)
    status.status()                    # {"run": ..., "tasks": [{"task": "worker 0", ...}, ...]}
    status.stacks()                    # {"worker 0": "Thread 0x... (most recent call first): ..."}

The state comes from the tasks' files, so a hung task need not reply; only stacks require it to.
`run_files` lets other processes of this user read the same.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tfmw.cluster.addresses import split
from tfmw.launcher.failure import describe_status
from tfmw.launcher.process import TaskFiles, divisions, task_name
from tfmw.observe import goodput
from tfmw.observe.exchanges import (
    Missing,
    ended_at,
    input_seconds,
    missing,
    own_seconds,
    straggler,
    waiting_share,
)
from tfmw.observe.goodput import Division
from tfmw.observe.progress import JOINED, NOT_UP, UP
from tfmw.observe.recorder import NOBODY, RecordedExchange
from tfmw.observe.stacks import is_installed

STACKS_S = 2.0
"""Seconds in which a task writes its stacks."""

STRAGGLER_S = 10.0
"""Seconds between two searches for a straggler; a log line reports one that two searches found."""

_STAGES = {NOT_UP: "starting", UP: "joining", JOINED: "before its first step"}
_SHOWN_FRAMES = 3
_FRAME = re.compile(r'  File "(?P<file>[^"]*)", line (?P<line>\d+) in (?P<function>.*)')


@dataclasses.dataclass
class RunStatus:
    """The state of a run, also between its attempts.

    Args:
        directory: directory of the run.
        command: arguments of its tasks.
        pid: process id of its launcher.
        since: start of the run, in seconds of `goodput.now`.
        attempt: number of the last attempt.
        cluster: addresses of its tasks by kind, if some are on other hosts.
        tasks: tasks of that attempt on this host; replacements appear in the same list.
    """

    directory: Path
    command: Sequence[str]
    pid: int = dataclasses.field(default_factory=os.getpid)
    since: float = dataclasses.field(default_factory=goodput.now)
    attempt: int = 0
    cluster: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)
    tasks: Sequence[TaskFiles] = ()
    # zero of its launcher's clock
    clock_zero: float = dataclasses.field(default_factory=goodput.clock_zero)

    def __post_init__(self) -> None:
        self.name = self.directory.name
        self.published_in: Path | None = None  # folder that other processes read
        self._look_at = 0.0  # time of the next search for a straggler
        self._slowest = ""  # the straggler in the last search
        self._named = ""  # the straggler that a line has reported

    def described(self) -> dict[str, Any]:
        """All that another process needs as JSON, in addition to the tasks' files; see `of`."""
        tasks = [(t.kind, t.index, str(t.attempt), t.restart, t.pid) for t in self.tasks]
        known = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {**known, "directory": str(self.directory), "tasks": tasks}

    @classmethod
    def of(cls, described: Mapping[str, Any]) -> RunStatus:
        """The run that another process has described."""
        # Another version of tfmw may have described fewer or more fields.
        names = [field.name for field in dataclasses.fields(cls) if field.name in described]
        known = {name: described[name] for name in names}
        tasks = [TaskFiles(kind, i, Path(at), *rest) for kind, i, at, *rest in known["tasks"]]
        return cls(**{**known, "directory": Path(known["directory"]), "tasks": tasks})

    def _elsewhere(self) -> dict[str, str]:
        """Task -> host, for tasks on other hosts."""
        own = {task.name for task in self.tasks}
        return {
            name: split(address)[0]
            for kind, addresses in self.cluster.items()
            for index, address in enumerate(addresses)
            if (name := task_name(kind, index)) not in own
        }

    def exchanges(self) -> dict[str, list[RecordedExchange]]:
        """The last exchanges of each task that has any."""
        workers = [task for task in self.tasks if task.kind in ("chief", "worker")]
        found = {task.name: task.exchanges() for task in workers}
        return found if any(found.values()) else {}

    def new_straggler(self) -> list[str]:
        """Log line about the slowest worker, if it was the slowest in two searches."""
        if time.monotonic() < self._look_at:
            return []
        self._look_at = time.monotonic() + STRAGGLER_S
        found = straggler(self.exchanges()) or ""
        name = found.partition(" is ")[0]
        again, self._slowest = name == self._slowest, name
        if not name or not again or name == self._named:
            return []
        self._named = name
        return [found]

    def killed(self, tasks: Sequence[TaskFiles]) -> list[str]:
        """Log lines on tasks that a signal killed: in or before which exchange each of them ended.

        Args:
            tasks: tasks that failed by themselves.
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
            "run": self.name,
            "directory": str(self.directory),
            "pid": self.pid,
            "command": self.command[1:],
            "since": self.since,
            "attempt": self.attempt,
            "steps_per_s": max((t.progress().steps_per_s for t in self.tasks), default=0) or None,
            "missing": None if late is None else {"sentence": str(late), "seconds": late.seconds},
            "straggler": straggler(by_task),
            "elsewhere": self._elsewhere(),
            "goodput": self._goodput(),
            "tasks": [self._state(task, by_task.get(task.name, [])) for task in self.tasks],
        }

    def _goodput(self) -> dict[str, Any]:
        """The run's time so far, in seconds of its parts, and a line about it."""
        now = time.monotonic() + self.clock_zero
        known = {task: d.until(now) for task, d in divisions(self.tasks).items()}
        first = next(iter(known.values()), Division())
        return {"seconds": first.by_part(), "share": first.goodput(), "line": goodput.line(known)}

    def stacks(self) -> dict[str, str]:
        """The stacks of each task's threads, or the reason why they are missing."""
        found = {}
        for task in self.tasks:
            if not task.pid:
                found[task.name] = "it has not started yet"
            elif task.has_ended():
                found[task.name] = "it has ended"
            elif task.stopped():
                found[task.name] = "it is stopped by a signal; kill -CONT lets it go on"
            else:
                found[task.name] = task.stacks(STACKS_S) or "it writes no stacks"
        return found | {task: f"it runs on {host}" for task, host in self._elsewhere().items()}

    def _state(self, task: TaskFiles, found: Sequence[RecordedExchange]) -> dict[str, Any]:
        progress = task.progress()
        last = found[-1] if found else None
        inside = None if last is None or last.done else last
        waits = inside is not None and inside.waiting_for != NOBODY
        return {
            "task": task.name,
            "pid": task.pid,
            "step": progress.step,
            "stage": _stage(task, progress.step, progress.blocked_in),
            "exchange": str(inside) if inside else None,
            "exchanges": last.number if last else 0,
            "bytes": sum(exchange.nbytes for exchange in found),
            "seconds": time.monotonic() - inside.begun if inside else None,
            "waiting_for": f"worker {inside.waiting_for}" if inside and waits else None,
            "own_s": own_seconds(found),
            "input_s": input_seconds(found),
            "waiting": waiting_share(found),
        }


def _stage(task: TaskFiles, step: int, blocked_in: str) -> str:
    if not task.pid:
        return _STAGES[NOT_UP]
    if task.has_ended():
        return "ended"
    if task.stopped():
        return "stopped by a signal"
    return f"in {blocked_in}" if blocked_in else _STAGES.get(step, "training")


def sentence(late: Missing, tasks: Sequence[TaskFiles], stacks_s: float) -> str:
    """Sentence on the task for which the others wait, and its position in the code."""
    task = next(task for task in tasks if task.name == late.task)
    if task.has_ended():
        return f"{late}; it has ended"
    if task.stopped():
        return f"{late}; it is stopped by a signal"
    where = innermost(task.stacks(stacks_s))
    return f"{late}; its stack: {where}" if where else str(late)


def innermost(stacks: str) -> str:
    """The innermost frames of the user's code: "train.py:31 in slow_map < train.py:40 in main".

    Args:
        stacks: output of faulthandler: the frames of each thread, the most recent call first.
    """
    threads = [
        [match for line in thread.splitlines() if (match := _FRAME.match(line))]
        for thread in stacks.split("\n\n")
    ]
    # Most threads run TensorFlow or tfmw: the one nearest to the user's code is most informative.
    nearest = min(threads, key=_depth)
    own = [frame for frame in nearest if not is_installed(frame["file"])] or nearest
    return " < ".join(
        f"{os.path.basename(frame['file'])}:{frame['line']} in {frame['function']}"
        for frame in own[:_SHOWN_FRAMES]
    )


def _depth(thread: Sequence[re.Match[str]]) -> int:
    """Number of frames above the user's innermost one."""
    found = (i for i, frame in enumerate(thread) if not is_installed(frame["file"]))
    return next(found, sys.maxsize)
