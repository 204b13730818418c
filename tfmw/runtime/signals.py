"""Signals to the launcher, handled between two polls of its tasks; stacks of tasks."""

from __future__ import annotations

import os
import re
import signal
import threading
from pathlib import Path
from types import FrameType
from typing import Any

LEAVE = (signal.SIGTERM, signal.SIGUSR1)
"""Signals of preemption: schedulers send them before they take the machine away."""

STACKS = signal.SIGRTMIN + 5
"""At this signal a task writes the stacks of its threads into a file."""

STACKS_FILE = "TFMW_STACKS_FILE"
"""Variable with the path of that file: <attempt>/<task>/stacks."""

_TFMW = str(Path(__file__).resolve().parents[1]) + os.sep
_LIBRARY = re.compile(r"/lib/python\d")


class Signals:
    """Records SIGINT, SIGTERM, SIGHUP and SIGUSR1 inside a `with`; they do not end the process.

    Only the main thread can set handlers. In other threads nothing is recorded, and signals have
    their usual effect. An ignored signal (nohup) stays ignored.
    """

    def __init__(self) -> None:
        self.received: list[int] = []
        self._before: dict[int, Any] = {}

    @property
    def asks_to_leave(self) -> bool:
        """Whether one signal has arrived, and it is one of preemption."""
        return len(self.received) == 1 and self.received[0] in LEAVE

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


def is_installed(file: str) -> bool:
    """Whether a file is of Python, of an installed package or of tfmw."""
    return (
        file.startswith(("<", _TFMW))
        or "site-packages" in file
        or _LIBRARY.search(file) is not None
    )


def users_call(frame: FrameType | None) -> str:
    """The call that the user's program is in: "evaluate at train.py:31"; "" if none is.

    Args:
        frame: the innermost one of a thread.
    """
    name = ""
    while frame is not None:
        code = frame.f_code
        if not is_installed(code.co_filename):
            return f"{name} at {code.co_filename}:{frame.f_lineno}" if name else ""
        name, frame = code.co_name, frame.f_back
    return ""
