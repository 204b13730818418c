"""The training loop: epochs, callbacks, validation, backups and stopping, over any driver.

    on each epoch:
        reset or restore the metrics
        callbacks.on_epoch_begin
        the chief decides (stop, learning rate); changes of callbacks are sent to all replicas
        until the end of the epoch:
            the driver runs steps, at most up to the next due backup
                callbacks.on_train_batch_begin / on_train_batch_end around each of its calls
            save, if a backup is due
        the driver ends the epoch; validate; save or exit between its calls, after a signal
        callbacks.on_epoch_end; the chief decides; save, if a backup is due

All tasks run the same loop and make the same calls of the driver.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import keras
import numpy as np
import tensorflow as tf

from tfmw.cluster.group import Group
from tfmw.compat import models
from tfmw.compat.metric_variables import python_logs
from tfmw.compat.model_methods import saves_by_callbacks
from tfmw.errors import UsageError
from tfmw.observe import goodput
from tfmw.observe.progress import blocking_call, report_progress
from tfmw.observe.step_times import StepTimes
from tfmw.storage import fence
from tfmw.train.arguments import FitArguments
from tfmw.train.callbacks.log import begin_traces
from tfmw.train.callbacks.roles import may_read_optimizer, wants_every_batch
from tfmw.train.checkpoint import state
from tfmw.train.checkpoint.resume import Backups, PythonState
from tfmw.train.checkpoint.tensor_files import SlotParts
from tfmw.train.pace import last_batch_number
from tfmw.train.reporter import Reporter

Logs = dict[str, Any]


Rows = tuple[Any, Any]
"""Replica-local state: rows of metrics, and of moving averages; see `ReplicaState.rows`."""


@dataclasses.dataclass(frozen=True)
class Reads:
    """State that code other than the driver reads during a run."""

    every_batch: bool  # whether callbacks run between batches
    model: bool  # whether the user's model is read between epochs
    optimizer: str  # when callbacks may read its slots: "never", after "epochs" or "steps"


@dataclasses.dataclass(frozen=True)
class DriverState:
    """The state of a driver in a backup, in addition to the model's."""

    rows: Rows
    position: dict[str, Any]  # position in the data, as JSON
    tensors: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class Driver(Protocol):
    """Runs the training steps of the loop."""

    model: keras.Model
    # the strategy on which its variables are placed during the training
    strategy: tf.distribute.Strategy
    group: Group  # the tasks that run the loop
    batch_size: int | None  # size of the global batch, if known

    @property
    def trains_in_place(self) -> bool:
        """Whether each step assigns to the model's own variables."""

    @property
    def times(self) -> StepTimes | None:
        """The time of this task's steps by its parts; None if it makes no steps."""

    @property
    def signals(self) -> list[float]:
        """Sums over tasks of the signals in the last call of `metrics`."""

    @property
    def steps_done(self) -> int:
        """Number of steps of this epoch so far."""

    @property
    def at_epoch_end(self) -> bool:
        """Whether it is known that the epoch has no further step."""

    def start(self, reads: Reads) -> None:
        """Prepares the driver; called before the first epoch."""

    def resume(self, tensors: Mapping[str, Any] | None) -> None:
        """Restores the position in the data at which the backup was taken.

        Args:
            tensors: tensors of the backup, on the chief. None if its run was complete: the user's
                data is left as that run has left it.
        """

    def begin_epoch(self, kept: Rows | None, trains: bool = True) -> None:
        """Sends callbacks' changes of the chief's model to all replicas, and starts an epoch.

        Args:
            kept: replica-local state of the backup, if the epoch was interrupted.
            trains: whether the epoch has remaining steps.
        """

    def train(
        self, max_steps: int, on_begin: Callable[[int], None], on_end: Callable[[], bool]
    ) -> None:
        """Runs up to `max_steps` steps, fewer if the epoch ends.

        Args:
            on_begin: called before each call of the driver, with the number of its first step.
            on_end: called after each call that ran steps; returns whether to continue.
        """

    def end_epoch(self, complete: bool = True) -> None:
        """Copies the trained values into the user's model.

        Args:
            complete: whether the last step of the epoch has just run.
        """

    def metrics(self, signals: tuple[float, ...] = ()) -> Logs:
        """Logs of the steps since the last reset, over all replicas.

        Args:
            signals: signals of this task; see the property.
        """

    def from_chief(self, numbers: Sequence[float]) -> list[float]:
        """The chief's numbers, on every task. All tasks must call it."""

    def share_changes(self) -> None:
        """Sends callbacks' changes of the chief's model to all replicas."""

    def slot_parts(self) -> SlotParts | None:
        """This task's part of the state that no task has whole; None if there is none."""

    def state(self, in_epoch: bool, slots: bool) -> DriverState:
        """Updates the user's model; returns the state of a backup that is not in it.

        Args:
            in_epoch: whether an epoch has started and not ended.
            slots: whether the chief gets what no task has whole, too.
        """

    def finish(self) -> None:
        """Copies the final values into the user's model; called after the last epoch."""


