"""State of each replica between steps, and over all replicas: metrics, logs, moving averages.

Each replica updates its own copies of the metrics' variables. `ReplicaMetrics.result` combines
them by sum, maximum or minimum, and Keras computes the results from the combined values.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfmw.compat import losses, models, objects, placement
from tfmw.compat.graph import depends_on, function_of, is_symbolic
from tfmw.compat.metric_variables import (
    assign_flat,
    combination,
    leaf_metrics,
    metric_variables,
    note_metric_update,
    python_logs,
)
from tfmw.errors import UsageError
from tfmw.train.mirrored.replicas import Replicas, Traces


@dataclasses.dataclass(eq=False, repr=False)
class ReplicaMetrics:
    """The logs of a model's steps, over all replicas."""

    _model: keras.Model
    _replicas: Replicas
    _traces: Traces

    def __post_init__(self) -> None:
        self.signals: list[float] = []  # sums over tasks of the signals in the last `result`
        self._logs: dict[str, StepLogs] = {}
        # id of a metric's variable -> combination of the replicas' values
        self._combined: dict[int, str] = {}
        self._initial: dict[int, np.ndarray] | None = None

    def logs(self, kind: str) -> StepLogs:
        """The logs of "train" or "test" steps."""
        return self._logs.setdefault(kind, StepLogs())

    def note_update(self, variable: Any, value: Any) -> Any:
        """Records how replicas' values of a metric's variable are combined, from its update.

        Returns the value that the replica assigns.
        """
        if self._replicas.count == 1:
            return value
        if all(variable is not v for v in metric_variables(self._model)):
            return value  # see `assigned_weights`
        how = combination(variable, value)
        if how is None:
            raise UsageError(
                f"a metric updates its variable {variable.path!r} neither by addition nor by a "
                "maximum or minimum, so values of several replicas cannot be combined: keep sums "
                "and counts in variables, and divide in result()."
            )
        if how != "unchanged":
            self._combined[id(variable)] = how
        note_metric_update(variable, value)
        return value

    def reset(self) -> None:
        """Sets all metrics to their initial state."""
        self._model.reset_metrics()
        if self._initial is None:
            self._initial = {}
            for variable in metric_variables(self._model):
                # A variable created in the scope of the user's own strategy is no array.
                value = placement.local_copies(self._replicas.strategy, variable)[0].numpy()
                if value.any():
                    self._initial[id(variable)] = value

    def result(self, kind: str, signals: tuple[float, ...] = ()) -> dict[str, Any]:
        """Logs of the steps since the last reset, over all replicas.

        A collective: all workers must call it.

        Args:
            kind: "train" or "test".
            signals: signals of this task; afterwards `self.signals` is their sum over tasks.

        Returns:
            Name -> value, with the names of the model's step.
        """
        logs = self.logs(kind)
        if not logs.names:  # resumed after the last step of an epoch: this process has run no step
            logs.names = list(self._model.get_metrics_result())

        def compute(local_signals: tf.Tensor) -> Any:
            return self._compute(logs, local_signals)

        eager = self._model.run_eagerly and self._replicas.count == 1
        run = self._traces.get(
            ("metrics", kind), lambda: compute if eager else self._traces.function(compute)
        )
        with self._replicas.lost_peer_named():
            values, sums = run(tf.constant([*signals, 0.0], tf.float32))
        self.signals = [float(s) for s in sums.numpy()[: len(signals)]]
        return python_logs(values)

    def of_batch(self, kind: str) -> dict[str, Any]:
        """Logs of the last traced step; metrics become equal on all replicas."""
        return self._compute(self.logs(kind), tf.zeros([0]), share=True)[0]

    def _compute(
        self, logs: StepLogs, local_signals: tf.Tensor, share: bool = False
    ) -> tuple[dict[str, Any], tf.Tensor]:
        """(logs over all replicas, sums of signals); called in a cross-replica context.

        Args:
            share: whether replicas assign the combined values to their metrics.
        """
        variables = metric_variables(self._model)
        raw = list(logs.raw)

        def combined(local_signals: tf.Tensor) -> Any:
            local = self._replicas.local_index()
            values = [tf.identity(v.value) for v in variables]
            values += [tf.identity(logs.raw[name][local]) for name in raw]
            # The signals of a task count once, with any number of replicas.
            signals = tf.identity(local_signals)
            values.append(signals if local == 0 else tf.zeros_like(signals))
            if self._replicas.count == 1:
                return values
            values = self._combine(variables, values)
            for variable, value in zip(variables if share else [], values, strict=False):
                variable.assign(value)
            return values

        sums = self._replicas.strategy.run(combined, args=(local_signals,))
        sums = [self._replicas.first_result(s) for s in sums]
        signals = sums.pop()
        mapping = list(zip(variables, sums, strict=False))
        with keras.StatelessScope(state_mapping=mapping):
            results = logs.results(self._model)
        results.update(zip(raw, sums[len(variables) :], strict=True))
        return {name: results[name] for name in logs.names}, signals

    def _combine(self, variables: list[Any], values: list[Any]) -> list[Any]:
        """Values of metric variables over all replicas, and the sums of all other values.

        Called in a replica context.
        """
        count = self._replicas.count
        how = [self._combined.get(id(v), "sum") for v in variables]
        extremes = [i for i, h in enumerate(how) if h != "sum"]
        spread = list(values)
        for i in extremes:
            # the sum of these rows over replicas has the values of all replicas
            spread[i] = self._replicas.own_row(values[i])
        out = self._replicas.sum(spread)
        for i in extremes:
            reduce = tf.reduce_max if how[i] == "max" else tf.reduce_min
            out[i] = reduce(out[i], axis=0)
        for i, variable in enumerate(variables):
            # An initial value other than zero is the same on every replica, and counts once.
            initial = (self._initial or {}).get(id(variable))
            if initial is not None and i not in extremes:
                out[i] -= tf.cast((count - 1) * initial, out[i].dtype)
        return out


