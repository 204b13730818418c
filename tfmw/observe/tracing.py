"""One trace of all workers: steps, input, exchanges, backups and other long calls, on one clock.

    tfmw run --workers 4 --trace DIR --trace-steps 100:110 train.py      # DIR/trace.json
    tfmw.fit(..., callbacks=[tfmw.callbacks.Trace(DIR, steps=(100, 110))])

Each task appends its events to DIR/<task>.<attempt>.jsonl while its step is within the window. The
launcher, or the chief, joins them in Chrome's format, which Perfetto (ui.perfetto.dev) opens. Times
are monotonic, and so on one clock for the tasks of one machine. The first line of a file relates
them to the time of day, by which the clocks of several machines are compared.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tfmw.errors import UsageError

TRACE, TRACE_STEPS = "TFMW_TRACE", "TFMW_TRACE_STEPS"

# Rows of a worker in the trace, in order.
STEPS, INPUT, EXCHANGES, OTHER, BACKGROUND = "steps", "input", "exchanges", "other", "background"
_ROWS = (STEPS, INPUT, EXCHANGES, OTHER, BACKGROUND)

# random(4): the same for all processes of one machine
_BOOT = Path("/proc/sys/kernel/random/boot_id")


def window(text: str) -> tuple[int, int]:
    """The first step and the one after the last in "100:110"; either may be omitted.

    Raises:
        UsageError: it has another form.
    """
    first, colon, last = text.partition(":")
    try:
        begin, end = int(first or 0), int(last or sys.maxsize)
    except ValueError:
        begin, end = 0, 0
    if not colon or not 0 <= begin < end:
        raise UsageError(
            f"received --trace-steps {text}: expected the first step and the one after the last, "
            "such as 100:110."
        )
    return begin, end


_Target = tuple[str, tuple[int, int], str]
"""(directory, the first step and the one after the last, "worker 1")."""


class _Tracer:
    """The events of this process."""

    def __init__(self) -> None:
        self._chosen: _Target | None = None  # target chosen by `start`
        self._target: _Target | None = None
        self._file: Path | None = None  # file of the target
        self.step = 0  # number of completed steps
        self.thread = 0  # id of the thread that trains
        self.on = False  # whether events are recorded
        self._events: list[dict[str, Any]] = []

    def start(self, directory: str, steps: tuple[int, int], task: str, step: int) -> None:
        """Traces a target from now on, in place of the environment's; `step` steps are done."""
        self._chosen = directory, steps, task
        path = _path(directory, task)
        if not step:  # another run may have left some files
            for old in path.parent.glob(f"{path.name.partition('.')[0]}.*.jsonl"):
                old.unlink()
        self.at_step(step)

    def stop(self) -> None:
        """Writes the events since `start`, and stops tracing."""
        self._chosen = None
        self.at_step(self.step)

    def at_step(self, step: int) -> None:
        """Sets the number of completed steps, and writes the events so far."""
        self.write()
        target = self._chosen or _target_of_environment()
        if target != self._target:
            self._target = target
            self._file = None if target is None else _path(target[0], target[2])
        self.step, self.thread = max(step, 0), threading.get_ident()
        self.on = target is not None and target[1][0] <= self.step < target[1][1]

    def is_wanted(self) -> bool:
        """Whether a trace is requested: then each call of the driver runs one step."""
        return self._file is not None

    def add(self, row: str, name: str, begin: float, end: float, **details: Any) -> None:
        """Adds an event; its times are monotonic seconds."""
        if self.on:
            times = {"begin": begin, "end": end}
            self._events.append({"row": row, "name": name, **times, "details": details})

    def write(self) -> None:
        """Writes the events so far."""
        if self._file is None or not self._events:
            return
        events, self._events = self._events, []  # another thread may add some
        with contextlib.suppress(OSError):  # a full disk must not end the training
            self._file.parent.mkdir(parents=True, exist_ok=True)
            lines: list[dict[str, Any]] = [] if self._file.exists() else [_clock()]
            with open(self._file, "a") as file:
                file.writelines(json.dumps(line) + "\n" for line in [*lines, *events])


def _target_of_environment() -> _Target | None:
    directory, steps = os.environ.get(TRACE), os.environ.get(TRACE_STEPS)
    if not directory:
        return None
    return directory, window(steps or "0:"), os.environ.get("TFMW_TASK", "worker 0")


def _path(directory: str, task: str) -> Path:
    attempt = os.environ.get("TFMW_ATTEMPT", "0")
    return Path(directory, f"{task.replace(' ', '_')}.{attempt}.jsonl")


def _clock() -> dict[str, Any]:
    """Id of the machine of the monotonic clock, and the time of day at its zero."""
    boot = _BOOT.read_text().strip() if _BOOT.exists() else ""
    return {"machine": boot, "zero": time.time() - time.monotonic()}


tracer = _Tracer()
atexit.register(tracer.write)
start, stop, at_step, add = tracer.start, tracer.stop, tracer.at_step, tracer.add
is_wanted = tracer.is_wanted


@contextlib.contextmanager
def span(row: str, name: str) -> Iterator[None]:
    """Records an event around a call; other threads have rows of their own."""
    begin = time.monotonic()
    try:
        yield
    finally:
        row = row if threading.get_ident() == tracer.thread else BACKGROUND
        add(row, name, begin, time.monotonic())


def join(directory: Path) -> Path | None:
    """Merges the events of all tasks; returns <directory>/trace.json, None if there are none."""
    paths = sorted(directory.glob("*.jsonl"))
    tasks = sorted({path.name.partition(".")[0] for path in paths}, key=_in_order)
    events = []
    first: dict[str, Any] = {}  # the clock to which the others are shifted
    for path in paths:
        task, shift = tasks.index(path.name.partition(".")[0]), 0.0
        for line in _lines(path):
            if "machine" in line:
                first = first or line
                if line["machine"] != first["machine"]:
                    shift = line["zero"] - first["zero"]
            elif "row" in line:
                events.append(_event(task, line, shift))
    if not events:
        return None
    names = []
    for task, name in enumerate(tasks):
        names.append(_named("process_name", task, 0, name.replace("_", " ")))
        names += [_named("thread_name", task, _thread(task, row), row) for row in _ROWS]
    text = json.dumps({"traceEvents": [*names, *events], "displayTimeUnit": "ms"})
    out = directory / "trace.json"
    out.write_text(text)
    for path in paths:
        path.unlink()
    return out


def _in_order(task: str) -> tuple[str, int]:
    """Sort key of tasks: worker_2 before worker_10."""
    kind, _, index = task.rpartition("_")
    return (kind, int(index)) if index.isdigit() else (task, 0)


def _lines(path: Path) -> list[dict[str, Any]]:
    found = []
    for line in path.read_text().splitlines():
        with contextlib.suppress(ValueError):  # the last line of a killed task may be incomplete
            found.append(json.loads(line))
    return found


def _event(task: int, found: Mapping[str, Any], shift: float) -> dict[str, Any]:
    """A complete event of Chrome's trace format, with times in microseconds."""
    return {
        "ph": "X",
        "pid": task,
        "tid": _thread(task, found["row"]),
        "cat": found["row"],
        "name": found["name"],
        "ts": 1e6 * (found["begin"] + shift),
        "dur": 1e6 * (found["end"] - found["begin"]),
        "args": found["details"],
    }


def _thread(task: int, row: str) -> int:
    """Number of a row: for Perfetto 0, and a process's number, are its main one."""
    return 1000 * (task + 1) + _ROWS.index(row)


def _named(what: str, task: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": task, "tid": thread, "name": what, "args": {"name": name}}
