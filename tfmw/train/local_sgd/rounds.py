"""Rounds, in which replicas exchange the difference of their weights to the common ones.

rounds = Rounds(strategy, settings)
with rounds.driver(model) as driver: ...        # replicas make steps of their own
rounds.begin_epoch()                            # all replicas have the same weights
rounds.after_steps(number)                      # runs due exchanges
rounds.end_epoch()                              # all weights: replicas have the same ones again

An outer gradient is the mean over replicas, weighted by the examples of each since its last
exchange. Replicas that sum gradients in each step have the same weights, and count together. So
replicas with fewer examples, as in the last batch, have a smaller weight. One step of SGD between
two exchanges is equal to a synchronous step.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfmw.compat import models, optimizers, placement
from tfmw.compat.losses import ReplicaWeight
from tfmw.compat.memory import view_of
from tfmw.errors import UsageError
from tfmw.observe.progress import blocking_call
from tfmw.train.checkpoint import state
from tfmw.train.checkpoint.tensor_files import ReplicaRows, own_name
from tfmw.train.local_sgd.outer_step import MIXED, OuterStep
from tfmw.train.local_sgd.quantized_sum import QuantizedSum
from tfmw.train.local_sgd.sync_settings import LocalSGD
from tfmw.train.mirrored.agreement import broadcast
from tfmw.train.mirrored.collectives.all_reduce import RingBroken
from tfmw.train.mirrored.collectives.connection import another_ring, ring_of
from tfmw.train.mirrored.collectives.hierarchy import HierarchicalRing
from tfmw.train.mirrored.collectives.reduction import Reduction
from tfmw.train.mirrored.replicas import Traces
from tfmw.train.mirrored.sync_driver import SyncDriver
from tfmw.train.mirrored.synchronization import weighted

_OUTER, _REPLICAS, BEGUN, _SUMMED = (
    f"rounds/{name}" for name in ("outer", "replicas", "begun", "summed")
)  # names in backups


Exchange = tuple[int, Callable[[], tf.Tensor]]
"""(fragment of the weights, a function that waits for the mean of the gradients, flat)."""


class Rounds:
    """Replicas that train independently, and exchange their weights every few steps.

    Replicas of one machine may sum their gradients in each step; then machines exchange weights.
    The methods are those of `EachStep`.

    Args:
        strategy: a synchronous strategy.
        settings: settings of the call.
    """

    is_local = True
    compression = None
    shard_optimizer = False
    gathers = False

    def __init__(self, strategy: tf.distribute.Strategy, settings: LocalSGD):
        self.strategy = strategy
        self.reduction = Reduction(strategy)
        by_machine = settings.between == "machines"
        self._within_machine = self.reduction.within_machine() if by_machine else None
        self._settings = settings
        self._traces = Traces()
        self._exchange: Exchange | None = None
        # Examples of each local replica since the last exchange of each fragment.
        self._examples = [
            tf.Variable(tf.zeros([settings.fragments], tf.float64), trainable=False)
            for _ in range(placement.local_replicas(strategy))
        ]

    @contextlib.contextmanager
    def driver(self, model: keras.Model) -> Iterator[SyncDriver]:
        """The driver of a call, in which the model is placed.

        Raises:
            UsageError: the settings don't fit the model or the strategy; raised on all tasks.
        """
        with SyncDriver(model, self) as driver, contextlib.ExitStack() as stack:
            self._model, self._replicas = model, driver.replicas
            self._weights = list(model.trainable_variables)
            self._ring = ring_of(self.strategy)
            self._refuse()
            settings = self._settings
            self._outer = OuterStep(self._own_weights(), settings.outer, settings.fragments)
            self._quantized: list[QuantizedSum] = []
            if settings.compression is not None and self._ring is not None:
                sizes = [self._outer.elements(f) for f in range(settings.fragments)]
                if isinstance(self._ring, HierarchicalRing):
                    sizes = list(map(self._ring.longest_part, sizes))
                self._quantized = [QuantizedSum(size, settings.compression) for size in sizes]
            self._thread: concurrent.futures.ThreadPoolExecutor | None = None
            if settings.overlap and self._ring is not None:
                # steps may use the first ring at the same time
                self._ring = another_ring(self.strategy)
                self._thread = concurrent.futures.ThreadPoolExecutor(1, "rounds")
                stack.callback(self._thread.shutdown)
                if self._ring is not None:
                    stack.callback(self._ring.close)  # ends an exchange of a call that has failed
            yield driver

    def _refuse(self) -> None:
        settings = self._settings
        if settings.fragments > len(self._weights):
            raise UsageError(
                f"received fragments={settings.fragments}: the model has "
                f"{len(self._weights)} weights, and a fragment needs one."
            )
        inner = (optimizers.with_inner_optimizers(o) for o in optimizers.optimizers_of(self._model))
        if any(each.use_ema for both in inner for each in both):
            raise UsageError(
                "the optimizer has use_ema=True, and with sync= each replica would average "
                "its own weights: train without one of them."
            )
        levels = isinstance(self._ring, HierarchicalRing)
        if settings.between == "machines" and self._replicas.count > 1 and not levels:
            raise UsageError(
                'received between="machines": expected two machines or more, with two workers '
                "or more on each, as many on all, without GPUs."
            )
        if models.has_synchronized_batch_norm(self._model):
            raise UsageError(
                "a BatchNormalization has synchronized=True, which exchanges moments in each step: "
                "with sync=, replicas use their own. Leave one of them out."
            )
        if settings.compression and self._replicas.count > 1 and self._ring is None:
            raise UsageError(
                f"received compression={settings.compression!r}: values are rounded on tfmw's "
                "own ring, which connects workers without GPUs. Leave compression out here."
            )

    # ------------------------------------------------------------ while a step is traced

    def count_examples(self, local: int, examples: tf.Tensor, total: tf.Tensor) -> tf.Tensor:
        del total
        counts = self._examples[local]
        counts.assign_add(tf.fill(counts.shape, tf.cast(examples, counts.dtype)))
        within = self._within_machine
        return examples if within is None else within.transport.summed(examples[None])[0]

    def reduced(
        self, update: Any, grads: list[Any], variables: list[Any], weight: ReplicaWeight
    ) -> contextlib.AbstractContextManager[tuple[list[Any], list[Any]]]:
        """Gradients of this replica -> gradients to apply, and the variables that they update."""
        del update
        if self._within_machine is not None:
            own, total = (tf.cast(n, tf.float64) for n in (weight.examples, weight.updated_by))
            grads = weighted(grads, weight, tf.math.divide_no_nan(own, total))
            grads = self._within_machine(grads)
        return contextlib.nullcontext((grads, variables))

    def gathered(self, slices: tf.IndexedSlices) -> tf.IndexedSlices:
        """Raises UsageError, as a step has the slices of this replica only."""
        raise UsageError(
            "a layer looks at the global batch, of which a replica that trains on its own has "
            "a part: train without sync=."
        )

    def reduced_slices(self, slices: tf.IndexedSlices) -> tf.IndexedSlices:
        """Raises UsageError, as `gathered` does."""
        return self.gathered(slices)

    # ------------------------------------------------------------ between steps

    def steps_to_next(self, step: int) -> int:
        return self._settings.steps_to_next(step)

    def begin_epoch(self) -> None:
        self._outer.begin(self._own_weights())
        for counts in self._examples:
            counts.assign(tf.zeros_like(counts))

    def after_steps(self, step: int) -> None:
        with self._replicas.lost_peer_named():
            begun = self._settings.begun_after(step)
            if begun is not None and self._exchange is None:
                self._begin(begun)
            applied = self._settings.applied_after(step)
            if self._exchange is not None and applied == self._exchange[0]:
                self._apply(MIXED if self._settings.overlap else 0.0)

    def end_epoch(self) -> None:
        with self._replicas.lost_peer_named():
            if self._exchange is not None:
                self._apply(MIXED)
            for fragment in range(self._settings.fragments):
                if self._begin(fragment):
                    self._apply(0.0)

    # ------------------------------------------------------------ one exchange

    def _begin(self, fragment: int) -> bool:
        """Starts an exchange; returns whether any replica had examples since the last one."""
        gradients, examples = self._traced(self._gradient, fragment)()
        if not float(self._replicas.first_result(examples)):
            return False
        self._exchange = fragment, self._summed(fragment, gradients)
        return True

    def _gradient(self, fragment: int) -> tuple[tf.Tensor, tf.Tensor]:
        """(this replica's summand of the mean, all examples); called in a replica context."""
        counts = self._examples[self._replicas.local_index()]
        own = counts[fragment]
        examples = own if self._replicas.count == 1 else self._replicas.sum([own])[0]
        weights = [w.read_value() for w in self._placed(fragment)]
        gradient = self._outer.gradient(fragment, weights)
        share = tf.cast(tf.math.divide_no_nan(own, examples), gradient.dtype)
        counts.assign(tf.where(tf.range(counts.shape[0]) == fragment, tf.zeros_like(own), counts))
        return share * gradient, examples

    def _summed(self, fragment: int, gradients: Any) -> Callable[[], tf.Tensor]:
        """Begins the sum over replicas; returns a function that waits for it."""
        if self._replicas.count == 1:
            return lambda: self._replicas.first_result(gradients)
        ring = self._ring
        if ring is None:
            total = self._replicas.first_result(self._traced(self._sum)(gradients))
            return lambda: total
        local = np.array(view_of(self._replicas.first_result(gradients)))

        def exchange() -> np.ndarray:
            if not self._quantized:
                return ring.sum(local, what="rounds")
            if isinstance(ring, HierarchicalRing):  # only values sent between machines are rounded
                return ring.sum_with(self._quantized[fragment], local, what="rounds")
            return self._quantized[fragment](ring, local)

        if self._thread is not None:
            running = self._thread.submit(exchange)
            return lambda: tf.constant(running.result())
        summed = exchange()
        return lambda: tf.constant(summed)

    def _sum(self, flat: tf.Tensor) -> tf.Tensor:
        return self._replicas.sum([flat])[0]

    def _apply(self, mixed: float) -> None:
        """Ends the exchange with an outer step, and gives replicas its weights.

        Args:
            mixed: fraction of its own weights that each replica keeps.
        """
        assert self._exchange is not None
        (fragment, result), self._exchange = self._exchange, None
        self._outer.apply(fragment, self._waited_for(result))
        self._traced(self._take, fragment, mixed)()

    def _waited_for(self, result: Callable[[], tf.Tensor]) -> tf.Tensor:
        try:
            with blocking_call("exchange of weights"):
                return result()
        except RingBroken as e:
            raise self._replicas.group.root_cause(e) from None

    def _take(self, fragment: int, mixed: float) -> None:
        """Gives this replica the common weights; called in a replica context."""
        positions = self._outer.fragments[fragment]
        for i, weight in zip(positions, self._placed(fragment), strict=True):
            common = self._outer.common[i].value
            share = tf.cast(mixed, common.dtype)
            weight.assign(common + share * (weight.read_value() - common) if mixed else common)

    def _placed(self, fragment: int) -> list[Any]:
        return [models.native(self._weights[i]) for i in self._outer.fragments[fragment]]

    def _own_weights(self) -> list[tf.Tensor]:
        copies = (placement.local_copies(self.strategy, w)[0] for w in self._weights)
        return [copy.read_value() for copy in copies]

    def _traced(self, function: Callable[..., Any], *constants: Any) -> Callable[..., Any]:
        """Wraps `function` to run on each replica, traced once for these first arguments."""

        def on_all(*tensors: Any) -> Any:
            return self._replicas.run(lambda *t: function(*constants, *t), tensors)

        key = (function.__name__, *constants)
        return self._traces.get(key, lambda: self._traces.function(on_all))

    # ------------------------------------------------------------ backups

    def is_settled(self, step: int, steps_per_epoch: int | None) -> bool:
        """Whether replicas have exchanged all weights since their last step.

        If epochs have no such step, or their number of steps is unknown, every one counts as such.
        """
        settings = self._settings
        if settings.fragments > 1 or settings.overlap or settings.every >= (steps_per_epoch or 0):
            return True
        return settings.applied_after(step) is not None

    def state(self, whole: bool) -> dict[str, Any]:
        """The state of the rounds by names in a backup. All tasks must call it.

        A backup contains the common weights as the model's weights, and those of each replica in
        addition.

        Args:
            whole: whether the chief gets the rows of all replicas, too; see `own_rows`.
        """
        with self._replicas.lost_peer_named():
            return self._state(whole)

    def _state(self, whole: bool) -> dict[str, Any]:
        names = {id(variable): name for name, variable in state.named(self._model).items()}
        found = {
            names[id(w)]: tf.identity(common.value)  # it is written while steps continue
            for w, common in zip(self._weights, self._outer.common, strict=True)
        }
        outer = self._outer.state
        for name, variable in zip(_numbered(_OUTER, len(outer)), outer, strict=True):
            found[name] = tf.identity(variable.value)
        if whole:
            rows = self._traced(self._rows)([tf.constant(q.left) for q in self._quantized])
            for name, row in zip(_numbered(_REPLICAS, len(rows)), rows, strict=True):
                found[name] = self._replicas.first_result(row)
        begun, summed = -1, tf.zeros([0], self._outer.dtype)
        if self._exchange is not None:
            begun, summed = self._exchange[0], self._waited_for(self._exchange[1])
        return {**found, BEGUN: tf.constant(begun, tf.int64), _SUMMED: summed}

    def own_rows(self) -> list[ReplicaRows]:
        """Weights, optimizers' state, counts and rounding errors of this task's replicas."""
        columns = [
            [copy.read_value() for copy in placement.local_copies(self.strategy, v)]
            for v in placement.updated_variables(self._model)
        ]
        columns.append([counts.read_value() for counts in self._examples])
        columns += [[tf.constant(q.left)] * self._replicas.local for q in self._quantized]
        names = _numbered(_REPLICAS, len(columns))
        first = self._replicas.sharding.local.start
        return [
            ReplicaRows(
                name, self._replicas.count, first, tf.stack([tf.reshape(v, [-1]) for v in values])
            )
            for name, values in zip(names, columns, strict=True)
        ]

    def restore(self, tensors: Mapping[str, Any]) -> None:
        """Restores a result of `state`, of any number of replicas. All tasks must call it.

        Args:
            tensors: tensors of the backup, on the chief; or of a copy in memory, with the rows of
                its own replicas on each task.
        """
        self.begin_epoch()
        with self._replicas.lost_peer_named():
            self._restore(tensors)

    def _restore(self, tensors: Mapping[str, Any]) -> None:
        updated = placement.updated_variables(self._model)
        names = _numbered(_REPLICAS, len(updated) + 1 + len(self._quantized))
        has_own = self._replicas.group.from_chief(lambda: own_name(names[0]) in tensors)
        of_chief = [*_numbered(_OUTER, len(self._outer.state)), *([] if has_own else names)]
        found = iter(self._from_chief(tensors, [*of_chief, BEGUN, _SUMMED]))
        for variable in self._outer.state:
            variable.assign(next(found))
        *of_all, begun, summed = found
        first = self._replicas.sharding.local.start
        for local in range(self._replicas.local):
            if has_own:
                values = [tensors[own_name(name)][local] for name in names]
            else:
                values = [self._of_replica(rows, first + local) for rows in of_all]
            copies = [placement.local_copies(self.strategy, v)[local] for v in updated]
            for copy, value in zip([*copies, self._examples[local]], values, strict=False):
                copy.assign(tf.cast(value.reshape(copy.shape), copy.dtype))
            for quantized, left in zip(self._quantized, values[len(copies) + 1 :], strict=True):
                # otherwise the machines differ, and rounding errors start from zero
                if left.size == quantized.left.size:
                    quantized.left = left.reshape(quantized.left.shape)
        if int(begun) >= 0:
            mean = tf.constant(summed)
            self._exchange = int(begun), lambda: mean

    def as_json(self) -> dict[str, Any]:
        """The entries of the position in a backup: the settings."""
        return {"rounds": self._settings.as_json()}

    def _of_replica(self, rows: np.ndarray, replica: int) -> np.ndarray:
        """A replica's value; the mean of all if another number of replicas resumes."""
        if len(rows) == self._replicas.count:
            return np.array(rows[replica])
        return np.asarray(rows.mean(axis=0, dtype=np.result_type(rows, np.float64)))

    def _rows(self, left: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """[replicas, ...] of each of a replica's own variables; called in a replica context."""
        own = [models.native(v).read_value() for v in placement.updated_variables(self._model)]
        examples = self._examples[self._replicas.local_index()].read_value()
        return self._replicas.rows([*own, examples, *left])

    def _from_chief(self, tensors: Mapping[str, Any], names: list[str]) -> list[np.ndarray]:
        """The tensors of these names on all tasks. All tasks must call it."""
        group = self._replicas.group
        own = [np.asarray(tensors[name]) for name in names] if group.is_chief else []
        if group.size == 1:
            return own
        found = []
        described = group.from_chief(lambda: [(v.dtype.name, list(v.shape)) for v in own])
        for i, (dtype, shape) in enumerate(described):
            value = own[i] if group.is_chief else tf.zeros(shape, dtype)
            variable = tf.Variable(value, trainable=False)
            if math.prod(shape):
                broadcast(self.strategy, [variable])
            found.append(variable.numpy())
        return found


def _numbered(name: str, count: int) -> list[str]:
    return [f"{name}/{i:06d}" for i in range(count)]