@dataclasses.dataclass(eq=False, repr=False)
class ReplicaState:
    """The float variables that layers update in a step, separately on each replica (batch norm)."""

    _model: keras.Model
    _replicas: Replicas
    _traces: Traces
    # variables assigned by training steps; None if none has been traced yet
    assigned: list[Any] | None = None
    exchanged: frozenset[int] = frozenset()  # see `Exchanges.variables`

    def all_variables(self) -> list[Any]:
        """The variables that a step may update."""
        return [
            v for v in models.state_variables_of(self._model) if models.native(v).dtype.is_floating
        ]

    def variables(self) -> list[Any]:
        """The variables that a step updates; before the first trace, all that it may update."""
        state = [v for v in self.all_variables() if id(v) not in self.exchanged]
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
        average = self._traces.get(
            "average",
            lambda: self._traces.function(
                lambda: run(lambda: self.average_on_replica(self.variables()))
            ),
        )
        with self._replicas.lost_peer_named():
            average()

    def average_on_replica(self, variables: list[Any]) -> None:
        """Sets variables to their mean over replicas; called in a replica context."""
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
            none = tf.zeros([0], tf.float64)
            flat = [
                [tf.reshape(tf.cast(v.value, tf.float64), [-1]) for v in variables]
                for variables in self._groups()
            ]
            return self._replicas.rows([tf.concat([none, *values], axis=0) for values in flat])

        def on_all() -> list[tf.Tensor]:
            return [self._replicas.first_result(t) for t in self._replicas.strategy.run(on_replica)]

        rows = self._traces.get("rows", lambda: self._traces.function(on_all))
        with self._replicas.lost_peer_named():
            metrics, averages = rows()
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
                strategy = self._replicas.strategy
                copies = (placement.local_copies(strategy, v)[local] for v in variables)
                assign_flat(copies, rows[sharding.local.start + local])


# (result of a metric, the metric) of all local replicas in a step; (a variable of a metric, itself)
Noted = list[tuple[Any, Any]]


