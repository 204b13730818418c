"""The synchronous driver: one model, many replicas, the numbers of one process.

    with SyncDriver(model, strategy) as driver:
        steps = driver.train(iterator, max_steps=10, shard_sizes=share.full)
        logs = driver.metrics("train")

Each step, on each replica (all of it one traced function, many steps per Python call):

    batch, total = this replica's part of the global batch, the size of the whole
    weight = examples here / total                      (losses are scaled by it)
    model.train_step(batch)                             (the user's own, if they have one)
        optimizer.apply(gradients) first sums the gradients over replicas, then updates this
        replica's variables, as if it were alone

so every replica makes the same update and none needs a cross-replica context. Metrics are counted
on each replica and added up when somebody looks.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfmw import keras_compat
from tfmw.cluster.group import Group
from tfmw.data import Sharding, ShardSizes
from tfmw.errors import UsageError
from tfmw.keras_compat import placement
from tfmw.mirrored.agreement import agree
from tfmw.mirrored.collectives.connection import ring_of
from tfmw.mirrored.collectives.reduction import SUM, Reduction, scaled

logger = logging.getLogger("tfmw")


class SyncDriver:
    """Runs steps of a model on all replicas of a strategy.

    Args:
        model: compiled and built, with its optimizer built.
        strategy: mirrored, multi-worker mirrored, or TensorFlow's default.
        compression: "fp16" or "bf16": what gradients travel and are summed in; None for as they
            are.

    Attributes:
        sharding: how global batches are divided between the replicas.
        group: the processes that train together.
        examples: of the steps so far, over all replicas.
    """

    def __init__(
        self,
        model: keras.Model,
        strategy: tf.distribute.Strategy,
        compression: str | None = None,
    ):
        self.model = model
        self.strategy = strategy
        self.group = Group.of(strategy)
        self.sharding = Sharding(
            self.group.size, self.group.rank, placement.local_replicas(strategy)
        )
        self.examples = 0
        self._stack = contextlib.ExitStack()
        self._functions: dict[Any, Callable[..., Any]] = {}
        self._logs: dict[str, _Logs] = {}
        self._assigned: list[Any] | None = None  # by training steps, once one has been traced
        self._gathers = False  # sparse gradients, as of embeddings, by TensorFlow
        self._combined: dict[int, str] = {}  # id of a metric's variable -> how replicas combine
        self._metric_start: dict[int, np.ndarray] | None = None
        self.signals: list[float] = []
        self._reduction = Reduction(strategy, compression)
        self._has_synchronized_norm = any(
            keras_compat.is_synchronized_batch_norm(layer)
            for layer in keras_compat.layers_of(model)
        )
        self._warned: set[str] = set()
        self._to_check = False
        self.on_trace: Callable[[], Any] = lambda: None
        """Called while anything is traced."""
        self.traces_valid: Callable[[], bool] = lambda: True
        """Asked, once `reset` was called, before anything that was traced before is used."""

    @property
    def replicas(self) -> int:
        return self.strategy.num_replicas_in_sync

    @property
    def outlives_placement(self) -> bool:
        """Whether what was traced holds for the next time: copies of variables are others then."""
        return self.sharding.local_replicas == 1 and not any(
            isinstance(keras_compat.native(v), tf.distribute.DistributedValues)
            for v in placement.all_variables(self.model)
        )

    def reset(self) -> None:
        """Forgets what earlier calls counted before, not what they have traced."""
        self.examples = 0
        self.signals = []
        self._to_check = True

    def _check_traces(self) -> None:
        """Forgets what was traced, too, where callbacks have changed the model meanwhile.

        All workers enter it at the first step of a call.
        """
        if self._to_check and not all(self.group.from_all(self.traces_valid())):
            self._functions.clear()
            self._assigned = None
        self._to_check = False

    def __enter__(self) -> SyncDriver:
        enter = self._stack.enter_context
        placement.refuse_raw_variables(self.model)
        with self._peers_named():
            agree(self.group, self.strategy, placement.shared_variables(self.model))
        enter(placement.placed(self.model, self.strategy))
        if self.replicas > 1:
            for optimizer in keras_compat.optimizers_of(self.model):
                enter(keras_compat.replica_local_updates(optimizer, self._reduce_gradients))
        if any(keras_compat.overrides_step(self.model, f"{k}_step") for k in ("train", "test")):
            enter(_noting_results(self.model))
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    # ------------------------------------------------------------ steps

    def train(
        self, iterator: Any, max_steps: int, shard_sizes: ShardSizes, size_known: bool = True
    ) -> int:
        """Runs up to `max_steps` training steps.

        Args:
            iterator: over the dataset of a `data.Shard`.
            max_steps: steps to make, fewer only where the data ends.
            shard_sizes: of the shards of these steps.
            size_known: whether the dataset knows the size of each global batch.

        Returns:
            Steps done, the same number on every worker.
        """
        return self._steps("train", iterator, max_steps, shard_sizes, size_known)

    def test(
        self, iterator: Any, max_steps: int, shard_sizes: ShardSizes, size_known: bool = True
    ) -> int:
        """Runs up to `max_steps` evaluation steps; see `train`."""
        return self._steps("test", iterator, max_steps, shard_sizes, size_known)

    def _steps(
        self, kind: str, iterator: Any, max_steps: int, shard_sizes: ShardSizes, size_known: bool
    ) -> int:
        self._check_traces()
        uneven = self.replicas > 1 and (
            shard_sizes.empty or (shard_sizes.uneven and kind == "train" and bool(self._state()))
        )
        key = (kind, uneven, size_known, repr(iterator.element_spec))
        steps = tf.constant(max_steps, tf.int64)
        if key not in self._functions:
            self._functions[key] = self._traced(kind, uneven, size_known)
            trace = getattr(self._functions[key], "get_concrete_function", None)
            if trace is not None:
                trace(iterator, steps)  # tells whether anything is gathered
        with self._peers_named():
            if not self._gathers:
                return self._call(key, iterator, steps)
            # A batch of another shape, as the last one, needs a call of its own.
            for steps_done in range(max_steps):
                if not self._call(key, iterator, tf.constant(1, tf.int64)):
                    return steps_done
            return max_steps

    def _call(self, key: Any, iterator: Any, steps: tf.Tensor) -> int:
        steps_done, examples = self._functions[key](iterator, steps)
        self.examples += int(examples)
        return int(steps_done)

    @contextlib.contextmanager
    def _peers_named(self) -> Iterator[None]:
        """Where a task is lost in the middle of a step, the error says which, and why."""
        try:
            yield
        except Exception as e:
            broken = self._reduction.broken
            # TensorFlow wraps what an op raises, but not where it runs eagerly.
            if broken is None or not (e is broken or isinstance(e, tf.errors.OpError)):
                raise
            lost = isinstance(broken, OSError | tf.errors.OpError)
            raise (self.group.why_lost(broken) if lost else broken) from None

    def _traced(self, kind: str, uneven: bool, size_known: bool) -> Callable[..., Any]:
        """A function (iterator, max_steps) -> (steps done, examples of them over all replicas)."""
        state = self._state() if uneven and kind == "train" else []

        def one_step(parts: Any, total: Any) -> Any:
            assigned: list[Any] = []
            if kind == "train":
                assigned = self._assigned = self._assigned or []
            with keras_compat.recorded_assignments(assigned, self._note_metric):
                totals = self.strategy.run(
                    lambda p, t: self._replica_step(kind, p, t, uneven, size_known, state),
                    args=(parts, total),
                )
            if size_known:
                return tf.maximum(total, 1)  # a batch without examples is not the end
            return tf.cast(self.strategy.experimental_local_results(totals)[0], tf.int64)

        if self.model.run_eagerly:

            def eager_steps(iterator: Any, max_steps: tf.Tensor) -> tuple[int, int]:
                seen = 0
                for steps_done in range(int(max_steps)):
                    try:
                        element = next(iterator)
                    except StopIteration:
                        return steps_done, seen
                    examples = int(one_step(*element))
                    if not examples:
                        return steps_done, seen
                    seen += examples
                return int(max_steps), seen

            return eager_steps

        def steps(iterator: Any, max_steps: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            def body(steps_done: tf.Tensor, seen: tf.Tensor, going: tf.Tensor) -> Any:
                element = iterator.get_next_as_optional()
                examples = tf.cond(
                    element.has_value(),
                    lambda: one_step(*element.get_value()),
                    lambda: tf.constant(0, tf.int64),
                )
                going = examples > 0
                return steps_done + tf.cast(going, tf.int64), seen + examples, going

            steps_done, seen, _ = tf.while_loop(
                lambda steps_done, seen, going: tf.logical_and(going, steps_done < max_steps),
                body,
                [tf.constant(0, tf.int64), tf.constant(0, tf.int64), tf.constant(True)],
                parallel_iterations=1,
            )
            return steps_done, seen

        return self._function(steps, reduce_retracing=True)

    def _replica_step(
        self,
        kind: str,
        parts: tuple[Any, ...],
        total: Any,
        uneven: bool,
        size_known: bool,
        state: list[Any],
    ) -> Any:
        """One step on one replica. Returns int32 [], 0 once no replica has examples left."""
        local = self._local_replica()
        batch = parts[local]
        if self.replicas == 1:
            self._call_step(kind, batch, local, None)
            return tf.constant(1)
        rows = tf.cast(_rows(batch), tf.int32)
        if size_known:
            total = tf.cast(tf.identity(total), tf.int32)
        else:
            replica = tf.distribute.get_replica_context()
            total = replica.all_reduce(SUM, tf.identity(rows))
        share = keras_compat.LossShare(rows, total, uneven, size_known, self._weights_later(kind))
        with keras_compat.loss_share(share):
            if uneven:
                self._uneven_step(kind, batch, local, share, state)
            else:
                self._call_step(kind, batch, local, share)
        return tf.constant(1) if size_known else tf.identity(total)

    def _uneven_step(
        self, kind: str, batch: Any, local: int, share: keras_compat.LossShare, state: list[Any]
    ) -> None:
        """A step in which shares differ, and this replica may have no example at all.

        A replica without examples takes part in every collective, on a batch of one made-up
        example, and contributes nothing: no gradient, no metric, no moving average.
        """
        present = share.rows > 0
        metrics = [(v, tf.identity(v.value)) for v in keras_compat.metric_variables(self.model)]
        if state:
            # With equal starting points, weighted steps from there average to the right one.
            self._average(state)
        averages = [(keras_compat.native(v), tf.identity(v.value)) for v in state]
        if not self._has_synchronized_norm:
            batch = tf.nest.map_structure(lambda t: _or_one_example(t, present), batch)
        self._call_step(kind, batch, local, share)
        for variable, before in metrics:
            variable.assign(tf.where(present, variable.value, before))
        for variable, before in averages:
            factor = tf.cast(share.weight * float(self.replicas), before.dtype)
            after = before + factor * (variable.read_value() - before)
            variable.assign(tf.where(present, after, before))

    def _call_step(
        self, kind: str, batch: Any, local: int, share: keras_compat.LossShare | None
    ) -> None:
        model = self.model
        logs = self._logs.setdefault(kind, _Logs())
        step = model.train_step if kind == "train" else model.test_step
        is_own = keras_compat.overrides_step(model, f"{kind}_step")
        if model.jit_compile and not model.run_eagerly:
            if share is None:
                step = tf.function(step, jit_compile=True, reduce_retracing=True)
            else:
                step = functools.partial(self._compiled, step, is_own, share)
        with _Noted.on_this_thread() as noted:
            returned = step(batch)
        logs.keep(returned, noted if is_own else None, local, share)
        if share is not None and share.scalar_losses:
            self._warn_once(
                "a loss function returned one number instead of one per example: it is taken for "
                "a mean over the examples of each replica."
            )

    def _compiled(
        self, step: Callable[[Any], Any], is_own: bool, share: keras_compat.LossShare, batch: Any
    ) -> Any:
        """A step compiled by XLA on each replica; what replicas exchange stays outside.

        Keras's train_step makes its gradients, and then applies them: here one compiled function
        makes them, they are reduced, and another one applies them.
        """
        # XLA takes all virtual devices of a process for one, and refuses the others' variables.
        if self.sharding.local_replicas == 1 and not is_own and not self._has_synchronized_norm:
            with contextlib.suppress(keras_compat.CannotCompile):
                with share.gradients_waiting() as waiting:

                    def compute(batch: Any) -> Any:
                        logs = step(batch)
                        return logs, [grads for grads, _ in waiting]

                    compiled = tf.function(compute, jit_compile=True, autograph=False)
                    logs, all_grads = compiled(batch)
                for grads, (_, finish) in zip(all_grads, waiting, strict=True):
                    finish(grads)
                return logs
        self._warn_once(
            "jit_compile is off on several replicas of one process, and where replicas exchange "
            "numbers in the middle of a step, which XLA cannot compile: in a train_step of your "
            "own, in a synchronized BatchNormalization, in a loss divided by masks or weights of "
            "the global batch."
        )
        return step(batch)

    def _weights_later(self, kind: str) -> bool:
        """Whether a step may use losses that Keras does not compute; see `LossShare.later`."""
        return (
            keras_compat.overrides_step(self.model, "train_step")
            or keras_compat.overrides_step(self.model, f"{kind}_step")
            or not keras_compat.only_keras_losses(self.model)
        )

    def _note_metric(self, variable: Any, value: Any) -> None:
        """Learns how a metric's variable is updated, and so how replicas' values combine.

        Raises:
            UsageError: it is not a sum over examples, nor a maximum or minimum.
        """
        if self.replicas == 1 or all(
            variable is not v for v in keras_compat.metric_variables(self.model)
        ):
            return
        how = keras_compat.combination(variable, value)
        if how is None:
            raise UsageError(
                f"a metric updates its variable {variable.path!r} otherwise than by adding to it "
                "(or taking a maximum or minimum), so the values of several replicas cannot be put "
                "together: keep sums and counts in variables, and divide in result()."
            )
        if how != "unchanged":
            self._combined[id(variable)] = how

    def _reduce_gradients(self, grads: list[Any], share: keras_compat.LossShare) -> list[Any]:
        """Gradients of this replica -> gradients of the global batch, the same everywhere."""
        if not share.used:
            self._warn_once(
                "train_step computes its loss without Keras's losses: it is taken for a mean over "
                "examples, and gradients are averaged over replicas by their numbers of examples. "
                "Use self.compute_loss(...) or keras.losses objects for sums."
            )
        if share.later or not share.used:
            grads = [scaled(g, share.weight) for g in grads]
        if share.uneven:
            present = share.rows > 0
            grads = [_or_zeros(g, present) for g in grads]
        if not self._reduction.shapes_may_change:
            self._gathers |= any(isinstance(grad, tf.IndexedSlices) for grad in grads)
        return self._reduction(grads)

    def _local_replica(self) -> int:
        replica = tf.distribute.get_replica_context()
        number = tf.get_static_value(replica.replica_id_in_sync_group)
        return int(number) - self.sharding.first_replica if self.sharding.local_replicas > 1 else 0

    # ------------------------------------------------------------ what replicas keep to themselves

    def _state(self) -> list[Any]:
        """Float variables that layers update in a step, each replica its own (batch norm).

        Until a training step has been traced: those that one may update.
        """
        state = self._any_state()
        if self._assigned is None:
            return state
        return [v for v in state if any(v is a for a in self._assigned)]

    def _any_state(self) -> list[Any]:
        return [
            v
            for v in keras_compat.state_variables_of(self.model)
            if keras_compat.native(v).dtype.is_floating
        ]

    def average_state(self) -> None:
        """Makes moving averages the mean over replicas, everywhere.

        A mean commutes with a moving average, so it may be taken at any time between steps; it is
        taken before anybody reads. A collective: all workers enter it.
        """
        if self.replicas == 1 or not self._state():
            return
        if "average" not in self._functions:
            self._functions["average"] = self._function(
                lambda: self.strategy.run(lambda: self._average(self._state()))
            )
        self._functions["average"]()

    def _average(self, variables: list[Any]) -> None:
        values = [tf.identity(keras_compat.native(v).read_value()) for v in variables]
        sums = _packed_sum(values)
        for variable, total in zip(variables, sums, strict=True):
            keras_compat.native(variable).assign(total / tf.cast(self.replicas, total.dtype))

    def agree_on_weights(self, inside_epoch: bool = False) -> None:
        """Gives every task the chief's weights where a callback changed those of one task only.

        All tasks enter it. It costs one pass over the weights and one message.

        Args:
            inside_epoch: whether each replica has moving averages of its own, as between steps.
        """
        if self.group.size == 1:
            return
        seeds = placement.seeds_of(self.model)
        metrics = keras_compat.metric_variables(self.model)
        averages = self._any_state() if inside_epoch else []
        apart = {id(v) for v in [*seeds, *metrics, *averages]}  # what tasks keep to themselves
        variables = [v for v in placement.all_variables(self.model) if id(v) not in apart]
        with self._peers_named():
            different = agree(self.group, self.strategy, variables)
        if different and self.group.is_chief:
            warnings.warn(
                f"tfmw: {different[0].path!r} and {len(different) - 1} other variables differed "
                "between tasks, so a callback changed them on some tasks only: all take the "
                "chief's values. Let it do the same on every task.",
                stacklevel=2,
            )

    def reset_metrics(self) -> None:
        """Begins to count anew."""
        self.model.reset_metrics()
        if self._metric_start is None:
            self._metric_start = {}
            for variable in keras_compat.metric_variables(self.model):
                value = np.asarray(variable.value)
                if value.any():
                    self._metric_start[id(variable)] = value

    def _combined_metrics(self, variables: list[Any], values: list[Any]) -> list[Any]:
        """Values of metric variables over all replicas. In a replica context."""
        replica = tf.distribute.get_replica_context()
        others = [i for i, v in enumerate(variables) if self._how(v) != "sum"]
        spread = list(values)
        for i in others:
            # A sum of one row per replica is the list of all replicas' values.
            row = tf.one_hot(replica.replica_id_in_sync_group, self.replicas, dtype=tf.float32)
            row = tf.cast(tf.reshape(row, [-1] + [1] * values[i].shape.rank), values[i].dtype)
            spread[i] = row * values[i][None]
        out = _packed_sum(spread)
        for i in others:
            reduce = tf.reduce_max if self._how(variables[i]) == "max" else tf.reduce_min
            out[i] = reduce(out[i], axis=0)
        for i, variable in enumerate(variables):
            start = (self._metric_start or {}).get(id(variable))
            if start is not None and i not in others:
                out[i] -= tf.cast((self.replicas - 1) * start, out[i].dtype)
        return out

    def _how(self, variable: Any) -> str:
        return self._combined.get(id(variable), "sum")

    def metrics(self, kind: str, signals: tuple[float, ...] = ()) -> dict[str, float]:
        """Logs of the steps since the last reset, over all replicas.

        A collective: all workers enter it.

        Args:
            kind: "train" or "test".
            signals: of this task, for all others: `self.signals` is their sum
                over tasks afterwards.

        Returns:
            Name -> value, as the model's own step names them.
        """
        logs = self._logs.setdefault(kind, _Logs())
        if not logs.names:  # resumed after the last step of an epoch: no step has run here yet
            logs.names = list(self.model.get_metrics_result())
        if ("metrics", kind) not in self._functions:

            def look(said: tf.Tensor) -> tuple[dict[str, Any], tf.Tensor]:
                variables = keras_compat.metric_variables(self.model)
                raw = logs.raw_names()

                def local_values(said: tf.Tensor) -> Any:
                    local = self._local_replica()
                    values = [tf.identity(v.value) for v in variables]
                    values += [tf.identity(logs.raw[name][local]) for name in raw]
                    values.append(tf.identity(said) if local == 0 else tf.zeros_like(said))
                    if self.replicas == 1:
                        return values
                    return self._combined_metrics(variables, values)

                sums = self.strategy.run(local_values, args=(said,))
                sums = [self.strategy.experimental_local_results(s)[0] for s in sums]
                signal_sums = sums.pop()
                mapping = list(zip(variables, sums, strict=False))
                with keras.StatelessScope(state_mapping=mapping):
                    results = logs.results(self.model)
                results.update(zip(raw, sums[len(variables) :], strict=True))
                return {name: results[name] for name in logs.names}, signal_sums

            self._functions[("metrics", kind)] = (
                look if self.model.run_eagerly and self.replicas == 1 else self._function(look)
            )
        values, signal_sums = self._functions[("metrics", kind)](
            tf.constant([*signals, 0.0], tf.float32)
        )
        self.signals = [float(s) for s in signal_sums.numpy()[: len(signals)]]
        return _python_logs(values)

    def replica_state(self) -> tuple[tf.Tensor, tf.Tensor]:
        """What replicas keep to themselves: metrics so far, and layers' moving averages.

        A collective: all workers enter it.

        Returns:
            float64 [replicas, values] of metrics, and the same of averages.
        """
        if "replica state" not in self._functions:

            def on_replica() -> list[tf.Tensor]:
                replica = tf.distribute.get_replica_context()
                number = replica.replica_id_in_sync_group
                rows = []
                for group in (keras_compat.metric_variables(self.model), self._any_state()):
                    values = [tf.reshape(tf.cast(v.value, tf.float64), [-1]) for v in group]
                    flat = tf.concat([tf.zeros([0], tf.float64), *values], axis=0)
                    rows.append(tf.one_hot(number, self.replicas, dtype=tf.float64)[:, None] * flat)
                return replica.all_reduce(SUM, rows) if self.replicas > 1 else rows

            self._functions["replica state"] = self._function(
                lambda: [
                    self.strategy.experimental_local_results(t)[0]
                    for t in self.strategy.run(on_replica)
                ]
            )
        metrics, averages = self._functions["replica state"]()
        return metrics, averages

    def restore_replica_state(self, metrics: np.ndarray, averages: np.ndarray) -> None:
        """Gives replicas back what `replica_state` took.

        Another number of replicas gets the sum of the metrics (on the first) and the mean of the
        averages.
        """
        if len(metrics) != self.replicas:
            summed = np.zeros([self.replicas, metrics.shape[1]])
            summed[0] = metrics.sum(axis=0)
            metrics = summed
            averages = np.repeat(averages.mean(axis=0, keepdims=True), self.replicas, axis=0)
        for group, rows in (
            (keras_compat.metric_variables(self.model), metrics),
            (self._any_state(), averages),
        ):
            for local in range(self.sharding.local_replicas):
                row, start = rows[self.sharding.first_replica + local], 0
                for variable in group:
                    copy = placement.local_copies(self.strategy, variable)[local]
                    size = int(np.prod(copy.shape.as_list()))
                    value = row[start : start + size].reshape(copy.shape.as_list())
                    copy.assign(tf.cast(value, copy.dtype))
                    start += size

    # ------------------------------------------------------------ prediction

    def predict(
        self, iterator: Any, max_steps: int | None, after_step: Callable[[int], None]
    ) -> Any:
        """Predictions for every example of a pass, in the dataset's order, on every worker.

        Args:
            iterator: over the dataset of a `data.Shard`.
            max_steps: global batches to predict; None for all.
            after_step: called with the number of steps made.

        Returns:
            Structure of arrays [examples, ...], as the model's outputs.
        """

        def one_step(parts: Any) -> Any:
            def on_replica(parts: Any) -> Any:
                batch = parts[self._local_replica()]
                rows = _rows(batch)
                present = rows > 0
                if self.replicas > 1:
                    batch = tf.nest.map_structure(lambda t: _or_one_example(t, present), batch)
                outputs = self.model.predict_step(batch)
                if self.replicas > 1:
                    outputs = tf.nest.map_structure(lambda t: t[:rows], outputs)
                return outputs, rows

            return self.strategy.run(on_replica, args=(parts,))

        self._check_traces()
        if not self.model.run_eagerly:
            one_step = self._functions.setdefault(
                "predict", self._function(one_step, reduce_retracing=True)
            )
        outputs: list[list[Any]] = []  # per step and local replica: flat outputs
        rows: list[list[int]] = []
        structure: Any = None
        while max_steps is None or len(rows) < max_steps:
            try:
                parts, total = next(iterator)
            except StopIteration:
                break
            if int(total) < 0 and not any(int(_rows(p)) for p in parts):
                break
            result, counts = one_step(parts)
            structure = result
            flat = [
                self.strategy.experimental_local_results(t)
                for t in tf.nest.flatten(result, expand_composites=False)
            ]
            outputs.append(
                [[leaf[d] for leaf in flat] for d in range(self.sharding.local_replicas)]
            )
            rows.append([int(n) for n in self.strategy.experimental_local_results(counts)])
            after_step(len(rows))
        return self._assembled(outputs, rows, structure)

    def _assembled(self, outputs: list[list[Any]], rows: list[list[int]], structure: Any) -> Any:
        """Puts all replicas' predictions in order: example j of a batch is replica j mod R's."""
        if structure is None and self.group.size == 1:
            raise UsageError("the dataset is empty: expected at least one batch to predict.")
        all_rows = self.group.from_all(rows)
        leaves = []
        number = len(outputs[0][0]) if outputs else 0
        number = max(self.group.from_all(number))
        for leaf in range(number):
            mine = [part[leaf] for step in outputs for part in step]
            if any(isinstance(t, (tf.RaggedTensor, tf.SparseTensor)) for t in mine):
                if self.replicas > 1:
                    raise UsageError(
                        "predictions that are ragged or sparse cannot be put together over "
                        "several replicas: make the model's output dense."
                    )
                leaves.append(tf.concat(mine, axis=0))
                continue
            leaves.append(self._in_order([np.asarray(t) for t in mine], all_rows))
        if structure is None:
            return leaves[0] if len(leaves) == 1 else leaves
        return tf.nest.pack_sequence_as(structure, leaves)

    def _in_order(self, mine: list[np.ndarray], all_rows: list[list[list[int]]]) -> np.ndarray:
        everyone = self._gathered(np.concatenate(mine) if mine else np.zeros([0]), all_rows)
        steps = max(len(r) for r in all_rows)
        taken = [0] * self.group.size
        pieces = []
        for step in range(steps):
            parts = []
            for worker, rows in enumerate(all_rows):
                for count in rows[step] if step < len(rows) else [0] * self.sharding.local_replicas:
                    start = taken[worker]
                    parts.append(everyone[worker][start : start + count])
                    taken[worker] = start + count
            batch = np.empty((sum(map(len, parts)), *parts[0].shape[1:]), parts[0].dtype)
            if _interleaved([len(p) for p in parts]):
                for replica, part in enumerate(parts):
                    batch[replica :: len(parts)] = part
            else:  # pipelines of dataset functions: each replica's examples one after the other
                batch = np.concatenate(parts)
            pieces.append(batch)
        return np.concatenate(pieces)

    def _gathered(self, mine: np.ndarray, all_rows: Any) -> list[np.ndarray]:
        """Every worker's array, on every worker."""
        if self.group.size == 1:
            return [mine]
        sizes = [sum(map(sum, rows)) for rows in all_rows]
        # A worker without examples learns the shape and type from the others.
        shapes = self.group.from_all([list(mine.shape[1:]), mine.dtype.name])
        shape, name = shapes[int(np.argmax(sizes))]
        dtype = tf.as_dtype(name)
        if dtype == tf.string or name == "object":
            raise UsageError(
                "predictions are strings, which cannot be sent between workers: predict their "
                "indices and look them up afterwards."
            )
        ring = ring_of(self.strategy)
        if ring is not None:
            rows = mine if len(mine) else np.zeros([0, *shape], dtype.as_numpy_dtype)
            with self._peers_named():
                (flat,) = ring.gather([rows])
            return np.split(flat, np.cumsum(sizes)[:-1])
        carrier = dtype if dtype in (tf.float32, tf.float64, tf.int32, tf.int64) else None
        carrier = carrier or (tf.float32 if dtype.is_floating else tf.int64)
        padded = np.zeros([max(sizes), *shape], carrier.as_numpy_dtype)
        padded[: len(mine)] = mine.reshape(-1, *shape) if len(mine) else 0

        def gather(value: tf.Tensor) -> tf.Tensor:
            return self.strategy.gather(
                self.strategy.run(lambda v: tf.identity(v), args=(value,)), axis=0
            )

        local = self.sharding.local_replicas
        flat = _function(gather)(tf.constant(padded)).numpy()
        blocks = np.split(flat, self.group.size * local)[::local]
        return [
            block[:size].astype(dtype.as_numpy_dtype)
            for block, size in zip(blocks, sizes, strict=True)
        ]

    def _function(self, function: Callable[..., Any], **options: Any) -> Any:
        def noted(*arguments: Any) -> Any:
            self.on_trace()
            return function(*arguments)

        return _function(noted, **options)

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            if self.group.is_chief:
                warnings.warn(f"tfmw: {message}", stacklevel=2)


