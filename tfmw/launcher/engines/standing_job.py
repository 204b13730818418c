"""Tasks of a job that run one call after the other: `tfmw.Workers(4, on="slurm")`.

    workers = JobWorkers(engine, 4)          # in the caller's process
    results = workers.call(train, (10,))     # of each task

The two exchange files of the job. The caller writes `call-1`, `leave-1` to have the tasks end it
early, and `caller` as a sign of life. The job's controller sends the call to the tasks, and writes
`answer-1` with the result of each.
"""

from __future__ import annotations

import dataclasses
import io
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tfmw.cluster.signals import LEAVE, Signals
from tfmw.errors import Preempted, TaskFailed
from tfmw.launcher import call
from tfmw.launcher.engines import own_files, submit
from tfmw.launcher.engines.engine import Engine
from tfmw.launcher.engines.job import BACKUP, ENDED, Output
from tfmw.launcher.engines.job_attempt import JobAttempt
from tfmw.launcher.output import is_watched

CALLER = "caller"
"""File whose content the caller changes from time to time."""

SILENCE_S = 60.0
"""Seconds without a sign of life of the caller, after which its job ends."""

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
        self._output = Output(self.job)
        self._process = os.getpid()
        self._calls = 0  # number of calls so far
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
        self._calls += 1
        asked = False  # whether the tasks were asked to end the call early
        self.job.write(f"call-{self._calls}", packed.getbuffer())
        with Signals(leave=(signal.SIGINT, *LEAVE)) as stop:
            while (outcomes := self.job.outcomes(f"answer-{self._calls}")) is None:
                self._output.copy(sys.stdout)
                if (problem := self._problem()) is not None:
                    self._fail(problem)
                if stop.received and not asked:
                    asked = True
                    self.job.write(f"leave-{self._calls}", b"leave")
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

    def _beat(self) -> None:
        while not self._closed.wait(_BEAT_S):
            try:
                self.job.write(CALLER, str(time.monotonic()).encode())
            except Exception:  # the next one may be written, or the job has ended
                continue


@dataclasses.dataclass
class Calls:
    """The caller of a job whose tasks stay, as the job's controller sees it."""

    folder: Path  # directory of the job's files
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._last, self._heard_at = b"", self.clock()
        self._number = 0  # number of the last call

    @property
    def caller_gone(self) -> bool:
        """Whether the caller has given no sign of life for a while."""
        if (data := own_files.read(self.folder, CALLER)) != self._last:
            self._last, self._heard_at = data, self.clock()
        return self.clock() - self._heard_at > SILENCE_S

    def look(self, attempt: JobAttempt) -> None:
        """Passes on the requests of the caller, and the answers once all tasks have answered."""
        if call := self._take(f"call-{self._number + 1}"):
            self._number += 1
            attempt.call(self._number, call)
        if self._take(f"leave-{self._number}"):
            attempt.ask_to_leave()
        if len(attempt.answers) == attempt.count:
            answers = [attempt.answers.pop(rank) for rank in range(attempt.count)]
            own_files.write(self.folder / f"answer-{self._number}", pickle.dumps(answers))
            (self.folder / f"answer-{self._number - 1}").unlink(missing_ok=True)

    def _take(self, name: str) -> bytes:
        """Reads and removes a file of the caller; b"" if there is none."""
        if data := own_files.read(self.folder, name):
            (self.folder / name).unlink()
        return data
