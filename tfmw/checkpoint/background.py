"""Writing in the background, while training goes on."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfmw.runtime import tracing
from tfmw.runtime.progress import blocking_call

_NICE = 10  # niceness of the writing thread: a tenth of a training thread's processor time


class BackgroundWriter:
    """Writes backups in the background, one at a time; training waits only for the copy.

    Args:
        write: called in the background with the arguments of `submit`.
        on_error: called in the background if `write` fails with an error of the disk.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        write: Callable[..., Any],
        on_error: Callable[[Exception], None],
        clock: Callable[[], float] = time.monotonic,
    ):
        self._write = write
        self._on_error = on_error
        self._clock = clock
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self.seconds = 0.0
        """Seconds that the last write took."""

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
        """Waits until everything submitted is on disk or has failed.

        Raises:
            Exception: an error of the writer other than one of the disk.
        """
        if self._thread is not None:
            with blocking_call("backup"):
                self._thread.join()
            self._thread = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def _run(self, *arguments: Any) -> None:
        start = self._clock()
        with contextlib.suppress(OSError):
            # On Linux each thread has its own priority: training threads run first.
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        try:
            with tracing.span(tracing.OTHER, "backup"):
                self._write(*arguments)
        except (OSError, tf.errors.OpError) as e:
            self._on_error(e)
        except BaseException as e:  # raised again by wait(), in the thread that trains
            self._failure = e
        self.seconds = self._clock() - start