@dataclasses.dataclass(frozen=True)
class ValidationSignals:
    """Signals during a validation: to save the state, or to exit."""

    local: Callable[[], tuple[float, ...]]  # signals of this task
    respond: Callable[[list[float]], None]  # called with their sums, after each call of the driver


def any_wants_every_batch(group: Group, callback_list: Any, kind: str) -> bool:
    """Whether callbacks of some task act between batches. A collective: all tasks must call it."""
    wants = (wants_every_batch(c, kind) for c in callback_list.callbacks)
    return any(group.from_all(any(wants)))


class TrainingLoop:
    """One run of `fit`.

    Args:
        driver: runs the steps; its variables are placed before `run`.
        backups: backups of this run, perhaps with one from which it resumes.
        callback_list: callbacks of this task.
        arguments: arguments of the call.
        validate: function that evaluates the model: (callbacks, signals) -> logs.
    """

    def __init__(
        self,
        driver: Driver,
        backups: Backups,
        callback_list: Any,
        arguments: FitArguments,
        validate: Callable[[Any, ValidationSignals | None], Logs] | None,
    ):
        self._driver = driver
        self._model = driver.model
        self._compiled = models.compiled_parts(driver.model)
        self._backups = backups
        self._callbacks = callback_list
        self._epochs = arguments.epochs
        self._initial_epoch = arguments.initial_epoch
        self._validation_freq = arguments.validation_freq
        self._validate = validate
        self._every_batch = False
        self._step = 0  # steps since the start of the run, over all epochs and resumes
        self._reporter = Reporter(driver.group.is_chief, driver.group.size)

    def run(self) -> None:
        """Trains from the initial epoch, or from the position of the backup, to the last epoch."""
        backups, callbacks = self._backups, self._callbacks.callbacks
        if backups.is_done(self._epochs):
            goodput.trains_from(backups.record["step"] if backups.record else 0)
            self._driver.resume(None)
            backups.restore_callbacks(callbacks, finished=True)
            backups.finished()
            return
        # Only the chief saves models in callbacks, unless one is set to run on all workers.
        chosen = any(getattr(c, "chief_only", None) is False for c in callbacks)
        with saves_by_callbacks(on_all_workers=chosen):
            self._run()
        if backups.on:
            self._save(self._epochs, done=True)
            backups.finished()
            state.forget_callbacks(callbacks)

    def _run(self) -> None:
        self._start()
        logs: Logs | None = None
        complete = self._initial_epoch
        for epoch in range(self._initial_epoch, self._epochs):
            found = self._begin_epoch(epoch)
            logs = self._train_epoch(epoch) if found is None else found
            complete = epoch + 1
            if self._end_epoch(epoch, logs):
                break
        self._driver.finish()
        if self._driver.group.is_chief:  # before callbacks write
            fence.check()
        self._reporter.end(self._step, complete, logs)
        self._callbacks.on_train_end(logs=logs)
        self._driver.share_changes()

    def _start(self) -> None:
        driver, found, callbacks = self._driver, self._backups.record, self._callbacks.callbacks
        self._every_batch = any_wants_every_batch(driver.group, self._callbacks, "train")
        begin_traces(callbacks, 0 if found is None else found["step"])
        driver.start(Reads(self._every_batch, self._is_model_read(), self._optimizer_read()))
        if found is not None:
            self._initial_epoch, self._step = found["epoch"], found["step"]
            state.prepare_for_resume(callbacks, self._initial_epoch, self._step)
            if not (found.get("logs") and found["stopped"]):  # otherwise no step remains
                driver.resume(self._backups.tensors)
        elif fence.attempt():
            state.forget_attempt(callbacks, self._initial_epoch, goodput.began())
        self._model.stop_training = False
        if self._backups.on:
            state.note_callbacks(callbacks)
        with self._keeping_variables(found is not None):
            self._callbacks.on_train_begin()
        if found is None:
            # Callbacks may have restored their own state, and set the next epoch.
            requested = driver.group.from_chief(lambda: models.requested_initial_epoch(self._model))
            self._initial_epoch = requested or self._initial_epoch
        if self._backups.on:
            state.note_callbacks(callbacks)
        goodput.trains_from(self._step)

    def _is_model_read(self) -> bool:
        """Whether callbacks or validation read the model between epochs."""
        silent = keras.callbacks.History | keras.callbacks.ProgbarLogger
        others = any(not isinstance(c, silent) for c in self._callbacks.callbacks)
        return self._backups.on or self._validate is not None or others

    def _optimizer_read(self) -> str:
        """Value of `Reads.optimizer`."""
        readers = list(filter(may_read_optimizer, self._callbacks.callbacks))
        after_steps = any(map(wants_every_batch, readers))
        local = "steps" if after_steps else "epochs" if readers else "never"
        return max(self._driver.group.from_all(local), key=("never", "epochs", "steps").index)

    def _keeping_variables(self, resumed: bool) -> contextlib.AbstractContextManager[None]:
        """Undoes changes of callbacks at the beginning of a resumed run: the backup has them."""
        if not resumed:
            return contextlib.nullcontext()
        return state.keeping_variables(self._model, self._driver.strategy)

    def _begin_epoch(self, epoch: int) -> Logs | None:
        """Starts an epoch; returns the logs of its steps if only its validation was interrupted."""
        driver, backups, callbacks = self._driver, self._backups, self._callbacks.callbacks
        found = backups.record
        resumed = found is not None and epoch == self._initial_epoch
        done = found.get("logs") if found is not None and epoch == found["epoch"] else None
        inside = done is not None or (resumed and found is not None and found["feed"]["begun"])
        if resumed and not inside:
            backups.restore_callbacks(callbacks)
        self._model.reset_metrics()
        with self._keeping_variables(inside):
            self._callbacks.on_epoch_begin(epoch)
        kept = None
        if inside:
            backups.restore_callbacks(callbacks)
            kept = backups.kept_by_replicas()
        self._follow_chief()
        driver.begin_epoch(kept, trains=done is None)
        if found is None or done is None:
            return None
        driver.end_epoch(complete=False)
        self._model.stop_training = found["stopped"]
        return python_logs({name: np.array(v, dtype) for name, (dtype, v) in done.items()})

    def _train_epoch(self, epoch: int) -> Logs:
        driver, backups = self._driver, self._backups
        begun_at = self._step - driver.steps_done
        logs: Logs = {}
        self._refuse_compiled_anew()

        def on_end() -> bool:
            nonlocal logs
            self._step = begun_at + driver.steps_done
            logs = driver.metrics(backups.signals())
            report_progress(self._step)
            self._reporter.steps(self._step, epoch, logs, driver.times, backups.saved_at)
            backups.refuse_nan(logs, epoch, driver.steps_done)
            number = last_batch_number(
                driver.steps_done, self._model.steps_per_execution, driver.at_epoch_end
            )
            self._callbacks.on_train_batch_end(number, logs)
            if self._every_batch:
                self._refuse_compiled_anew()
                self._follow_chief()
            return not self._model.stop_training and not any(driver.signals)

        while not driver.at_epoch_end:
            max_steps = backups.limit(self._step, sys.maxsize)
            with goodput.phase("steps"):
                driver.train(max_steps, self._callbacks.on_train_batch_begin, on_end)
            self._step = begun_at + driver.steps_done
            if self._model.stop_training:
                driver.end_epoch(complete=False)
                return dict(logs)
            write = backups.due_after_step(self._step, driver.signals)
            if not driver.at_epoch_end and (write or any(driver.signals[2:])):
                self._save(epoch, in_epoch=True, write=write)
                if driver.signals[0]:
                    backups.leave(self._step)
        driver.end_epoch()
        return dict(logs) or driver.metrics()

    def _refuse_compiled_anew(self) -> None:
        """Raises UsageError if a callback has called `compile`, whose optimizer no step has."""
        now = models.compiled_parts(self._model)
        if any(a is not b for a, b in zip(now, self._compiled, strict=True)):
            raise UsageError(
                "a callback called model.compile() during fit, and the steps of this fit keep the "
                "optimizer, loss, metrics and trainable weights with which it began: call fit "
                "once for each stage, fit(..., epochs=3), then compile, then fit(..., epochs=6, "
                "initial_epoch=3)."
            )

    def _end_epoch(self, epoch: int, logs: Logs) -> bool:
        """Ends an epoch; returns whether it was the last one."""
        if self._validate is not None and models.should_validate(
            self._model, epoch, self._validation_freq
        ):
            results = self._validate(self._callbacks, self._validation_signals(epoch, logs))
            logs.update({f"val_{name}": value for name, value in results.items()})
        if self._driver.group.is_chief:  # before callbacks write
            fence.check()
        with blocking_call("callbacks"):
            self._callbacks.on_epoch_end(epoch, logs)
        self._follow_chief()
        last = self._model.stop_training or epoch + 1 == self._epochs
        due, leave = self._backups.due_after_epoch(epoch, self._step, last)
        if due:
            self._save(epoch + 1)
        if leave:
            self._backups.leave(self._step)
        return bool(last)

    def _validation_signals(self, epoch: int, logs: Logs) -> ValidationSignals | None:
        """Signals to save or exit between calls of a validation, which a resumed run repeats."""
        backups, callbacks = self._backups, self._callbacks.callbacks
        if not backups.on:
            return None
        python_state = backups.python_state(callbacks)  # validation calls callbacks
        saved = False

        def respond(signals: list[float]) -> None:
            nonlocal saved
            if any(signals[:2]) and not saved:
                self._save(epoch, logs=logs, python_state=python_state)
                saved = True
            if signals[0]:
                backups.leave(self._step)

        return ValidationSignals(backups.signals, respond)

    def _follow_chief(self) -> None:
        """Adopts the chief's decisions: whether to stop, and the learning rate."""
        model = self._model
        own = models.settable_learning_rate(model.optimizer)
        numbers = [float(bool(model.stop_training)), float(own is not None), own or 0.0]
        stop, settable, rate = self._driver.from_chief(numbers)
        model.stop_training = bool(stop)
        if settable and rate != own:
            model.optimizer.learning_rate = rate

    @goodput.phase("backups")
    def _save(
        self,
        epoch: int,
        in_epoch: bool = False,
        done: bool = False,
        logs: Logs | None = None,
        python_state: PythonState | None = None,
        write: bool = True,
    ) -> None:
        driver = self._driver
        parts = driver.slot_parts()
        if parts is not None and not self._backups.takes_parts:
            parts = None
        # A copy in memory has the shards of slots, wherever they are written.
        kept = driver.state(in_epoch, slots=write and parts is None)
        self._backups.save(
            driver,
            (*kept.rows, kept.tensors),
            self._callbacks.callbacks,
            {
                "epoch": epoch,
                "step": self._step,
                "done": done,
                "stopped": bool(self._model.stop_training),
                "feed": kept.position,
                "batch_size": driver.batch_size,
                "logs": None if logs is None else {n: _as_json(v) for n, v in logs.items()},
            },
            python_state,
            parts,
            write,
        )


def _as_json(value: Any) -> tuple[str, Any]:
    """(dtype, value) of a log: a scalar or an array."""
    array = np.asarray(value)
    return array.dtype.name, array.tolist()