@dataclasses.dataclass
class StepLogs:
    """The logs that a step returns: all names in its order, and metrics or values by name."""

    names: list[str] = dataclasses.field(default_factory=list)
    # Name of a log -> the metric whose result it is, or a variable of a metric; or the last value
    # on each local replica of another log.
    metrics: dict[str, Any] = dataclasses.field(default_factory=dict)
    raw: dict[str, list[tf.Variable]] = dataclasses.field(default_factory=dict)
    # Name of a log -> (function, metrics), if it is a function of metrics' results.
    derived: dict[str, tuple[Callable[..., Any], list[Any]]] = dataclasses.field(
        default_factory=dict
    )

    def keep(
        self,
        returned: Any,
        noted: Noted | None,
        local: int,
        weight: losses.ReplicaWeight | None,
    ) -> None:
        """Records the logs that a step returned.

        Args:
            returned: logs that the step returned on one replica.
            noted: results of metrics within the step; None for Keras's own steps and logs, which
                are metrics only.
            local: the index of this process's replica.
            weight: weight of the replica in the global batch; None with a single replica.
        """
        if not isinstance(returned, dict):
            raise UsageError(
                f"the model's step returned {type(returned).__name__}: expected a dict of logs, "
                'such as {"loss": loss}.'
            )
        self.names = list(returned)
        if noted is None:
            return
        for name, value in returned.items():
            metric = next((metric for result, metric in noted if result is value), None)
            if metric is not None:
                self.metrics[name] = metric
                continue
            if isinstance(value, dict):
                raise UsageError(
                    f"the model's step returned a dict as log {name!r} that is not a metric's "
                    "result: expected one number, a tensor or a metric's result()."
                )
            # The value of the global batch, if it is a mean over examples.
            value = tf.reduce_mean(tf.cast(value, tf.float32))
            if weight is not None and is_symbolic(value):
                of_graph = [n for n in noted if is_symbolic(n[0]) and n[0].graph is value.graph]
                used = [n for n in of_graph if depends_on(value, n[0])]
                if used:
                    function = function_of([value], [result for result, _ in used])
                    if function is not None:
                        self.derived[name] = function, [metric for _, metric in used]
                        continue
                    weight.differences.messages.append(
                        f"the log {name} is computed from a metric's result together with other "
                        "values of the step: it is the mean of what replicas find for their part "
                        "of the examples. Compute it in a metric's result()."
                    )
            if weight is not None:
                weight.note(f"the log {name}", value)
                value = weight.estimate_of_scalar(value)
                value = tf.math.multiply_no_nan(value, tf.cast(weight.fraction, tf.float32))
            copies = self.raw.setdefault(name, [])
            while len(copies) <= local:
                copies.append(models.lifted_variable(0.0))
            copies[local].assign(value)

    def results(self, model: keras.Model) -> dict[str, Any]:
        """Name -> result of a metric, for every log that is a metric's.

        Metrics may return one of their variables, which has the value of all replicas only here,
        within Keras's stateless scope.
        """
        results = dict(model.get_metrics_result())
        for name, metric in self.metrics.items():
            results[name] = metric if isinstance(metric, keras.Variable) else metric.result()
        for name, (function, metrics) in self.derived.items():
            (results[name],) = function([metric.result() for metric in metrics])
        return keras.tree.map_structure(
            lambda r: tf.convert_to_tensor(r) if isinstance(r, keras.Variable) else r, results
        )


@contextlib.contextmanager
def noted_results(model: keras.Model) -> Iterator[Noted]:
    """Records the metric of each result tensor, to find the metrics of a custom step's logs."""
    found: Noted = [(variable, variable) for variable in metric_variables(model)]

    def noting(metric: Any) -> Callable[[], Any]:
        result = metric.result

        def noted() -> Any:
            value = result()
            found.append((value, metric))
            return value

        return noted

    with objects.overridden([(m, "result", noting(m)) for m in leaf_metrics(model)]):
        yield found
