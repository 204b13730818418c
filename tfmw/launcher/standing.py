"""Workers of a local cluster that run one call after the other.

    workers = StandingWorkers(2)
    results = workers.call(train, (10,))     # of each worker
    results = workers.call(evaluate)         # in the same processes
    workers.close()

An error in a call ends all workers, as other workers may wait for the one that has failed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

from tfmw.cluster.signals import LEAVE, Signals
from tfmw.launcher.attempt import Attempt
from tfmw.launcher.attempts import environment_of, make_context, run_result
from tfmw.launcher.call import Outcome, loaded, pack
from tfmw.launcher.options import LocalRun, RunOptions, task_layout
from tfmw.launcher.restart import RestartPolicy
from tfmw.launcher.result import Result
from tfmw.launcher.run import return_values

_POLL_S = 0.01  # most seconds between an answer and the end of the call
_LEAVE_S = 10.0  # time in which workers that have run all calls end together


class StandingWorkers:
    """Processes that join a cluster and then wait for calls.

    Args:
        workers: number of processes.

    Attributes:
        scratch: a folder for the caller, which ends with the workers or with this process.
        stopped: the signal after which workers ended the last call early, or would have; 0 if none.

    Raises:
        UsageError: a wrong number, or TF_CONFIG is set.
    """

    def __init__(self, workers: int):
        options = RunOptions()
        tasks = task_layout(workers, 0, False)
        self.stopped = 0
        self._process = os.getpid()
        # The first of these lets workers end a call early if they can save their state.
        self._stop = Signals(leave=(signal.SIGINT, *LEAVE))
        with self._stop, contextlib.ExitStack() as stack:
            self.scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="tfmw-fit-"))
            job = LocalRun(
                command=["call"],
                tasks=tasks,
                options=options,
                payload=(),
                stays=True,
                scratch=self.scratch,
            )
            self._context = make_context(job, environment_of(job), self._stop, stack)
            timeout_s = options.start_timeout_s or float("inf")
            self._context.spawner.wait(self._stop.received, timeout_s)
            policy = RestartPolicy(options, job.workers)
            self._attempt = Attempt(self._context, job.tasks, 0, policy)
            stack.callback(self._attempt.end)
            self._attempt.start()
            self._stack = stack.pop_all()
        if self._stop.received:
            return_values(*self._end())

    @property
    def alive(self) -> bool:
        """Whether all workers can run another call."""
        return not (self._stop.received or any(t.has_ended() for t in self._attempt.tasks))

    def call(self, fn: Callable[..., Any], args: Sequence[Any] = ()) -> list[Any]:
        """Runs `fn(*args)` in each worker, whose output goes to `sys.stdout`.

        Returns:
            The result of each worker, in order.

        Raises:
            UsageError: the function or its arguments cannot be sent.
            TaskFailed, Exception: a worker has ended, or raised an exception. All have ended.
            KeyboardInterrupt, Preempted: a signal has ended all workers.
        """
        payload = pack(fn, args)
        tasks = self._attempt.tasks
        self._context.display.out = sys.stdout
        with self._stop:
            for task in tasks:
                task.call(payload)
            waiting = list(tasks)
            while waiting and not self._attempt.poll(_POLL_S):
                waiting = [task for task in waiting if not task.has_answered()]
            if waiting:
                return return_values(*self._end())
            self._attempt.stay()
        self.stopped = next(iter(self._stop.received), 0)
        self._stop.received.clear()
        outcomes = [loaded(task.result()) for task in tasks]
        return [outcome[0] for outcome in outcomes if outcome is not None]

    def close(self) -> None:
        """Ends the workers, all together. May be called twice."""
        if os.getpid() != self._process:  # a fork of their process
            return
        with self._stop:
            for task in self._attempt.tasks:
                task.leave()
            deadline = time.monotonic() + _LEAVE_S
            while time.monotonic() < deadline and not self._attempt.poll(_POLL_S):
                pass
            self._end()

    def _end(self) -> tuple[Result, dict[str, Outcome | None]]:
        attempt = self._attempt
        attempt.end(0.0 if attempt.failures() and not self._stop.received else None)
        try:
            return run_result(self._context, attempt, attempt.failures())
        finally:
            self._stack.close()
