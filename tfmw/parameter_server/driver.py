"""The parameter-server driver: fit on the coordinator, steps on the workers, weights on servers.

    on each epoch:
        until all of its steps are scheduled:
            coordinator.schedule(many steps)       # whichever worker is free takes it
            add up the metrics of those that are done
        top up what a lost worker did not do       # exactly steps_per_epoch updates
        copy the weights to the user's model       # for validation, callbacks, backups
        callbacks, as in Keras

Asynchronous training has no order of batches that one process would have, so its numbers are not
those of one process. What is promised: each epoch applies exactly `steps_per_epoch` updates, the
metrics are those of the batches that were trained on, and a worker may die at any moment.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import logging
import threading
import time
import uuid
from collections.abc import Callable
from concurrent import futures
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfmw import callbacks as callbacks_lib
from tfmw import data, keras_compat
from tfmw.callbacks.progress import with_progress
from tfmw.checkpoint import state
from tfmw.checkpoint.resume import Backups
from tfmw.cluster import servers as ps_cluster
from tfmw.cluster.group import Group
from tfmw.errors import UsageError
from tfmw.export import export
from tfmw.keras_compat import placement
from tfmw.parameter_server import worker_data
from tfmw.parameter_server.accumulators import SynchronousSteps
from tfmw.parameter_server.steps import WorkerSteps
from tfmw.parameter_server.variables import Masters
from tfmw.runtime.progress import report_progress

logger = logging.getLogger("tfmw")

_SECONDS_PER_FUNCTION = 0.5
_MOST_STEPS_PER_FUNCTION = 1000
_ASK_AGAIN_S = 0.05
_AHEAD = 2  # functions scheduled for each worker, so that none waits for the coordinator


class PsDriver:
    """Runs training steps of a model on the workers of a parameter-server cluster.

    Args:
        model: compiled and built, with its optimizer built.
        servers: the cluster.
        source: what workers read.

    Attributes:
        applied: updates since this driver began.
        examples: that workers computed since then, those of dropped gradients too.
    """

    def __init__(self, model: keras.Model, servers: ps_cluster.Joined, source: data.Source):
        self.model = model
        self.applied = 0
        self.examples = 0
        self._servers = servers
        self._coordinator = servers.coordinator
        self._workers = len(servers.cluster.workers)
        self.masters = Masters(model, len(servers.cluster.ps), servers.settings.partition)
        self._steps = self._worker_steps(f"tfmw/{uuid.uuid4().hex}")
        makers, spec = worker_data.for_workers(source, self._workers)
        self._iterator = keras_compat.worker_iterators(self._coordinator, makers, spec)
        self._pace = _Pace(model.steps_per_execution)
        self._numbers: Any = None

    def _worker_steps(self, name: str) -> WorkerSteps | SynchronousSteps:
        settings = self._servers.settings
        if not settings.sync_replicas:
            return WorkerSteps(self.model, self.masters, name)
        aggregate = settings.replicas_to_aggregate or self._workers
        return SynchronousSteps(self.model, self.masters, name, self._workers, aggregate)

    def train(self, steps: int, after: Callable[[int], bool]) -> int:
        """Applies exactly `steps` updates, fewer only where `after` ends it.

        Args:
            after: called on this thread when more steps are done, with how many since this call
                began; returns whether to go on.

        Returns:
            Updates applied.
        """
        if isinstance(self._steps, SynchronousSteps):
            return self._train_together(self._steps, steps, after)
        begun, target = self.applied, self.applied + steps
        done = 0
        going = True
        while going and self.applied < target:
            # Tickets that a lost worker took are given out again: only applied ones count.
            self.masters.tickets.assign(self.applied)
            limit = tf.constant(target, tf.int64)
            left = target - self.applied
            waiting: collections.deque[Any] = collections.deque()
            while waiting or (left > 0 and going):
                while going and left > 0 and len(waiting) < _AHEAD * self._workers:
                    most = self._pace.next(left, self._workers)
                    waiting.append(self._schedule(most, limit))
                    left -= most
                result = _fetched(waiting.popleft(), self._is_over)
                made = self._add_up(result)
                self._pace.took(float(result["seconds"]), made)
                done += made
                if made:
                    report_progress(begun + done)
                    going = after(min(done, steps)) and going
            self._coordinator.join()
            self.applied = int(self.masters.applied.numpy())
        return self.applied - begun

    def _train_together(
        self, together: SynchronousSteps, steps: int, after: Callable[[int], bool]
    ) -> int:
        """The same with updates that wait for several workers: all of `steps` in one go.

        A worker that is behind holds nobody up but at the end, so there are no ends in between.
        """
        self.masters.push_scalars()
        limit = tf.constant(self.applied + steps, tf.int64)
        seeds = [tf.cast(s.numpy(), tf.uint32) for s in self.masters.seeds]
        if self._numbers is None:
            self._numbers = keras_compat.worker_constants(
                self._coordinator, list(range(self._workers))
            )
        results = [
            self._coordinator.schedule(
                together.function, args=(self._iterator, self._numbers, limit, seeds)
            )
            for _ in range(self._workers)
        ]
        wait, cancel = together.advance(steps)
        advancing = _in_background(wait)
        over = threading.Event()
        fetching = [_in_background(functools.partial(_fetched, r, over.is_set)) for r in results]
        try:
            futures.wait([advancing, *fetching], return_when=futures.FIRST_EXCEPTION)
            if any(_failed(call) for call in (advancing, *fetching)):
                # The others wait for that worker's gradient. TensorFlow cancels them in `join`, and
                # waits for their end; but one that was about to begin would not hear of it.
                _in_background(together.give_up)
            if _failed(advancing) and not any(map(_failed, fetching)):
                advancing.result()
            self._coordinator.join()  # raises the first error of a worker
            fetched = [call.result() for call in fetching]
            advancing.result()
        except BaseException:
            over.set()
            cancel()  # where a server is gone this does not reach it: nobody waits for the thread
            raise
        for result in fetched:
            self._add_up(result)
        self.applied = int(self.masters.applied.numpy())
        report_progress(self.applied)
        after(steps)
        return steps

    @property
    def dropped(self) -> int | None:
        """Gradients that came too late for their step, so far; None without `sync_replicas`."""
        return self._steps.dropped if isinstance(self._steps, SynchronousSteps) else None

    def _schedule(self, most: int, limit: tf.Tensor) -> Any:
        self.masters.push_scalars()
        seeds = [tf.cast(s.numpy(), tf.uint32) for s in self.masters.seeds]
        return self._coordinator.schedule(
            self._steps.function,
            args=(self._iterator, tf.constant(most, tf.int64), limit, seeds),
        )

    def _is_over(self) -> bool:
        self._coordinator.done()  # raises where something else went wrong
        return False

    def _add_up(self, result: dict[str, Any]) -> int:
        """Takes what a function counted into the model's own metrics, here and nowhere else."""
        for variable, gained in zip(self._steps.metrics, result["metrics"], strict=True):
            keras_compat.native(variable).assign_add(gained)
        for variable, drawn in zip(self.masters.seeds, result["draws"], strict=True):
            own = keras_compat.native(variable)
            own.assign(own + tf.cast(drawn, own.dtype))
        self.examples += int(result["examples"])
        return int(result["steps"])

    def logs(self) -> dict[str, Any]:
        """Metrics of all steps since the last reset."""
        results = self.model.get_metrics_result()
        return {name: _python(value) for name, value in results.items()}