def _function(function: Callable[..., Any], **options: Any) -> Any:
    """A `tf.function` of one driver.

    TensorFlow counts how often the same code is traced, and warns of it: each driver traces its
    own. Of a partial it counts each one apart.
    """
    return tf.function(functools.partial(function), autograph=False, **options)


def _interleaved(lengths: list[int]) -> bool:
    total = sum(lengths)
    return lengths == [len(range(r, total, len(lengths))) for r in range(len(lengths))]


# ---------------------------------------------------------------- logs of a step


_noting = threading.local()


class _Noted(list[tuple[Any, Any]]):
    """(tensor, metric) of what metrics returned while this thread traced a step."""

    @classmethod
    @contextlib.contextmanager
    def on_this_thread(cls) -> Iterator[_Noted]:
        _noting.now = cls()
        try:
            yield _noting.now
        finally:
            _noting.now = None

    def metric_of(self, value: Any) -> Any | None:
        """The metric whose result is `value`, a tensor or a dict of them."""
        return next((metric for noted, metric in self if noted is value), None)


@contextlib.contextmanager
def _noting_results(model: keras.Model) -> Iterator[None]:
    """Notes where the logs of a custom step come from: its tensors tell."""

    def noted(metric: Any) -> Callable[[], Any]:
        result = metric.result

        def wrapper() -> Any:
            value = result()
            now = getattr(_noting, "now", None)
            if now is not None:
                now.append((value, metric))
            return value

        return wrapper

    metrics = keras_compat.leaf_metrics(model)
    with keras_compat.overridden([(m, "result", noted(m)) for m in metrics]):
        yield


