"""Coordinator of a parameter-server cluster: schedules steps and adds up their metrics.

    driver = PsDriver(model, servers, source)
    applied = driver.train(100, after)

    until all steps are scheduled:
        coordinator.schedule(many steps)       # on the next free worker
        add up the metrics of finished functions
    schedule again the steps that a lost worker did not do

Asynchronous training has no fixed order of batches, so its results are not those of one process. It
guarantees that each epoch applies exactly `steps_per_epoch` updates, and that the metrics belong to
the batches that were trained on. A worker may die at any moment.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import threading
import time
from collections.abc import Callable
from concurrent import futures
from typing import Any

import keras
import tensorflow as tf

from tfmw import data
from tfmw.cluster.membership import JoinedCluster
from tfmw.compat import models, parameter_servers
from tfmw.observe.progress import blocking_call, report_alive
from tfmw.train.pace import FunctionPace
from tfmw.train.parameter_server import worker_data
from tfmw.train.parameter_server.accumulators import SynchronousSteps
from tfmw.train.parameter_server.lookups import RowTransfer
from tfmw.train.parameter_server.steps import UNROLLED, WorkerSteps
from tfmw.train.parameter_server.variables import ServerVariables

_RETRY_S = 0.05
# number of functions scheduled for each worker, so that no worker waits for the coordinator
_AHEAD = 2
_REPORT_S = 1.0
# seconds of synchronous steps between two waits of all workers for the slowest
_SECONDS_TOGETHER = 5.0
_PATIENCE_S = 0.1  # time to wait for workers that may be late
_WAITING = "waiting for workers"


class PsDriver:
    """Runs training steps of a model on the workers of a parameter-server cluster.

    Args:
        model: a compiled and built model, with its optimizer built.

    Attributes:
        applied: number of updates since this driver began.
        examples: number of examples since then, including those of dropped gradients.
    """

    def __init__(self, model: keras.Model, servers: JoinedCluster, source: data.Source):
        self.applied = 0
        self.examples = 0
        self._coordinator = servers.coordinator
        self._workers = len(servers.cluster.workers)
        settings = servers.settings
        self.server_variables = ServerVariables(model, len(servers.cluster.ps), settings.partition)
        self._steps: WorkerSteps
        if (aggregate := settings.replicas_to_aggregate) is not None:
            self._steps = SynchronousSteps(self.server_variables, self._workers, aggregate)
        else:
            travel = RowTransfer(settings.prefetch_rows, settings.row_compression)
            self._steps = WorkerSteps(self.server_variables, self._workers, travel)
        makers, spec = worker_data.for_workers(source, self._workers)
        self._iterator = parameter_servers.worker_iterators(self._coordinator, makers, spec)
        self._pace = FunctionPace(model.steps_per_execution, UNROLLED)
        self._together_steps = 1
        self._numbers: Any = None
        self._late: list[futures.Future[Any]] = []  # functions that have not returned
        self._is_failed = False

    def train(self, steps: int, after: Callable[[int], bool]) -> int:
        """Applies exactly `steps` updates, fewer only if `after` returns False.

        Args:
            after: called on this thread when more steps are done, with the number of steps since
                the start of this call; returns whether to continue.

        Returns:
            Number of updates applied.
        """
        if isinstance(self._steps, SynchronousSteps):
            return self._train_together(self._steps, steps, after)
        begun, target = self.applied, self.applied + steps
        done = 0
        going = True
        while going and self.applied < target:
            # Tickets of a lost worker are issued again: only applied ones count.
            self.server_variables.tickets.assign(self.applied)
            left = target - self.applied
            waiting: collections.deque[Any] = collections.deque()
            while waiting or (left > 0 and going):
                while going and left > 0 and len(waiting) < _AHEAD * self._workers:
                    max_steps = self._pace.next_steps(left, self._workers)
                    waiting.append(self._schedule(tf.constant(max_steps, tf.int64), target))
                    left -= max_steps
                with blocking_call(_WAITING):
                    result = _fetched(waiting.popleft(), self._is_over)
                made = self._add_up(result)
                self._pace.took(float(result["seconds"]), made)
                done += made
                if made:
                    going = after(min(done, steps)) and going
            with blocking_call(_WAITING):
                self._coordinator.join()
            self.applied = int(self.server_variables.applied.numpy())
        return self.applied - begun

    def _train_together(
        self, synchronous: SynchronousSteps, steps: int, after: Callable[[int], bool]
    ) -> int:
        """Trains with synchronous updates, in portions of some seconds; see `train`.

        At each call of `after` all workers wait for the slowest, except for as many as are spare.
        A late worker's metrics are added when it returns, at the latest at the end.
        """
        begun, going = self.applied, True
        while going and self.applied < begun + steps:
            piece = min(begun + steps - self.applied, self._together_steps)
            start = time.monotonic()
            self._advance(synchronous, piece)
            enough = int(_SECONDS_TOGETHER * piece / max(time.monotonic() - start, 1e-6))
            self._together_steps = max(1, min(enough, 8 * self._together_steps))
            going = after(self.applied - begun)
        if self._late:
            self._wait_for(synchronous, [], lambda: None)
        return self.applied - begun

    def _advance(self, synchronous: SynchronousSteps, steps: int) -> None:
        """Applies exactly `steps` synchronous updates."""
        if self._numbers is None:
            self._numbers = parameter_servers.worker_constants(
                self._coordinator, list(range(self._workers))
            )
        for _ in range(self._workers - len(self._late)):  # a late worker is still in its function
            result = self._schedule(self._numbers, self.applied + steps)
            fetch = functools.partial(_fetched, result, lambda: self._is_failed)
            self._late.append(_in_background(fetch))
        wait, cancel = synchronous.advance(steps)
        self._wait_for(synchronous, [_in_background(wait)], cancel, late=synchronous.spare_workers)
        self.applied = int(self.server_variables.applied.numpy())

    def _wait_for(
        self,
        synchronous: SynchronousSteps,
        advancing: list[futures.Future[Any]],
        cancel: Callable[[], None],
        late: int = 0,
    ) -> None:
        """Waits for synchronous steps, and adds the metrics of the functions that have returned.

        Args:
            advancing: the call that applies the updates, if there is one.
            cancel: cancels that call.
            late: number of workers that need not return.
        """
        applied, calls = self.applied, [*advancing, *self._late]
        pending = set(calls)
        try:
            with blocking_call(_WAITING):
                while pending and not any(map(_failed, calls)):
                    enough = len(pending) <= late and pending.isdisjoint(advancing)
                    patience_s = _PATIENCE_S if enough else _REPORT_S
                    done, pending = futures.wait(pending, patience_s, futures.FIRST_COMPLETED)
                    if enough and not done:
                        break
                    with contextlib.suppress(tf.errors.OpError):  # a worker's own error comes first
                        if applied != (applied := int(self.server_variables.applied.numpy())):
                            report_alive()
            if any(map(_failed, calls)):
                # Other workers wait for that worker's gradient. `join` cancels their functions and
                # waits for their end, but does not cancel a function that is about to begin.
                _in_background(synchronous.cancel)
                if not any(map(_failed, self._late)):
                    advancing[0].result()
            if any(map(_failed, calls)) or all(call.done() for call in calls):
                self._coordinator.join()  # raises the first error of a worker
            for call in advancing:
                call.result()
            for call in [call for call in self._late if call.done()]:
                self._late.remove(call)
                self._add_up(call.result())
        except BaseException:
            self._is_failed = True
            cancel()  # has no effect on a lost server: its thread is abandoned
            raise

    @property
    def dropped(self) -> int | None:
        """Number of gradients that arrived late for their step; None if `sync_replicas` is off."""
        return self._steps.dropped if isinstance(self._steps, SynchronousSteps) else None

    def _schedule(self, steps_or_worker: Any, limit: int) -> Any:
        """Schedules the steps' function with its second argument, on the next free worker."""
        self.server_variables.push_scalars()
        seeds = [tf.cast(s.numpy(), tf.uint32) for s in self.server_variables.seeds]
        return self._coordinator.schedule(
            self._steps.function,
            args=(self._iterator, steps_or_worker, tf.constant(limit, tf.int64), seeds),
        )

    def _is_over(self) -> bool:
        self._coordinator.done()  # raises any other error
        return False

    def _add_up(self, result: dict[str, Any]) -> int:
        """Adds the metrics that a function returned to the model's own metrics."""
        self._steps.add_to_metrics(result["metrics"])
        for variable, drawn in zip(self.server_variables.seeds, result["draws"], strict=True):
            own = models.native(variable)
            own.assign(own + tf.cast(drawn, own.dtype))
        self.examples += int(result["examples"])
        return int(result["steps"])


def _in_background(call: Callable[[], Any]) -> futures.Future[Any]:
    """Runs a call on a thread that does not keep the process alive."""
    outcome: futures.Future[Any] = futures.Future()

    def run() -> None:
        try:
            outcome.set_result(call())
        except BaseException as e:
            outcome.set_exception(e)

    threading.Thread(target=run, name="tfmw-steps", daemon=True).start()
    return outcome


def _fetched(result: Any, over: Callable[[], bool]) -> dict[str, Any]:
    """Fetches the result of a function.

    If a worker dies before its result was fetched, TensorFlow runs the function again and replaces
    the result, without any notification. So this fetches repeatedly.

    Args:
        over: function called between two attempts; returns whether the result is no longer needed.
    """
    while True:
        try:
            fetched: dict[str, Any] = result.fetch()
            return fetched
        except tf.errors.OpError as e:
            if not parameter_servers.is_worker_failure(e) or over():
                raise
            time.sleep(_RETRY_S)


def _failed(call: futures.Future[Any]) -> bool:
    return call.done() and call.exception() is not None
