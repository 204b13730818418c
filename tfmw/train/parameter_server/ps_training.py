"""Training loop's driver for parameter servers: steps on workers, weights on demand."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfmw.cluster.membership import JoinedCluster
from tfmw.compat import models, placement
from tfmw.compat.metric_variables import assign_row, metric_variables, packed, python_logs
from tfmw.errors import UsageError
from tfmw.observe.step_times import StepTimes
from tfmw.train.arguments import FitArguments
from tfmw.train.fit_context import FitContext
from tfmw.train.loop import DriverState, Reads, Rows
from tfmw.train.parameter_server import worker_data
from tfmw.train.parameter_server.coordinator import PsDriver


class ParameterServerTraining:
    """Training steps on the workers of a cluster; a `tfmw.train.loop.Driver`.

    The user's model stays on the coordinator. The servers' values are copied into it when they are
    needed: after an epoch, for a backup, at the end.

    Args:
        arguments: arguments of the call; `steps_per_epoch` counts updates, over all workers. By
            default they are as many as take all batches of the data, if their number is known.
        record: record of the backup from which the run resumes, or None.

    Raises:
        UsageError: `steps_per_epoch` is missing for data of unknown length, or parameter servers do
            not support an optimizer or layer.
    """

    trains_in_place = False
    unplaced_model = None  # callbacks get the user's model, which is always an ordinary one

    def __init__(
        self,
        context: FitContext,
        arguments: FitArguments,
        servers: JoinedCluster,
        record: dict[str, Any] | None,
    ):
        placement.refuse_raw_variables(context.model)
        placement.refuse_saved_models(context.model)
        self.model = context.model
        self.strategy = tf.distribute.get_strategy()
        self.group = context.group
        self.steps_per_epoch = _steps_per_epoch(arguments, servers)
        self.batch_size = arguments.batch_size
        self.steps_done = 0
        self.times: StepTimes | None = None  # workers make the steps
        self.signals: list[float] = []
        self._source = arguments.source
        self._servers = servers
        self.driver: PsDriver  # driver of the steps, set by `start`
        self._stack = contextlib.ExitStack()
        position = (None if record is None else record["feed"]) or {}
        self._restored_steps: int = position.get("done", 0)
        self._model_is_read = True
        self._is_current = True  # whether the user's model has the servers' weights
        self._finished = False
        self._dropped_before = 0
        if models.needs_build(self.model):
            context.build(self.element_spec)

    def __enter__(self) -> ParameterServerTraining:
        self._stack.enter_context(models.unseeded_generator())
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    @functools.cached_property
    def element_spec(self) -> Any:
        """Structure of tf.TensorSpec for one batch."""
        return worker_data.for_workers(self._source, 1)[1]

    # ------------------------------------------------------------ what the loop asks

    @property
    def examples(self) -> int:
        """Number of examples of all steps so far, over all workers."""
        return self.driver.examples if hasattr(self, "driver") else 0

    @property
    def at_epoch_end(self) -> bool:
        return self.steps_done >= self.steps_per_epoch

    def start(self, reads: Reads) -> None:
        # Workers run many steps between two calls of the coordinator, whatever hooks callbacks
        # have.
        self._model_is_read = reads.model
        self.driver = PsDriver(self.model, self._servers, self._source)

    def resume(self, tensors: Mapping[str, Any] | None) -> None:
        """Restores only the number of updates, as workers read their data from the start."""
        if tensors is not None:
            self.steps_done = self._restored_steps

    def begin_epoch(self, kept: Rows | None, trains: bool = True) -> None:
        if kept is not None:  # moving averages exist on the servers only
            assign_row(map(models.native, metric_variables(self.model)), kept[0][-1])
        self.share_changes()
        if trains:
            self.steps_done, self._restored_steps = self._restored_steps, 0
            self._dropped_before = self.driver.dropped or 0

    def train(
        self, max_steps: int, on_begin: Callable[[int], None], on_end: Callable[[], bool]
    ) -> None:
        begun = self.steps_done

        def after(steps: int) -> bool:
            self.steps_done = begun + steps
            on_begin(self.steps_done - 1)
            return on_end()

        self._is_current = False
        limit = min(max_steps, self.steps_per_epoch - begun)
        self.steps_done = begun + self.driver.train(limit, after)

    def end_epoch(self, complete: bool = True) -> None:
        if self._model_is_read:
            self._fetch(slots=False)

    def metrics(self, signals: tuple[float, ...] = ()) -> dict[str, Any]:
        self.signals = list(signals)
        logs = python_logs(self.model.get_metrics_result())
        if self.driver.dropped is not None:
            logs["dropped_gradients"] = float(self.driver.dropped - self._dropped_before)
        return logs

    def from_chief(self, numbers: Sequence[float]) -> list[float]:
        return list(numbers)  # only the coordinator runs the loop

    def share_changes(self) -> None:
        if not self._finished:
            self.driver.server_variables.push()

    def slot_parts(self) -> None:
        """Returns None, as the coordinator fetches the servers' slots."""

    def state(self, in_epoch: bool, slots: bool) -> DriverState:
        self._fetch(slots)
        values = [models.native(v).numpy() for v in metric_variables(self.model)]
        metrics = packed(2, [np.stack([value, value]) for value in values])  # as of one replica
        position = {"done": self.steps_done if in_epoch else 0, "begun": in_epoch}
        return DriverState((metrics, metrics[:, :0]), position)

    def finish(self) -> None:
        self._fetch(slots=True)
        self._finished = True

    def _fetch(self, slots: bool) -> None:
        """Fetches weights, unless no step has changed them since the last fetch."""
        if not self._finished:
            self.driver.server_variables.fetch(weights=not self._is_current, slots=slots)
        self._is_current = True


def _steps_per_epoch(arguments: FitArguments, servers: JoinedCluster) -> int:
    """Number of updates in an epoch: by default as many as take all batches of the data."""
    if arguments.steps_per_epoch is not None:
        return arguments.steps_per_epoch
    batches = worker_data.number_of_batches(arguments.source)
    if batches is None:
        raise UsageError(
            "steps_per_epoch was not given, and the number of batches of the data is not known: "
            "workers of parameter servers read the data at their own pace, so only a number of "
            "updates ends an epoch; pass steps_per_epoch=..., for example examples // batch_size."
        )
    return -(-batches // (servers.settings.replicas_to_aggregate or 1))
