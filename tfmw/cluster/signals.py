"""Signals to the launcher: recorded when they arrive, handled between two polls of the tasks."""

from __future__ import annotations

import signal
import threading
from collections.abc import Collection
from types import FrameType
from typing import Any

LEAVE = (signal.SIGTERM, signal.SIGUSR1)
"""Signals of preemption: schedulers send them before they take the machine away."""

STACKS = signal.SIGRTMIN + 5
"""The signal at which a task writes the stacks of its threads into a file."""

STACKS_FILE = "TFMW_STACKS_FILE"
"""Variable with the path of that file: <attempt>/<task>/stacks."""


class Signals:
    """Records SIGINT, SIGTERM, SIGHUP and SIGUSR1 inside a `with`; they do not end the process.

    Only the main thread can set handlers. In other threads nothing is recorded, and signals have
    their usual effect. An ignored signal (nohup) stays ignored.

    Args:
        leave: signals after which tasks may save their state.
    """

    def __init__(self, leave: Collection[int] = LEAVE) -> None:
        self.received: list[int] = []
        self._leave = leave
        self._before: dict[int, Any] = {}

    @property
    def asks_to_leave(self) -> bool:
        """Whether only one signal has arrived, after which tasks may save their state."""
        return len(self.received) == 1 and self.received[0] in self._leave

    @property
    def hurry(self) -> bool:
        """Whether a second signal has arrived."""
        return len(self.received) > 1

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGHUP, *LEAVE):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received.append(number)
