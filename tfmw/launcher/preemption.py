"""Asks tasks to save their state and exit, and limits the time for it.

The launcher forwards SIGTERM or SIGUSR1 to one task. Tasks that train together agree on the step
after which all of them exit with status 75.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence

from tfmw.errors import PREEMPTED
from tfmw.launcher.options import RunOptions
from tfmw.launcher.process import Task
from tfmw.runtime.signals import Signals

GRACE_S = 30.0
"""Seconds in which tasks save their state and exit: the default of `--preempt-grace`."""


class Preemption:
    """The preemption of one attempt, from the first signal on.

    Args:
        options: of the run.
        stop: the signals that the launcher has received.
    """

    def __init__(self, options: RunOptions, stop: Signals) -> None:
        self._options = options
        self._stop = stop
        self._deadline: float | None = None

    @property
    def begun(self) -> bool:
        """Whether tasks have been asked to exit, or one has exited."""
        return self._deadline is not None

    @property
    def overdue(self) -> bool:
        """Whether the tasks' time is over."""
        return self._deadline is not None and time.monotonic() >= self._deadline

    def begin(self) -> None:
        """Starts the tasks' time, once."""
        if self._deadline is None:
            grace_s = self._options.preempt_grace_s
            self._deadline = time.monotonic() + (GRACE_S if grace_s is None else grace_s)

    def waits(self, tasks: Sequence[Task]) -> bool:
        """Whether to wait for tasks that save their state; the first call signals one of them."""
        if not self._stop.asks_to_leave:
            return False
        if not self.begun:
            running = [task for task in tasks if not task.has_ended()]
            if not running or not self._saves_state(running):
                return False
            self.begin()
            running[0].signal_alone(signal.SIGTERM)
        return not self.overdue

    def ask(self, tasks: Sequence[Task]) -> bool:
        """Asks one task to leave, once that has a handler; whether one has been asked."""
        if not self.begun:
            ready = [task for task in tasks if not task.has_ended() and _has_handler(task)]
            if ready:
                self.begin()
                ready[0].signal_alone(signal.SIGTERM)
        return self.begun

    def _saves_state(self, running: Sequence[Task]) -> bool:
        """Whether tasks are expected to save their state on SIGTERM.

        TensorFlow installs a handler of SIGTERM, which saves nothing, in every task. So only a
        handler of SIGUSR1 shows it.
        """
        asked = self._options.max_restarts > 0 or self._options.preempt_grace_s is not None
        return asked or any(map(_has_handler, running))


def _has_handler(task: Task) -> bool:
    return task.catches(signal.SIGUSR1)


def was_preempted(tasks: Sequence[Task]) -> bool:
    """Whether a task exited with the status that requests another run."""
    return any(task.status == PREEMPTED for task in tasks)
