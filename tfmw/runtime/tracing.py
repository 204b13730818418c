"""One trace of all workers: steps, input, exchanges, backups and other long calls, on one clock.

    tfmw run --workers 4 --trace DIR --trace-steps 100:110 train.py      # DIR/trace.json

Each task appends its events to DIR/<task>.<attempt>.jsonl, named by TFMW_TRACE, while its step is
within TFMW_TRACE_STEPS. The launcher joins them in Chrome's format, which Perfetto
(ui.perfetto.dev) opens. Times are monotonic, and so on one clock for the tasks of one machine.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tfmw.errors import UsageError

TRACE, TRACE_STEPS = "TFMW_TRACE", "TFMW_TRACE_STEPS"

# Rows of a worker in the trace, in order.
STEPS, INPUT, EXCHANGES, OTHER = "steps", "input", "exchanges", "other"
_ROWS = (STEPS, INPUT, EXCHANGES, OTHER)


def window(text: str) -> tuple[int, int]:
    """The first step and the one after the last of "100:110"; either may be left out.

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


class _Tracer:
    """The events of this process."""

    def __init__(self) -> None:
        self._directory: str | None = None
        self._window = (0, sys.maxsize)
        self._step = 0
        self.on = False  # whether events are kept
        self._events: list[dict[str, Any]] = []

    def is_wanted(self, environ: Mapping[str, str] = os.environ) -> bool:
        """Whether a trace is asked for: then each call of the driver runs one step."""
        return bool(environ.get(TRACE))

    def at_step(self, step: int) -> None:
        """Sets how many steps are done, and writes the events so far."""
        directory = os.environ.get(TRACE)
        if directory != self._directory:
            if self._directory is None:
                atexit.register(self._write)
            self._directory = directory
            self._window = window(os.environ.get(TRACE_STEPS) or "0:")
        self._step = max(step, 0)
        begin, end = self._window
        self.on = directory is not None and begin <= self._step < end
        self._write()

    @property
    def step(self) -> int:
        return self._step

    def add(self, row: str, name: str, begin: float, end: float, **details: Any) -> None:
        """Adds an event; its times are monotonic seconds."""
        if self.on:
            times = {"begin": begin, "end": end}
            self._events.append({"row": row, "name": name, **times, "details": details})

    def _write(self) -> None:
        if self._directory is None or not self._events:
            return
        task = os.environ.get("TFMW_TASK", "worker 0").replace(" ", "_")
        path = Path(self._directory, f"{task}.{os.environ.get('TFMW_ATTEMPT', '0')}.jsonl")
        with contextlib.suppress(OSError):  # a full disk must not end the training
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "a") as file:
                file.writelines(json.dumps(event) + "\n" for event in self._events)
        self._events.clear()


_tracer = _Tracer()
is_wanted, at_step, add = _tracer.is_wanted, _tracer.at_step, _tracer.add


def is_on() -> bool:
    """Whether events are kept at this step."""
    return _tracer.on


def current_step() -> int:
    """The number of steps that are done."""
    return _tracer.step


@contextlib.contextmanager
def span(row: str, name: str) -> Iterator[None]:
    """An event around a call."""
    begin = time.monotonic()
    try:
        yield
    finally:
        add(row, name, begin, time.monotonic())


def join(directory: Path) -> Path | None:
    """Joins the events of all tasks in <directory>/trace.json; None if there are none."""
    events: list[dict[str, Any]] = []
    paths = sorted(directory.glob("*.jsonl"))
    tasks = sorted({path.name.partition(".")[0] for path in paths})
    for path in paths:
        task = tasks.index(path.name.partition(".")[0])
        for line in path.read_text().splitlines():
            with contextlib.suppress(ValueError):  # the last line of a task that was killed
                events.append(_event(task, json.loads(line)))
    if not events:
        return None
    names = [
        _named("process_name", task, 0, name.replace("_", " ")) for task, name in enumerate(tasks)
    ]
    names += [
        _named("thread_name", task, row, name)
        for task in range(len(tasks))
        for row, name in enumerate(_ROWS)
    ]
    text = json.dumps({"traceEvents": [*names, *events], "displayTimeUnit": "ms"})
    out = directory / "trace.json"
    out.write_text(text)
    for path in paths:
        path.unlink()
    return out


def _event(task: int, found: Mapping[str, Any]) -> dict[str, Any]:
    """A complete event of Chrome's trace format; its times are microseconds."""
    return {
        "ph": "X",
        "pid": task,
        "tid": _ROWS.index(found["row"]),
        "cat": found["row"],
        "name": found["name"],
        "ts": 1e6 * found["begin"],
        "dur": 1e6 * (found["end"] - found["begin"]),
        "args": found["details"],
    }


def _named(what: str, task: int, row: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": task, "tid": row, "name": what, "args": {"name": name}}
