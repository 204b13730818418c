"""`tfmw.callbacks.Trace`: one file with the steps, input and exchanges of all workers."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import keras

from tfmw.callbacks.log import Training
from tfmw.errors import UsageError
from tfmw.runtime import tracing

logger = logging.getLogger("tfmw")


class Trace(keras.callbacks.Callback):
    """Writes a trace of all workers, on one clock: <directory>/trace.json, in Chrome's format.

    https://ui.perfetto.dev and chrome://tracing open it. It has the steps of each worker, its waits
    for input, its exchanges with other workers, and other long calls such as backups. Give it on
    all workers, like any callback; the chief writes the file when the training ends. While it is
    given, each call of the driver runs one step.

    Args:
        directory: that all workers see. An earlier trace in it is replaced.
        steps: the first step and the one after the last, counted from the start of the training;
            None for all.

    Raises:
        UsageError: `steps` are no such pair.

    Example:
        tfmw.fit(model, data, callbacks=[tfmw.callbacks.Trace("traces", steps=(100, 110))])
    """

    reads_optimizer = False

    def __init__(
        self, directory: str | os.PathLike[str], steps: tuple[int, int] | None = None
    ) -> None:
        super().__init__()
        begin, end = (0, sys.maxsize) if steps is None else steps
        if not 0 <= begin < end:
            raise UsageError(
                f"received steps={steps!r}: expected the first step and the one after the last, "
                "such as (100, 110)."
            )
        self.directory = os.path.abspath(directory)
        self.steps = begin, end
        self._training: Training | None = None

    def observe(self, training: Training) -> None:
        """Sets what it traces; `tfmw.fit` calls it."""
        self._training = training

    def begin(self, step: int) -> None:
        """Traces from this step on; the training loop calls it."""
        if self._training is not None:
            task = f"worker {self._training.rank}"
            tracing.start(self.directory, self.steps, task, step)

    def on_train_end(self, logs: Any = None) -> None:
        if self._training is None:  # Keras trains
            return
        training, self._training = self._training, None
        tracing.stop()
        training.meet()
        if training.rank == 0 and tracing.join(Path(self.directory)) is None:
            logger.warning(
                "no trace is written to %s: none of the steps %d to %d was trained, or parameter "
                "servers train, whose workers' steps are not traced",
                self.directory,
                *self.steps,
            )


def begin_traces(callbacks: Iterable[Any], step: int) -> None:
    """Starts the traces among the callbacks, before the driver decides how many steps a call has.

    Args:
        callbacks: of this task.
        step: training steps that are done.
    """
    tracing.at_step(step)
    for callback in callbacks:
        if isinstance(callback, Trace):
            callback.begin(step)
