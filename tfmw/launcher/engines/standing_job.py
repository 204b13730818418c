"""Tasks of a job that run one call after the other: `tfmw.Workers(4, on="slurm")`.

    workers = JobWorkers(engine, 4)          # in the caller's process
    results = workers.call(train, (10,))     # of each task

The job's controller sends each call to the tasks; see `standing_calls.py` for the files.
"""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from tfmw.cluster.signals import LEAVE, Signals
from tfmw.errors import Preempted, TaskFailed
from tfmw.launcher import call
from tfmw.launcher.engines import submit
from tfmw.launcher.engines.engine import Engine
from tfmw.launcher.engines.job import BACKUP, ENDED
from tfmw.launcher.engines.standing_calls import CALLER
from tfmw.launcher.output import is_watched

_BEAT_S = 5.0  # interval of the caller's signs of life
_POLL_S = 0.05


class JobWorkers:
    """Tasks of a job that wait for calls; it has the methods of `StandingWorkers`.

    Args:
        engine: the engine that runs the job.
        workers: number of tasks, or (least, most).

    Attributes:
        job: the job.
        scratch: the folder for the caller's temporary files; None: the system's.
        stopped: the signal after which tasks ended the last call early, or would have; 0 if none.
    """

    scratch = None

    def __init__(self, engine: Engine, workers: int | tuple[int, int]):
        self.job = submit.start(
            engine, (), workers, max_restarts=0, live=is_watched(sys.stdout), stays=True
        )
        print(f"tfmw: {self.job.where}", file=sys.stderr, flush=True)
        self.stopped = 0
        self._output = self.job.output()
        self._process = os.getpid()
        self._said = {"beats": 0, "calls": 0, "leave": 0}
        self._saying = threading.Lock()
        self._closed = threading.Event()
        threading.Thread(target=self._beat, name="tfmw-caller", daemon=True).start()

    @property
    def alive(self) -> bool:
        """Whether all tasks can run another call."""
        return not self._closed.is_set() and self._problem() is None

    def call(self, fn: Callable[..., Any], args: Sequence[Any] = ()) -> list[Any]:
        """Runs `fn(*args)` in each task, whose output goes to `sys.stdout`.

        Returns:
            The result of each task, in order.

        Raises:
            UsageError: the function or its arguments cannot be sent.
            TaskFailed, Exception: a task has ended, or raised an exception. All have ended.
            KeyboardInterrupt, Preempted: a second signal has ended all tasks.
        """
        packed = io.BytesIO()
        call.write(call.pack(fn, args), packed)
        number = self._said["calls"] + 1
        self.job.write(f"call-{number}", packed.getbuffer())
        self._say(calls=number)
        with Signals(leave=(signal.SIGINT, *LEAVE)) as stop:
            while (outcomes := self.job.outcomes(f"answer-{number}")) is None:
                self._output.copy(sys.stdout)
                if (problem := self._problem()) is not None:
                    self._fail(problem)
                if stop.received and self._said["leave"] != number:
                    self._say(leave=number)
                if stop.hurry:
                    self.close()
                    interrupted = stop.received[0] == signal.SIGINT
                    raise KeyboardInterrupt if interrupted else Preempted("all tasks were ended")
                time.sleep(_POLL_S)
        self._output.copy(sys.stdout)
        self.stopped = next(iter(stop.received), 0)
        return [outcome[0] for outcome in outcomes if outcome is not None]

    def forget_backup(self) -> None:
        """Removes the backup that the job has kept of an earlier call."""
        self.job.write(BACKUP, b"")

    def close(self) -> None:
        """Ends the job. May be called twice."""
        if os.getpid() != self._process or self._closed.is_set():  # a fork of the process
            return
        self._closed.set()
        self.job.cancel()
        self.job.forget()

    def _problem(self) -> str | None:
        """The reason why the job can run no call, or None."""
        found = self.job.details()
        if found["state"] in ENDED:
            return str(found.get("problem") or found["state"])
        return "its tasks were started again" if found.get("attempt", 0) else None

    def _fail(self, problem: str) -> None:
        """Raises the error that has ended the job."""
        try:
            if self.job.status() in ENDED:
                self._output.copy(sys.stdout)
                self.job.result()
            raise TaskFailed(f"{self.job.id} cannot continue the call: {problem}.")
        finally:
            self.close()

    def _say(self, **known: int) -> None:
        with self._saying:
            self._said = {**self._said, **known}
            self.job.write(CALLER, json.dumps(self._said).encode())

    def _beat(self) -> None:
        while not self._closed.wait(_BEAT_S):
            try:
                self._say(beats=self._said["beats"] + 1)
            except Exception:  # the next one may be written, or the job has ended
                continue
