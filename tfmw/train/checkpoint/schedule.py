"""Schedule of backups: their frequency, and the thread that writes them."""

from __future__ import annotations

import contextlib
import datetime
import os
import re
import threading
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfmw.errors import UsageError, is_whole
from tfmw.observe import tracing
from tfmw.observe.progress import blocking_call

_UNITS = {
    **dict.fromkeys(("s", "sec", "second"), 1.0),
    **dict.fromkeys(("min", "minute"), 60.0),
    **dict.fromkeys(("h", "hour"), 3600.0),
}


class Schedule:
    """A backup frequency.

    Args:
        every: a number of steps (int), "epoch", "3 epochs", a time: "10 s", "5 min", "1 h", or a
            `datetime.timedelta`; or "continuous": as soon as the last backup is written.

    Attributes:
        steps, epochs, seconds: one of them is the frequency; the other two are None. No backup
            begins before the last is written, so 0.0 seconds means "continuous".

    Raises:
        UsageError: `every` has another value.
    """

    def __init__(self, every: Any):
        self.steps: int | None = None
        self.epochs: int | None = None
        self.seconds: float | None = None
        if every == "continuous":
            self.seconds = 0.0
            return
        match = None
        if isinstance(every, str):
            match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)?\s*([a-z]*?)s?\s*", every)
        number, unit = match.groups() if match else (None, "")
        whole = number is None or number.isdecimal()
        if isinstance(every, datetime.timedelta):
            self.seconds = every.total_seconds()
        elif is_whole(every):
            self.steps = every
        elif unit == "epoch" and whole:
            self.epochs = int(number or 1)
        elif unit == "step" and number and whole:
            self.steps = int(number)
        elif number and (unit in _UNITS or (not unit and every.strip().endswith("s"))):
            self.seconds = float(number) * _UNITS.get(unit, 1.0)
        if not any(v is not None and v > 0 for v in (self.steps, self.epochs, self.seconds)):
            raise UsageError(
                f"unknown backup frequency {every!r}: expected a number of steps, "
                '"epoch", "continuous", or a time such as "10 s" or "5 min".'
            )


_NICE = 10  # niceness of the writing thread: a tenth of a training thread's processor time


class BackgroundWriter:
    """Writes backups in the background, one at a time; training waits only for the copy.

    Args:
        write: called in the background with the arguments of `submit`.
        on_error: called in the background if `write` fails with an error of the disk.
    """

    def __init__(self, write: Callable[..., Any], on_error: Callable[[Exception], None]):
        self._write = write
        self._on_error = on_error
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    @property
    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def submit(self, *arguments: Any) -> None:
        """Starts a write, after the previous one has ended."""
        self.wait()
        self._thread = threading.Thread(
            target=self._run, args=arguments, name="tfmw-backup", daemon=True
        )
        self._thread.start()

    def wait(self) -> None:
        """Waits until all submitted backups are on disk or have failed.

        Raises:
            Exception: an error of the writer, except errors of the disk.
        """
        if self._thread is not None:
            with blocking_call("backup"):
                self._thread.join()
            self._thread = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def _run(self, *arguments: Any) -> None:
        with contextlib.suppress(OSError):
            # On Linux each thread has its own priority: training threads run first.
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        try:
            with tracing.span(tracing.OTHER, "backup"):
                self._write(*arguments)
        except (OSError, tf.errors.OpError) as e:
            self._on_error(e)
        except BaseException as e:  # `wait` raises it again, in the training thread
            self._failure = e