class _Logs:
    """What a step returns: which of it are metrics, and the last values of what is not."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.metrics: dict[str, Any] = {}
        self.raw: dict[str, list[tf.Variable]] = {}

    def keep(
        self,
        returned: Any,
        noted: _Noted | None,
        local: int,
        share: keras_compat.LossShare | None,
    ) -> None:
        """Takes what a step returned.

        Args:
            noted: where its values come from; None for Keras's own steps, which return metrics.
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
            metric = noted.metric_of(value)
            if metric is not None:
                self.metrics[name] = metric
                continue
            if isinstance(value, dict):
                raise UsageError(
                    f"the model's step returned a dict as log {name!r} that is not a metric's "
                    "result: expected one number, a tensor or a metric's result()."
                )
            # The value of the whole batch, for what is a mean over examples.
            value = tf.reduce_mean(tf.cast(value, tf.float32))
            if share is not None:
                value = tf.math.multiply_no_nan(value, share.weight)
            holders = self.raw.setdefault(name, [])
            with tf.init_scope():
                while len(holders) <= local:
                    holders.append(tf.Variable(0.0, trainable=False))
            holders[local].assign(value)

    def raw_names(self) -> list[str]:
        return list(self.raw)

    def results(self, model: keras.Model) -> dict[str, Any]:
        """Name -> result of a metric, for every log that is one."""
        results = dict(model.get_metrics_result())
        results.update({name: metric.result() for name, metric in self.metrics.items()})
        return results