class _Pace:
    """How many steps a scheduled function makes, from how long steps take."""

    def __init__(self, steps_per_execution: int):
        self._fixed = steps_per_execution if steps_per_execution > 1 else None
        self._most = 1

    def next(self, left: int, workers: int) -> int:
        """Steps of the next function, of `left` that remain in the epoch."""
        if self._fixed is not None:
            return min(self._fixed, left)
        # Towards the end of an epoch in smaller pieces, so that workers end it together.
        return min(left, max(1, self._most // 4, min(self._most, left // (2 * workers))))

    def took(self, seconds: float, steps: int) -> None:
        """Hears how long a worker computed. How long its work had to wait says nothing of steps."""
        if not steps:
            return
        enough = int(_SECONDS_PER_FUNCTION / max(seconds / steps, 1e-6))
        self._most = max(1, min(enough, self._most * 8, _MOST_STEPS_PER_FUNCTION))


def fit(
    model: keras.Model,
    servers: ps_cluster.Joined,
    source: data.Source,
    *,
    epochs: int,
    verbose: Any,
    callbacks: Any,
    validate: Callable[[], dict[str, float]] | None,
    validation_freq: Any,
    initial_epoch: int,
    steps_per_epoch: int | None,
    backup: callbacks_lib.BackupAndRestore | None,
    export_dir: Any,
) -> keras.callbacks.History:
    """Trains `model` on parameter servers; see `tfmw.fit`, which calls this on the coordinator.

    Args:
        servers: the cluster.
        source: what workers read, each of them all of it, in its own order.
        validate: evaluates the model as it is on the coordinator; returns the logs.
        backup: where the state is saved, and where an interrupted run goes on from.
        epochs, verbose, callbacks, validation_freq, initial_epoch, steps_per_epoch, export_dir: as
            in `tfmw.fit`; `steps_per_epoch` counts updates, over all workers.

    Raises:
        UsageError: no `steps_per_epoch`, or an optimizer or layer that cannot be trained so.
    """
    if steps_per_epoch is None:
        raise UsageError(
            "steps_per_epoch was not given: parameter-server training has no end of the data, as "
            "each worker reads all of it at its own pace; pass steps_per_epoch=..., the number of "
            "updates in an epoch, for example examples // batch_size."
        )
    placement.refuse_raw_variables(model)
    alone = Group(0, 1)
    with contextlib.ExitStack() as stack:
        backups = stack.enter_context(Backups.of(alone, backup))
        _build(model, source)
        backups.restore(model, source.batch_size)
        driver: PsDriver | None = None
        mine = callbacks_lib.for_task(callbacks, True, 1)
        shows = verbose != 0 and not backups.is_done(epochs)
        callback_list = keras.callbacks.CallbackList(
            with_progress(mine, shows, verbose, lambda: driver.examples if driver else 0),
            add_history=True,
            add_progbar=shows,
            verbose=verbose,
            epochs=epochs,
            steps=steps_per_epoch,
            model=model,
        )
        if backups.is_done(epochs):
            backups.restore_callbacks(callback_list.callbacks, finished=True)
            backups.finished()
        else:
            driver = PsDriver(model, servers, source)
            run = _Run(driver, backups, callback_list, steps_per_epoch, validate, validation_freq)
            run.train(keras_compat.requested_initial_epoch(model) or initial_epoch, epochs)
    history: keras.callbacks.History = model.history
    if export_dir is not None:
        export(model, export_dir)
    return history


class _Run:
    """The loop of fit."""

    def __init__(
        self,
        driver: PsDriver,
        backups: Backups,
        callback_list: Any,
        steps: int,
        validate: Callable[[], dict[str, float]] | None,
        validation_freq: Any,
    ):
        self._driver = driver
        self._backups = backups
        self._callbacks = callback_list
        self._steps = steps
        self._validate = validate
        self._validation_freq = validation_freq
        self._step = 0  # since the run began, over all resumes
        # Whether somebody looks at the weights between epochs: large tables take long to fetch.
        self._looked_at = (
            backups.on
            or validate is not None
            or any(
                not isinstance(c, keras.callbacks.History | keras.callbacks.ProgbarLogger)
                for c in callback_list.callbacks
            )
        )

    def train(self, initial_epoch: int, epochs: int) -> None:
        model, backups, driver = self._driver.model, self._backups, self._driver
        found, callbacks = backups.record, self._callbacks.callbacks
        unchanged: Callable[[], Any] = contextlib.nullcontext
        made = 0
        if found is not None:
            initial_epoch, self._step = found["epoch"], found["step"]
            made = (found["feed"] or {}).get("made", 0)
            state.prepare_for_resume(callbacks, initial_epoch)
            # What callbacks set when something begins, they have set before.
            unchanged = functools.partial(state.unchanged, model, tf.distribute.get_strategy())
        model.stop_training = False
        backups.note_callbacks(callbacks)
        with unchanged():
            self._callbacks.on_train_begin()
        backups.note_callbacks(callbacks)
        if found is not None:
            backups.restore_callbacks(callbacks)
        logs: dict[str, Any] | None = None
        for epoch in range(initial_epoch, epochs):
            if not made:
                model.reset_metrics()
            with unchanged() if made else contextlib.nullcontext():
                self._callbacks.on_epoch_begin(epoch)
            driver.masters.push()
            logs = self._train_epoch(epoch, made)
            made = 0
            if self._looked_at:
                driver.masters.lower(slots=backups.on)
            if self._validate is not None and keras_compat.should_validate(
                model, epoch, self._validation_freq
            ):
                logs.update({f"val_{name}": v for name, v in self._validate().items()})
            self._callbacks.on_epoch_end(epoch, logs)
            last = model.stop_training or epoch + 1 == epochs
            due, leave = backups.due_after_epoch(epoch, self._step, last)
            if due:
                self._save(epoch + 1)
            if leave:
                backups.leave(self._step)
            if last:
                break
        driver.masters.lower(weights=not self._looked_at, slots=True)
        self._callbacks.on_train_end(logs=logs)
        if backups.on:
            self._save(epochs, done=True)
            backups.finished()
            state.forget_callbacks(callbacks)

    def _train_epoch(self, epoch: int, made: int) -> dict[str, Any]:
        """Makes the steps of an epoch that are left; backups in between are taken at rest."""
        driver, backups, model = self._driver, self._backups, self._driver.model
        dropped = driver.dropped
        while made < self._steps:
            most = backups.limit(self._step, self._steps - made)
            heard = [0.0, 0.0]

            def after(done: int, made: int = made, heard: list[float] = heard) -> bool:
                heard[:] = backups.signals()
                return self._after(epoch, made + done) and not any(heard)

            new = driver.train(most, after)
            made += new
            self._step += new
            if model.stop_training:
                break
            if made < self._steps and backups.due_after_step(self._step, heard):
                driver.masters.lower(slots=True)
                self._save(epoch, made=made)
                if heard[0]:
                    backups.leave(self._step)
        logs = driver.logs()
        if dropped is not None and driver.dropped is not None:
            logs["dropped_gradients"] = float(driver.dropped - dropped)
        return logs

    def _after(self, epoch: int, done: int) -> bool:
        """Tells callbacks how far the epoch is; returns whether to go on."""
        model = self._driver.model
        self._callbacks.on_train_batch_begin(done - 1)
        logs = self._driver.logs()
        self._backups.refuse_nan(logs, epoch, done)
        self._callbacks.on_train_batch_end(done - 1, logs)
        return not model.stop_training

    def _save(self, epoch: int, made: int = 0, done: bool = False) -> None:
        nothing: Any = np.zeros([1, 0], np.float64)  # no replica keeps anything to itself
        self._backups.save(
            self._step,
            self._driver.model,
            tf.distribute.get_strategy(),
            (nothing, nothing),
            self._callbacks.callbacks,
            {
                "epoch": epoch,
                "step": self._step,
                "done": done,
                "stopped": bool(self._driver.model.stop_training),
                "feed": {"made": made},
                "batch_size": None,
            },
            busy=False,  # steps assign to the servers' variables
        )


def _build(model: keras.Model, source: data.Source) -> None:
    """Creates all variables that Keras would create on the first batch."""
    if not keras_compat.needs_build(model):
        return
    makers, spec = worker_data.for_workers(source, 1)
    del makers
    keras_compat.build_all(model, spec)


def _in_background(call: Callable[[], Any]) -> futures.Future[Any]:
    """Calls on a thread that does not keep the process alive."""
    outcome: futures.Future[Any] = futures.Future()

    def run() -> None:
        try:
            outcome.set_result(call())
        except BaseException as e:
            outcome.set_exception(e)

    threading.Thread(target=run, name="tfmw-steps", daemon=True).start()
    return outcome


def _fetched(result: Any, over: Callable[[], bool]) -> dict[str, Any]:
    """What a function returned. A worker may die with a result that nobody has taken yet.

    Its function then runs again elsewhere, and TensorFlow puts the new result in its place;
    meanwhile only asking again tells.

    Args:
        over: called in between: whether nobody waits for the result any more.
    """
    while True:
        try:
            fetched: dict[str, Any] = result.fetch()
            return fetched
        except tf.errors.OpError as e:
            if not keras_compat.is_worker_failure(e) or over():
                raise
            time.sleep(_ASK_AGAIN_S)


def _failed(call: futures.Future[Any]) -> bool:
    return call.done() and call.exception() is not None


def _python(value: Any) -> Any:
    array = np.asarray(value)
    return float(array) if array.ndim == 0 else array
