"""The synchronous driver: one model, many replicas, the results of one process.

    with SyncDriver(model, EachStep(strategy)) as driver:
        steps = driver.run_steps("train", data.next_call(10))    # of an `EpochIterator`
        logs = driver.metrics("train")

Each step, on each replica (all of it one traced function, many steps per Python call):

    batch, total = this replica's shard of the global batch, the size of the whole
    weight = examples here / total                      (losses are scaled by it)
    model.train_step(batch)                             (the user's own, if they have one)
        optimizer.apply(gradients) first all-reduces the gradients, then updates this
        replica's variables, as in one process

So every replica makes the same update, and none needs a cross-replica context. Each replica updates
its own metrics; they are combined when they are read.

A training step reads top to bottom here: `run_steps`, `_step_loop`, `_replica_step`,
`_call_step`, and, from within the optimizer, `EachStep.reduced`.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfmw.compat import (
    datasets,
    local_updates,
    losses,
    models,
    objects,
    optimizers,
    placement,
)
from tfmw.compat.assigned_weights import Assignable, Exchanges
from tfmw.compat.metric_variables import (
    counting_batches_once,
    metric_variables,
    recorded_assignments,
)
from tfmw.compat.replica_steps import replica_step
from tfmw.compat.step_hooks import weighting_losses
from tfmw.data import examples_of, map_tensors, step_of
from tfmw.observe.progress import report_alive
from tfmw.observe.step_times import StepTimes
from tfmw.tables.table import is_table
from tfmw.train.epoch_iterator import DriverCall
from tfmw.train.mirrored.agreement import agree, checksum
from tfmw.train.mirrored.metrics import Noted, ReplicaMetrics, ReplicaState, noted_results
from tfmw.train.mirrored.replicas import Replicas, Traces
from tfmw.train.mirrored.settings import Settings
from tfmw.train.mirrored.sharded_update import ShardedUpdate, sharded_updates
from tfmw.train.mirrored.step_loops import step_loop


class StepKind(NamedTuple):
    """A kind of step. A driver has one trace of it for each structure of its batches."""

    name: str  # "train" or "test"
    uneven: bool  # whether shards differ in size
    size_known: bool = True  # whether the dataset contains the size of each global batch
    endless: bool = False  # whether the dataset has no end

    @property
    def trains(self) -> bool:
        return self.name == "train"


class SyncDriver:
    """Runs steps of a model on all replicas of a strategy.

    Args:
        model: a compiled and built model, with its optimizer built.
        sync: synchronization of the replicas' weights: `EachStep` of `synchronization.py`, or an
            object with the same methods.
    """

    def __init__(self, model: keras.Model, sync: Any):
        self.model = model
        self.sync = sync
        self.strategy: tf.distribute.Strategy = sync.strategy
        self.examples = 0  # number of examples of the steps so far, over all replicas
        self.times = StepTimes()  # times of this worker's training steps
        self.copies: dict[int, tf.Variable] = {}  # see `placement.placed`
        self.splits = True  # whether replicas have shards of batches, rather than whole ones
        self.updates = [
            ShardedUpdate(optimizer, sync.reduction, sync.shard_optimizer, model.run_eagerly)
            for optimizer in optimizers.optimizers_of(model)
        ]
        self.replicas = Replicas(self.strategy, sync.reduction.transport)
        self.traces = Traces()
        self.results = ReplicaMetrics(model, self.replicas, self.traces)
        self.state = ReplicaState(model, self.replicas, self.traces, self.results)
        self._has_synchronized_norm = models.has_synchronized_batch_norm(model)
        # XLA compiles for one device, but lookups run on servers
        self._has_tables = any(map(is_table, model.variables))
        # Exchanges of replicas in the middle of a step, as the last trace needs them.
        own_eager = model.run_eagerly and models.overrides_step(model, "train_step")
        self.exchanges = self._needed = Exchanges(gradients=own_eager)
        self._assignable: dict[int, Assignable] = {}
        self._stack = contextlib.ExitStack()
        self._settings = Settings(model) if self.replicas.group.size > 1 else None
        self._noted: Noted = []  # metrics' results in the step that is being traced
        self._warned: set[str] = set()

    def reset(self) -> None:
        """Resets the counters of earlier calls; keeps their traces."""
        self.examples = 0
        self.times = StepTimes()
        self.results.signals = []

    def __enter__(self) -> SyncDriver:
        model, group = self.model, self.replicas.group
        with contextlib.ExitStack() as stack:  # after an error no context remains entered
            enter = stack.enter_context
            enter(models.unseeded_generator())
            if self.replicas.count > 1:
                raw = placement.raw_variables(model)
                if raw and group.size > 1:  # `agree` sets Keras's variables only
                    name = "the checksum of tf.Variable"
                    group.require_same({f"{name} {w}": checksum(v.read_value()) for w, v in raw})
                enter(placement.raw_variables_constant(model, group.size))
            placement.refuse_other_scope(model, self.strategy)
            enter(sharded_updates(model, self.updates))
            with self.replicas.lost_peer_named():
                variables = placement.shared_variables(model)
                agree(group, self.strategy, variables, self._settings)
            self._placement = enter(placement.placed(model, self.strategy, self.copies))
            variables = model.trainable_variables
            for update in self.updates:
                enter(local_updates.fused_update(update.optimizer, variables))
            for update in self.updates:
                if self.replicas.count > 1:
                    reduced = functools.partial(self.sync.reduced, update)
                    enter(local_updates.replica_local_updates(update.optimizer, reduced))
                else:
                    # A strategy of one device refuses to update variables outside of its scope.
                    enter(local_updates.local_updates(update.optimizer))
            if self.replicas.count > 1:
                self._assignable = placement.assignable_variables(model)
                enter(objects.overridden(counting_batches_once(model)))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        with self.replicas.lost_peer_named():
            self._stack.__exit__(*error)

    # ------------------------------------------------------------ steps

    def run_steps(self, name: str, call: DriverCall, size_known: bool = True) -> int:
        """Runs the steps of a call.

        Args:
            name: "train", or "test" for evaluation steps.
            call: the steps to run; they are fewer only if the data ends.
            size_known: whether the dataset contains the size of each global batch.

        Returns:
            Number of steps done, the same on every worker.
        """
        trains = name == "train"
        iterator, max_steps, sizes = call.iterator, call.max_steps, call.shard_sizes
        uneven = self.replicas.count > 1 and (
            sizes.empty or (sizes.uneven and trains and bool(self.state.variables()))
        )
        kind = StepKind(name, uneven, size_known, call.endless)
        shares_now = [update.refused_in_call is None for update in self.updates]
        with self.replicas.step_errors(self.splits):
            loop = self.traces.get(
                (kind, repr(iterator.element_spec), *shares_now),
                lambda: self._step_loop(kind, iterator),
            )
            taken = [update.before_steps() for update in self.updates] if trains else []
            if any(taken):
                self._placement.free_originals()
            if not self.sync.gathers:
                return self._run(loop, iterator, max_steps, trains)
            # A batch of another shape, such as the last one, needs its own call.
            for steps_done in range(max_steps):
                if not self._run(loop, iterator, 1, trains):
                    return steps_done
            return max_steps

    def _run(self, loop: Callable[..., Any], iterator: Any, max_steps: int, trains: bool) -> int:
        with self.times.measured_call() as call:
            steps_done, examples, waited = loop(iterator, tf.constant(max_steps, tf.int64))
            if trains:
                call.steps, call.examples = int(steps_done), int(examples)
                call.input_s = float(waited)
                call.measured = self.model.run_eagerly or not datasets.is_deterministic()
        self.examples += int(examples)
        report_alive()
        return int(steps_done)

    def _step_loop(self, kind: StepKind, iterator: Any) -> Callable[..., Any]:
        """Creates a function (iterator, max_steps) -> (steps done, examples, input's seconds)."""
        one_step = self.global_step(kind)

        def steps(iterator: Any, max_steps: tf.Tensor) -> Any:
            return step_loop(one_step, iterator, max_steps, endless=kind.endless)[:3]

        if self.model.run_eagerly:
            return steps
        loop = self.traces.function(steps, reduce_retracing=True)
        # Traced now: the trace shows whether sparse gradients are gathered, and weights assigned.
        traced = loop.get_concrete_function(iterator, tf.constant(1, tf.int64))
        complete = self.exchanges_are_complete()
        if kind.trains:
            # each must check the trace
            followed = [update.follows(traced) for update in self.updates]
            complete = complete and all(followed)
        return loop if complete else self._step_loop(kind, iterator)

    def exchanges_are_complete(self) -> bool:
        """Whether the last trace has all exchanges that it needs; if not, the next one has."""
        complete = self._needed == self.exchanges
        self.exchanges = self._needed
        self.state.exchanged = self.exchanges.variables
        return complete

    def global_step(self, kind: StepKind) -> Callable[..., Any]:
        """Creates a function (an element of a `data.Shard`) -> number of examples.

        Its result is int64 [], over all replicas; 0 at the end of the data.
        """
        if kind.trains and self.copies:
            placement.refuse_saved_models(self.model)
        averages = self.state.variables() if kind.uneven and kind.trains else []

        def one_step(*element: Any) -> Any:
            parts, counts, total = step_of(element, self.replicas.sharding)
            assigned: list[Any] = []
            if kind.trains:
                assigned = self.state.assigned = self.state.assigned or []
            recorded = recorded_assignments(assigned, self.results.note_update)
            with recorded, noted_results(self.model) as self._noted:
                totals = self.replicas.run(
                    lambda p, c, t: self._replica_step(kind, p, c, t, averages),
                    (parts, counts, total),
                )
            if kind.size_known:
                return tf.maximum(total, 1)  # a batch without examples is not the end
            return tf.cast(self.replicas.first_result(totals), tf.int64)

        return one_step

    def _replica_step(
        self, kind: StepKind, parts: tuple[Any, ...], counts: Any, total: Any, averages: list[Any]
    ) -> Any:
        """Runs one step on one replica. Returns int32 [], 0 if no replica has examples any more."""
        local = self.replicas.local_index()
        batch = parts[local]
        is_local = kind.trains and self.sync.is_local
        # The number of examples of a batch is that of its first tensor.
        counts_differ = self.replicas.count > 1 and (kind.uneven or not kind.size_known)
        rows = tf.cast(counts[local] if counts_differ else examples_of(batch), tf.int32)
        if self.replicas.count == 1:
            if kind.trains:
                self.sync.count_examples(local, rows, rows)
            self._call_step(kind, batch, local, None)
            return rows
        if kind.size_known:
            total = tf.cast(tf.identity(total), tf.int32)
        else:
            (total,) = self.replicas.sum([tf.identity(rows)])
        weight = losses.ReplicaWeight(
            rows,
            total,
            uneven=kind.uneven,
            size_known=kind.size_known,
            in_loss=not is_local
            and not models.overrides_step(self.model, "train_step")
            and not self.exchanges.gradients,
            exchanges=self.exchanges,
            assignable=self._assignable,
            coupled=self._has_synchronized_norm,
            sums=None if is_local else self.replicas.sum,
            gather=self.sync.gathered,
            reduce=None if is_local else self.sync.reduced_slices,
            updated_by=self.sync.count_examples(local, rows, total) if kind.trains else total,
        )
        with weighting_losses(weight):
            if kind.uneven:
                self._uneven_step(kind, batch, local, weight, averages)
            else:
                self._call_step(kind, batch, local, weight)
        return tf.constant(1) if kind.size_known else tf.identity(total)

    def _uneven_step(
        self,
        kind: StepKind,
        batch: Any,
        local: int,
        weight: losses.ReplicaWeight,
        averages: list[Any],
    ) -> None:
        """Runs a step in which shards differ in size, and this replica may have no examples.

        A replica without examples runs every collective, on a copy of some example, but contributes
        no gradient, no metric and no moving average. If no replica that makes the same update has
        examples, as may occur in local SGD, it makes no update.
        """
        present = weight.examples > 0
        kept = [(v, tf.identity(v.value), present) for v in metric_variables(self.model)]
        if weight.is_local:
            updates = weight.updated_by > 0
            of_model = placement.updated_variables(self.model)
            kept += [(v, tf.identity(v.value), updates) for v in of_model]
        if averages and not weight.is_local:
            # With equal initial values, the weighted mean of the replicas' values is the right one.
            self.state.average_on_replica(averages)
        before_step = [(models.native(v), tf.identity(v.value)) for v in averages]
        self._call_step(kind, batch, local, weight)
        for variable, before, changes in kept:
            variable.assign(tf.where(changes, variable.value, before))
        for variable, before in before_step:
            factor = tf.cast(weight.fraction * float(self.replicas.count), before.dtype)
            after = before + factor * (variable.read_value() - before)
            variable.assign(tf.where(present, after, before))

    def _call_step(
        self, kind: StepKind, batch: Any, local: int, weight: losses.ReplicaWeight | None
    ) -> None:
        model = self.model
        model_step = model.train_step if kind.trains else model.test_step
        if weight is not None:
            batch = map_tensors(_of_any_rows, batch)

        def step(batch: Any) -> Any:
            if weight is None:
                return model_step(batch)
            weight.begins(batch)
            with objects.overridden([(weight, "watches", True)]):
                return model_step(batch)

        own = (f"{kind.name}_step", "compute_metrics")
        is_own = any(models.overrides_step(model, method) for method in own)
        if model.jit_compile and not model.run_eagerly and not self._has_tables:
            if weight is None:
                step = tf.function(step, jit_compile=True, reduce_retracing=True)
            else:
                step = functools.partial(self._compiled, step, is_own, weight)
        rows = int(weight.examples) if weight is not None and model.run_eagerly else None
        with replica_step(rows):
            returned = step(batch)
        noted = self._noted if is_own else None
        self.results.logs(kind.name).keep(returned, noted, local, weight)
        if weight is not None:
            self._needed = weight.needed_exchanges()
            complete = self._needed == self.exchanges
            for message in weight.differences.messages if complete else []:
                self._warn_once(message)

    def _compiled(
        self,
        step: Callable[[Any], Any],
        is_own: bool,
        weight: losses.ReplicaWeight,
        batch: Any,
    ) -> Any:
        """Runs a step compiled by XLA on each replica; collectives are not compiled.

        One compiled function computes the gradients of Keras's train_step. They are reduced, and
        another compiled function applies them.
        """
        # XLA treats all virtual devices of a process as one, and rejects variables of the others.
        if self.replicas.local == 1 and not is_own and not self._has_synchronized_norm:
            with contextlib.suppress(losses.CannotCompile):
                with weight.deferring_gradients() as deferred:

                    def compute(batch: Any) -> Any:
                        logs = step(batch)
                        return logs, [grads for grads, _ in deferred]

                    compiled = tf.function(compute, jit_compile=True, autograph=False)
                    logs, all_grads = compiled(batch)
                for grads, (_, finish) in zip(all_grads, deferred, strict=True):
                    finish(grads)
                return logs
        self._warn_once(
            "jit_compile is off on several replicas of one process, and where replicas exchange "
            "values in the middle of a step, which XLA cannot compile: in a train_step or a "
            "compute_metrics of your own, in a synchronized BatchNormalization, in a loss divided "
            "by masks or weights of the global batch."
        )
        return step(batch)

    # ------------------------------------------------------------ between steps

    def restore_optimizer(self) -> None:
        """Gives the optimizer its whole state on all workers until the next step; a collective."""
        with self.replicas.lost_peer_named():
            for update in self.updates:
                update.restore_whole()

    def agree_on_weights(self, inside_epoch: bool = False) -> None:
        """Sets weights to the chief's on every task, if a callback changed them on one task only.

        All tasks must call it. It takes one pass over the weights and one message.

        Args:
            inside_epoch: whether moving averages differ between replicas, as between steps.
        """
        group = self.replicas.group
        if group.size == 1:
            return
        for update in self.updates:
            update.forget_copy()
            update.weights_stale = True
        seeds = placement.seeds_of(self.model)
        metrics = metric_variables(self.model)
        own = self.state.all_variables() if inside_epoch else []
        if self.sync.is_local:
            # The optimizers' state always differs, weights only within an epoch.
            same = set() if inside_epoch else set(map(id, self.model.variables))
            own += [v for v in placement.updated_variables(self.model) if id(v) not in same]
        apart = {id(v) for v in [*seeds, *metrics, *own]}  # task-local state
        variables = [v for v in placement.all_variables(self.model) if id(v) not in apart]
        with self.replicas.lost_peer_named():
            different = agree(group, self.strategy, variables)
        if different and group.is_chief:
            warnings.warn(
                f"tfmw: {different[0].path!r} and {len(different) - 1} other variables differed "
                "between tasks, so a callback changed them on some tasks only: all take the "
                "chief's values. Let it do the same on every task.",
                stacklevel=2,
            )

    def unplaced_model(self, averaged: bool) -> contextlib.AbstractContextManager[None]:
        """A context in which the model is an ordinary Keras model, for callbacks.

        Args:
            averaged: whether moving averages are the same on all replicas; see `ReplicaState`.
        """
        own = metric_variables(self.model)
        return self._placement.suspended(own if averaged else own + self.state.all_variables())

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            if self.replicas.group.is_chief:
                warnings.warn(f"tfmw: {message}", stacklevel=2)


def _of_any_rows(tensor: Any) -> Any:
    """The tensor without a static number of rows.

    A trace must not divide by one replica's number, nor treat a constant as a number of examples.
    """
    if isinstance(tensor, tf.Tensor) and not hasattr(tensor, "numpy"):
        return tf.compat.v1.placeholder_with_default(tensor, [None, *tensor.shape[1:]])
    return tensor
