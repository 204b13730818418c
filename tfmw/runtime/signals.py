"""Signals to the launcher, recorded and acted on between two looks at the tasks."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

LEAVE = (signal.SIGTERM, signal.SIGUSR1)
"""How schedulers say that the machine will be taken away: save your state, and leave."""


class Signals:
    """Notes SIGINT, SIGTERM, SIGHUP and SIGUSR1 instead of dying of them, inside a `with`.

    Only the main thread can set handlers; elsewhere this notes nothing, and a KeyboardInterrupt
    goes its usual way. A signal that is ignored (nohup) stays ignored.
    """

    def __init__(self) -> None:
        self.received: list[int] = []
        self._before: dict[int, Any] = {}

    @property
    def asks_to_leave(self) -> bool:
        """Whether one signal has come, and it asks to save and leave."""
        return len(self.received) == 1 and self.received[0] in LEAVE

    @property
    def hurry(self) -> bool:
        """Whether a second signal has come."""
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
