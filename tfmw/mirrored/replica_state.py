"""Replica-local state between steps: moving averages, and metrics so far."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfmw.keras_compat import models, placement
from tfmw.keras_compat.metric_variables import metric_variables
from tfmw.mirrored.replicas import Replicas, Traces


class ReplicaState:
    """The float variables that layers update in a step, separately on each replica (batch norm).

    Attributes:
        assigned: the variables that training steps assign; None until a step has been traced.
    """

    def __init__(self, model: keras.Model, replicas: Replicas, traces: Traces):
        self.assigned: list[Any] | None = None
        self._model = model
        self._replicas = replicas
        self._traces = traces

    def all_variables(self) -> list[Any]:
        """The variables that a step may update."""
        return [
            v for v in models.state_variables_of(self._model) if models.native(v).dtype.is_floating
        ]

    def variables(self) -> list[Any]:
        """The variables that a step updates; before the first trace, those that it may update."""
        state = self.all_variables()
        if self.assigned is None:
            return state
        return [v for v in state if any(v is a for a in self.assigned)]

    def average(self) -> None:
        """Sets the variables to their mean over replicas, on every replica.

        The mean commutes with a moving average, so this may run at any time between steps. It runs
        before the variables are read. A collective: all workers must call it.
        """
        if self._replicas.count == 1 or not self.variables():
            return
        run = self._replicas.strategy.run
        self._traces.get(
            "average",
            lambda: self._traces.function(
                lambda: run(lambda: self.average_on_replica(self.variables()))
            ),
        )()

    def average_on_replica(self, variables: list[Any]) -> None:
        """Sets variables to their mean over replicas. In a replica context."""
        values = [tf.identity(models.native(v).read_value()) for v in variables]
        for variable, total in zip(variables, self._replicas.sum(values), strict=True):
            mean = total / tf.cast(self._replicas.count, total.dtype)
            models.native(variable).assign(mean)

    def _groups(self) -> tuple[list[Any], list[Any]]:
        return metric_variables(self._model), self.all_variables()

    def rows(self) -> tuple[tf.Tensor, tf.Tensor]:
        """One row per replica: float64 [replicas, values] of metrics, and of moving averages.

        A collective: all workers must call it.
        """

        def on_replica() -> list[tf.Tensor]:
            nothing = tf.zeros([0], tf.float64)
            flat = [
                [tf.reshape(tf.cast(v.value, tf.float64), [-1]) for v in variables]
                for variables in self._groups()
            ]
            return self._replicas.rows([tf.concat([nothing, *values], axis=0) for values in flat])

        def on_all() -> list[tf.Tensor]:
            return [self._replicas.first_result(t) for t in self._replicas.strategy.run(on_replica)]

        metrics, averages = self._traces.get("rows", lambda: self._traces.function(on_all))()
        return metrics, averages

    def restore(self, metrics: np.ndarray, averages: np.ndarray) -> None:
        """Restores a result of `rows`.

        With another number of replicas, the first one gets the sum of the metrics, and all get the
        mean of the averages.

        Args:
            metrics, averages: [replicas of the interrupted run, values].
        """
        count, sharding = self._replicas.count, self._replicas.sharding
        if len(metrics) != count:
            summed = np.zeros([count, metrics.shape[1]])
            summed[0] = metrics.sum(axis=0)
            metrics = summed
            averages = np.repeat(averages.mean(axis=0, keepdims=True), count, axis=0)
        for variables, rows in zip(self._groups(), (metrics, averages), strict=True):
            for local in range(sharding.local_replicas):
                row, start = rows[sharding.local.start + local], 0
                for variable in variables:
                    copy = placement.local_copies(self._replicas.strategy, variable)[local]
                    size = int(np.prod(copy.shape.as_list()))
                    value = row[start : start + size].reshape(copy.shape.as_list())
                    copy.assign(tf.cast(value, copy.dtype))
                    start += size
