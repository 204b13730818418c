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
    assign_row,
    leaf_metrics,
    metric_variables,
    note_combination,
    note_metric_update,
    packed,
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
        note_combination(self._combined, variable, value)
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

        sums = self._replicas.call(combined, (local_signals,))
        sums = [self._replicas.first_result(s) for s in sums]
        signals = sums.pop()
        mapping = list(zip(variables, sums, strict=False))
        with keras.StatelessScope(state_mapping=mapping):
            results = logs.results(self._model)
        results.update(zip(raw, sums[len(variables) :], strict=True))
        return {name: results[name] for name in logs.names}, signals

    def over_all(self, variable: Any, rows: np.ndarray) -> np.ndarray:
        """The combined value of a metric's variable, of its values [replicas, ...]."""
        how = self._combined.get(id(variable), "sum")
        if how != "sum":
            return np.asarray(rows.max(axis=0) if how == "max" else rows.min(axis=0))
        repeated: Any = (len(rows) - 1) * (self._initial or {}).get(id(variable), 0)
        return (_wide(rows).sum(axis=0) - repeated).astype(rows.dtype)

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
    _results: ReplicaMetrics
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
        run = self._replicas.call
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

    def rows(self) -> tuple[np.ndarray, np.ndarray]:
        """Rows of metrics, and of moving averages: uint8 [replicas + 1, bytes].

        The last row has the metrics over all replicas, and the means of the averages. A collective:
        all workers must call it.
        """
        metrics, averages = self._groups()

        def on_replica() -> list[tf.Tensor]:
            return self._replicas.rows([tf.identity(v.value) for v in metrics + averages])

        def on_all() -> list[tf.Tensor]:
            return [self._replicas.first_result(t) for t in self._replicas.call(on_replica)]

        run = self._traces.get("rows", lambda: self._traces.function(on_all))
        with self._replicas.lost_peer_named():
            rows = [value.numpy() for value in run()]
        last = [*map(self._results.over_all, metrics, rows)]
        last += [_wide(r).mean(axis=0).astype(r.dtype) for r in rows[len(metrics) :]]
        rows = [np.concatenate([r, [of_all]]) for r, of_all in zip(rows, last, strict=True)]
        count = self._replicas.count + 1
        return packed(count, rows[: len(metrics)]), packed(count, rows[len(metrics) :])

    def restore(self, metrics: np.ndarray, averages: np.ndarray) -> None:
        """Restores a result of `rows`.

        With another number of replicas, the first one gets the metrics over all replicas. The
        others keep the initial values. All get the mean of the averages.
        """
        sharding, strategy = self._replicas.sharding, self._replicas.strategy
        is_same = len(metrics) == self._replicas.count + 1
        for local in range(sharding.local_replicas):
            replica = sharding.local.start + local
            for variables, rows in zip(self._groups(), (metrics, averages), strict=True):
                if is_same or replica == 0 or rows is averages:
                    copies = (placement.local_copies(strategy, v)[local] for v in variables)
                    assign_row(copies, rows[replica if is_same else -1])


def _wide(rows: np.ndarray) -> np.ndarray:
    """Values in the dtype in which they are summed: integers and booleans in their own."""
    if rows.dtype.kind in "iub":
        return rows
    return rows.astype(np.result_type(rows.dtype, np.float64))


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
            value = tf.cast(value, tf.float32)
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
            self._keep_value(name, value, local, weight)

    def _keep_value(
        self, name: str, value: tf.Tensor, local: int, weight: losses.ReplicaWeight | None
    ) -> None:
        """Records a log that is no metric's result."""
        shape = tf.TensorShape(None)
        if weight is not None:
            weight.note(f"the log {name}", value)
            if value.shape.rank != 0 and not self._is_whole(name, value, local, weight):
                weight.differences.messages.append(
                    f"the log {name} has a value for each example, as far as tfmw can tell: it is "
                    "their mean. Return the mean, or a value for the whole batch."
                )
                value = tf.reduce_mean(value)
            # The value of the global batch, if it is a mean over examples.
            value = weight.estimate_of_scalar(value)
            value = tf.math.multiply_no_nan(value, tf.cast(weight.fraction, tf.float32))
            shape = value.shape
        copies = self.raw.setdefault(name, [])
        while len(copies) <= local:
            copies.append(
                models.lifted_variable(np.zeros(shape.as_list() if shape.rank else []), shape=shape)
            )
        copies[local].assign(value)

    def _is_whole(
        self, name: str, value: tf.Tensor, local: int, weight: losses.ReplicaWeight
    ) -> bool:
        """Whether a log is one tensor for the whole batch, of the same shape on all replicas."""
        if is_symbolic(value):
            return value.shape.is_fully_defined() and not weight.has_examples(value)
        if weight.is_local:
            return False
        if len(copies := self.raw.get(name, [])) > local:  # decided in the first step
            return copies[local].shape.rank != 0
        size = int(tf.size(value))
        own = tf.constant([size, size**2, weight.has_examples(value), 1], tf.float64)
        sizes, squares, by_example, replicas = weight.all_sum([own])[0].numpy()
        return bool(squares * replicas == sizes**2 and by_example < replicas)

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
