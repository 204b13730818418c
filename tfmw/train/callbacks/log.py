"""`tfmw.callbacks.Log`, a function that gets logs and step times, and `Trace`, a file of events.

Both observe a training of `tfmw.fit`. The files of `keras.callbacks.TensorBoard` are flushed before
a backup, and truncated after a restart.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from tfmw.cluster.group import Group
from tfmw.compat import models
from tfmw.errors import UsageError
from tfmw.observe import goodput, tracing
from tfmw.observe.step_times import StepTimes
from tfmw.storage.disk import replacing

logger = logging.getLogger("tfmw")

Write = Callable[[dict[str, Any], int], Any]


class Observer(keras.callbacks.Callback):
    """A callback that observes a training of `tfmw.fit`; with Keras's `fit` it has fewer values."""

    reads_optimizer = False
    _group: Group | None = None  # None with Keras's `fit`
    _times: Callable[[], StepTimes | None]

    def observe(self, group: Group, times: Callable[[], StepTimes | None]) -> None:
        """Starts to observe a training of `tfmw.fit`.

        Args:
            group: the workers.
            times: returns the time of this worker's steps by its parts; None on parameter servers,
                whose coordinator makes no steps.
        """
        self._group, self._times = group, times


class Log(Observer):
    """Calls a function with the logs, and with the step time and its parts.

    It runs on every worker, each with its own times. Calls of MLflow and W&B reach the tracker from
    the chief only.

    Args:
        write: called with a dict and the number of training steps in this call of `fit`. The dict
            has Keras's logs ("loss", ...) and "rank", "workers", "steps_per_s", "examples_per_s"
            (over all workers), and the seconds of a step: "step_s" and its parts "input_s",
            "communication_s" and "compute_s", each as the mean since the last call. "goodput" is
            the share of the run's time, over all attempts, that went into steps; "run_steps_s",
            "run_data_s" and so on are the seconds of its parts. Parts that are not known yet are
            missing.
        every: "epoch", or a number of steps.

    Raises:
        UsageError: another value of `every`.

    Example:
        tfmw.fit(model, data, callbacks=[tfmw.callbacks.Log(lambda logs, step: print(step, logs))])
    """

    def __init__(self, write: Write, every: int | str = "epoch"):
        super().__init__()
        if every != "epoch" and (not isinstance(every, int) or every < 1):
            raise UsageError(f'received every={every!r}: expected "epoch" or a number of steps.')
        self.write = write
        self.every = every
        self._before: StepTimes | None = None
        self._steps = 0
        self._epochs_steps = 0  # number of steps of the earlier epochs

    def on_train_begin(self, logs: Any = None) -> None:
        self._note()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epochs_steps = self._steps

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        before, self._steps = self._steps, self._epochs_steps + batch + 1
        if isinstance(self.every, int) and self._steps // self.every > before // self.every:
            self._report(logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self.every == "epoch":
            self._report(logs)

    def _report(self, logs: Mapping[str, Any] | None) -> None:
        self.write({**(logs or {}), **self._own()}, self._steps)
        self._note()

    def _own(self) -> dict[str, Any]:
        if self._group is None:
            return {}
        now = goodput.division()
        own: dict[str, Any] = {"rank": self._group.rank, "workers": self._group.size}
        own |= {"goodput": now.goodput()}
        own |= {f"run_{part}_s": seconds for part, seconds in now.by_part().items()}
        times = self._times()
        split = None if times is None or self._before is None else times.since(self._before)
        if split is None:
            return own
        rates = {"steps_per_s": split.steps_per_s, "examples_per_s": split.examples_per_s}
        means = {name: s for name, s in split._asdict().items() if name.endswith("_s")}
        return own | rates | means

    def _note(self) -> None:
        if self._group is not None:
            times = self._times()
            self._before = None if times is None else times.copy()


class Trace(Observer):
    """Writes a trace of all workers, on one clock: <directory>/trace.json, in Chrome's format.

    https://ui.perfetto.dev and chrome://tracing open it. It has the steps of each worker, its waits
    for input, its exchanges with other workers, and other long calls such as backups. Pass it on
    all workers, like any callback; the chief writes the file when the training ends. With this
    callback each call of the driver runs one step.

    Args:
        directory: a directory that all workers share. An earlier trace in it is replaced.
        steps: the first step and the one after the last, counted from the start of the training;
            None for all.

    Raises:
        UsageError: `steps` is no such pair.

    Example:
        tfmw.fit(model, data, callbacks=[tfmw.callbacks.Trace("traces", steps=(100, 110))])
    """

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

    def on_train_end(self, logs: Any = None) -> None:
        if self._group is None:
            return
        group, self._group = self._group, None
        tracing.stop()
        group.from_all(None)
        if group.is_chief and tracing.join(Path(self.directory)) is None:
            logger.warning(
                "no trace is written to %s: none of the steps %d to %d was trained, or parameter "
                "servers train, whose workers' steps are not traced",
                self.directory,
                *self.steps,
            )


def begin_traces(callbacks: Iterable[Any], step: int) -> None:
    """Starts traces after `step` steps, before the driver chooses the number of steps of a call."""
    tracing.at_step(step)
    for callback in callbacks:
        if isinstance(callback, Trace) and callback._group is not None:
            task = f"worker {callback._group.rank}"
            tracing.start(callback.directory, callback.steps, task, step)


def flush_events(callbacks: Iterable[Any]) -> None:
    """Writes the events that TensorFlow buffers, of up to two minutes."""
    for callback in callbacks:
        callback = getattr(callback, "callback", callback)
        if isinstance(callback, keras.callbacks.TensorBoard):
            for writer in models.event_writers(callback):
                writer.flush()


def forget_events(board: keras.callbacks.TensorBoard, epoch: int, step: int) -> None:
    """Removes events of epochs and steps that will be trained again from event files.

    Args:
        board: the callback; it names its values by what counts their steps.
        epoch: the first epoch that is trained again, from 0.
        step: training steps that are not trained again.
    """
    if "://" in os.fspath(board.log_dir):
        return
    for path in Path(board.log_dir).glob("*/events.out.tfevents.*"):
        records = [record.numpy() for record in tf.data.TFRecordDataset(str(path))]
        kept = [record for record in records if not _is_repeated(record, epoch, step)]
        if len(kept) < len(records):
            with replacing(path) as temporary, tf.io.TFRecordWriter(temporary) as out:
                for record in kept:
                    out.write(record)


def _is_repeated(record: bytes, epoch: int, step: int) -> bool:
    """Whether an event holds a value of an epoch or a step that is repeated."""
    event = tf.compat.v1.Event.FromString(record)
    for value in event.summary.value:
        if value.tag.startswith("epoch_"):
            return bool(event.step >= epoch)
        if value.tag.startswith(("batch_", "evaluation_")):
            return bool(event.step > step)
    return False
