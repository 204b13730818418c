"""Calls of a job whose tasks stay, as its controller sees them; `standing_job.py` is the caller.

The two exchange files of the job. The caller writes `call-1`, then counts the call in
`caller.json`. The controller writes `answer-1` with the result of each task.
"""

from __future__ import annotations

import dataclasses
import json
import pickle
import time
from collections.abc import Callable
from pathlib import Path

from tfmw.launcher.engines import own_files

CALLER = "caller.json"
"""File of the caller: the number of its calls, and the last one that it has asked to end early."""

SILENCE_S = 60.0
"""Seconds without a sign of life of the caller, after which its job ends."""


@dataclasses.dataclass
class Calls:
    """The caller of a job whose tasks stay, as the job's controller sees it."""

    folder: Path  # directory of the job's files
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._last, self._heard_at = b"", self.clock()
        self._sent = self._left = 0
        self._answers: dict[int, bytes] = {}

    @property
    def caller_gone(self) -> bool:
        """Whether the caller has given no sign of life for a while."""
        if (data := own_files.read(self.folder, CALLER)) != self._last:
            self._last, self._heard_at = data, self.clock()
        return self.clock() - self._heard_at > SILENCE_S

    def look(self, send: Callable[[int, bytes], None], leave: Callable[[], None]) -> None:
        """Passes on what the caller asks for.

        Args:
            send: sends the call of a number to all tasks.
            leave: asks the tasks to end the call after the current step.
        """
        asked = json.loads(self._last or b"{}")
        if asked.get("calls", 0) > self._sent:
            self._sent += 1
            self._answers = {}
            name = f"call-{self._sent}"
            send(self._sent, own_files.read(self.folder, name))
            (self.folder / name).unlink()
        if asked.get("leave", 0) > self._left:
            self._left = asked["leave"]
            leave()

    def answered(self, count: int, rank: int, number: int, body: bytes) -> None:
        """Records the result of one of `count` tasks, and writes all once they are complete."""
        self._answers[rank] = body
        if len(self._answers) == count:
            answers = [self._answers[rank] for rank in range(count)]
            own_files.write(self.folder / f"answer-{number}", pickle.dumps(answers))
            (self.folder / f"answer-{number - 1}").unlink(missing_ok=True)