# ---------------------------------------------------------------- tensors


def _rows(batch: Any) -> tf.Tensor:
    first = next(t for t in tf.nest.flatten(batch) if t is not None)
    if isinstance(first, tf.RaggedTensor):
        return tf.cast(first.nrows(), tf.int32)
    if isinstance(first, tf.SparseTensor):
        return tf.cast(first.dense_shape[0], tf.int32)
    return tf.shape(first)[0]


def _or_one_example(tensor: Any, present: tf.Tensor) -> Any:
    """The batch, or where it has no example, one of zeros."""
    if isinstance(tensor, (tf.RaggedTensor, tf.SparseTensor)):
        return tensor
    one = tf.zeros([1, *[d or 1 for d in tensor.shape[1:]]], tensor.dtype)
    out = tf.cond(present, lambda: tensor, lambda: one)
    out.set_shape([None, *tensor.shape[1:]])
    return out


def _or_zeros(grad: Any, present: tf.Tensor) -> Any:
    if grad is None:
        return None
    if isinstance(grad, tf.IndexedSlices):
        return tf.IndexedSlices(_or_zeros(grad.values, present), grad.indices, grad.dense_shape)
    return tf.cond(present, lambda: grad, lambda: tf.zeros_like(grad))


def _packed_sum(values: list[tf.Tensor]) -> list[tf.Tensor]:
    """Sums over replicas, one reduction per type. In a replica context."""
    replica = tf.distribute.get_replica_context()
    out: list[Any] = [None] * len(values)
    by_type: dict[tf.DType, list[int]] = {}
    for i, value in enumerate(values):
        by_type.setdefault(value.dtype, []).append(i)
    for dtype, positions in sorted(by_type.items(), key=lambda item: item[0].name):
        carrier = dtype if dtype in (tf.float32, tf.float64, tf.int32, tf.int64) else None
        carrier = carrier or (tf.float32 if dtype.is_floating else tf.int64)
        flat = tf.concat([tf.reshape(tf.cast(values[i], carrier), [-1]) for i in positions], axis=0)
        total = replica.all_reduce(SUM, flat)
        sizes = [int(np.prod(values[i].shape.as_list())) for i in positions]
        for i, part in zip(positions, tf.split(total, sizes), strict=True):
            out[i] = tf.cast(tf.reshape(part, values[i].shape), dtype)
    return out


def _python_logs(logs: dict[str, Any]) -> dict[str, Any]:
    """Logs as Keras gives them: flat, Python floats where they are one number."""
    flat: dict[str, Any] = {}
    for name, value in logs.items():
        if isinstance(value, dict):
            flat.update(_python_logs(value))
            continue
        array = np.asarray(value)
        flat[name] = float(array) if array.ndim == 0 else array
    return flat
