"""Losses: each replica's weight in the global batch. `step_hooks` applies it.

Keras and `tf.nn` divide losses by the number of replicas, which is right only if all replicas have
the same number of examples. tfmw follows one rule instead:

    Each loss that a replica computes estimates the loss of the global batch, such that the mean
    of the estimates, weighted by the replicas' numbers of examples, is that loss.

A mean over the replica's examples is such an estimate already, and so is a value that depends on
weights alone. A sum over examples is one after division by the replica's weight. So losses may be
added, scaled and reported, wherever they are computed: by Keras, in a layer, by hand. The weight
itself is applied once, to the loss that Keras's own `train_step` differentiates, or to the
gradients of any other `train_step`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfmw.compat.assigned_weights import Assignable, Exchanges, is_read
from tfmw.compat.dataflow.flow import BAD, FIXED, Flow
from tfmw.compat.dataflow.walk import Dataflow
from tfmw.compat.differences import Differences
from tfmw.compat.gradients import scaled
from tfmw.compat.graph import is_symbolic
from tfmw.compat.objects import overridden


class CannotCompile(Exception):
    """A loss needs sums over all replicas in the middle of the step."""


@dataclasses.dataclass(eq=False, repr=False)
class ReplicaWeight:
    """The weight of one replica in the global batch, while its step is traced."""

    examples: tf.Tensor  # int32 []
    global_examples: tf.Tensor  # int32 []
    _: dataclasses.KW_ONLY
    uneven: bool  # whether shards differ in size, so that this replica may have no examples
    # Whether the size of each global batch is known before it is read. If not, a batch without
    # examples on any replica is the end of the data and updates nothing.
    size_known: bool
    # Whether the weight is applied to the loss that is differentiated, in `optimizer.scale_loss`,
    # or else to the gradients.
    in_loss: bool
    # Collectives. `sums` adds values over all replicas; if it is None, sums are estimated from this
    # replica's examples. `gather` concatenates the values and indices of all replicas' slices.
    sums: Callable[[list[tf.Tensor]], list[tf.Tensor]] | None = None
    gather: Callable[[tf.IndexedSlices], tf.IndexedSlices] | None = None
    reduce: Callable[[tf.IndexedSlices], tf.IndexedSlices] | None = None  # as one process has them
    # int32 [], the number of examples on the replicas that make the same update
    updated_by: Any = None
    # Whether the losses of other replicas depend on this one's weights and examples, as with a
    # synchronized BatchNormalization.
    coupled: bool = False
    exchanges: Exchanges = dataclasses.field(default_factory=Exchanges)
    # Variables that a step may assign: id of the handle of this process's copy -> the variable.
    assignable: dict[int, Assignable] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.updated_by is None:
            self.updated_by = self.global_examples
        # float64 [], 0 without examples; cast only when it is combined with a value of lower
        # precision
        self.fraction = tf.math.divide_no_nan(
            tf.cast(self.examples, tf.float64), tf.cast(self.global_examples, tf.float64)
        )
        self.flows = Dataflow(())
        self.differences = Differences()
        self.loss_name: str | None = None  # name of the loss whose values Keras reduces now
        self.loss_weighted = False  # whether the weight was applied in `weighted_loss`
        self.watches = False  # whether assignments to `assignable` are combined over replicas
        self.gradients: list[Any] = []  # gradients by weights, which a tape computed
        self.wanted = False  # whether the step must be traced with `exchanges.gradients`
        # (Keras variable, this replica's copy, value) assigned on each replica alone
        self.own_values: list[tuple[Any, Any, Any]] = []
        # losses of `add_loss`, by the layer's id
        self.layer_losses: dict[int, list[tf.Tensor]] = {}
        # While XLA compiles a step, which cannot contain collectives: (gradients, a function that
        # reduces and applies them).
        self.deferred: list[tuple[list[Any], Callable[[list[Any]], None]]] | None = None

    @property
    def is_local(self) -> bool:
        """Whether the replica trains without the others, which have other weights."""
        return self.sums is None

    def begins(self, batch: Any) -> None:
        """Stores the tensors that the step gets, in the graph in which it is traced."""
        self.flows = Dataflow(batch)
        self.graph = tf.compat.v1.get_default_graph()
        self.before = {op.name for op in self.graph.get_operations()}

    def note(self, subject: str, value: Any) -> None:
        """Records a loss or metric if replicas cannot combine it."""
        flow = self.flows.of(value)
        if flow.kind in BAD and self.wants_gradients(value):
            return
        self.differences.note(subject, flow)

    @contextlib.contextmanager
    def deferring_gradients(self) -> Iterator[list[Any]]:
        """Collects the gradients of this context in the list that it yields; see `deferred`."""
        deferred: list[Any] = []
        with overridden([(self, "deferred", deferred)]):
            yield deferred

    def all_sum(self, values: list[tf.Tensor]) -> list[tf.Tensor]:
        """Sums over replicas; no gradient flows through (normalizers are constants).

        A replica without examples adds nothing: its values come from a placeholder batch.
        """
        if self.sums is None:
            return [tf.stop_gradient(self.estimate_of_sum(v)) for v in values]
        if self.deferred is not None:
            raise CannotCompile
        present = self.examples > 0
        stopped = [tf.stop_gradient(tf.where(present, v, tf.zeros_like(v))) for v in values]
        sums = [tf.stop_gradient(v) for v in self.sums(stopped)]
        for value in sums:
            self.flows.declare(value, FIXED)
        return sums

    def estimate_of_sum(self, local_sum: tf.Tensor) -> tf.Tensor:
        """A sum over this replica's examples -> an estimate of the sum over the global batch."""
        estimate = tf.math.divide_no_nan(local_sum, tf.cast(self.fraction, local_sum.dtype))
        return self.declared(estimate, local_sum)

    def estimate_of_scalar(self, local: Any) -> Any:
        """A scalar -> an estimate; a mean or a weight penalty, unless it is known to be a sum."""
        return self.estimate_of_sum(local) if self.reduction_of(local) == "sum" else local

    def reduction_of(self, value: Any) -> str | None:
        """Reduction that computed a value of any shape from the examples of a batch.

        Returns:
            "sum", also for a number of examples; "mean"; None if it is neither, such as a penalty
            of weights, or if there is no graph to inspect.
        """
        flow = self.flows.of(value)
        if flow.kind == "size" and not flow.axes:  # for example of constants, one for each example
            return {None: None, 0: "mean", 1: "sum"}.get(flow.degree)
        if flow.kind != "reduced":
            return None
        return "sum" if flow.degree == 1 else "mean"

    def has_examples(self, value: Any) -> bool:
        """Whether a tensor has a value for each example of this replica."""
        if is_symbolic(value):
            return self.flows.of(value).kind == "rows"
        return bool(value.shape.rank) and value.shape[0] == int(self.examples)

    def declared(self, estimate: Any, values: Any) -> Any:
        """Declares that the estimate follows from `values` like a mean."""
        flow = self.flows.of(values)
        if flow.has_pairs:
            flow = Flow("compared", origin=flow.origin)
        elif flow.kind in ("rows", "size", "reduced"):
            flow = Flow("reduced")
        self.flows.declare(estimate, flow)
        return estimate

    def weighted_loss(self, loss: tf.Tensor) -> tf.Tensor:
        """The loss that Keras's own `train_step` differentiates."""
        self.loss_weighted = True
        if self.has_examples(loss):  # a loss that is not reduced: its values add up
            return self.declared(tf.identity(loss), loss)
        loss = self.estimate_of_scalar(loss)
        return self.declared(loss * tf.cast(self.fraction, loss.dtype), loss)

    # ------------------------------------------------------------ what replicas exchange

    def means(self, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Means over replicas, weighted by their fractions."""
        return self.all_sum([v * tf.cast(self.fraction, v.dtype) for v in values])

    def total(self, value: tf.Tensor) -> tf.Tensor | None:
        """Global value of a sum or mean over this replica's examples; None for other values."""
        flow = self.flows.of(value)
        if flow.kind == "fixed":
            return value
        if flow.kind not in ("size", "reduced") or flow.axes or flow.degree not in (0, 1):
            return None
        if flow.degree == 1:
            return self.all_sum([value])[0]
        return self.means([value])[0] if value.dtype.is_floating else None

    def slices_of_all(self, slices: tf.IndexedSlices) -> tf.IndexedSlices:
        """The sum over replicas of sparse gradients, in the rows that one process has."""
        if self.deferred is not None:
            raise CannotCompile
        assert self.reduce is not None
        present = tf.where(self.examples > 0, slices.values, tf.zeros_like(slices.values))
        (scaled_by,) = scaled([present], self.fraction)
        return self.reduce(tf.IndexedSlices(scaled_by, slices.indices, slices.dense_shape))

    def of_first_replica(self, value: tf.Tensor) -> tf.Tensor:
        """The first replica's value; that replica has examples if any has."""
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        return self.all_sum([tf.where(replica == 0, value, tf.zeros_like(value))])[0]

    def wants_gradients(self, value: Any) -> bool:
        """Whether a value follows from a tape's gradients that are not all-reduced yet."""
        if self.exchanges.gradients or self.is_local or not self.gradients:
            return False
        if self.flows.follows(value, self.gradients):
            self.wanted = True
        return self.wanted

    def is_complete(self, grad: Any) -> bool:
        """Whether a sparse gradient is that of the global batch, as the step has reduced it."""
        if not isinstance(grad, tf.IndexedSlices) or not self.exchanges.gradients or self.is_local:
            return False
        return bool(not is_symbolic(grad.values) or self.flows.of(grad).kind == "fixed")

    def needed_exchanges(self) -> Exchanges:
        """Exchanges that the traced step needs; if it lacks some, it is traced again."""
        for guard in self.flows.guards:
            self.wants_gradients(guard)
        read = {
            id(variable)
            for variable, copy, value in self.own_values
            if not self.is_local
            and is_read(copy, value.graph, self.before if value.graph is self.graph else set())
        }
        return Exchanges(self.exchanges.gradients or self.wanted, self.exchanges.variables | read)


# Per thread: MirroredStrategy traces each replica in a thread of its own.
_traced = threading.local()


def current_weight() -> ReplicaWeight | None:
    """The weight of the replica whose step this thread traces; None if it traces no step."""
    return getattr(_traced, "weight", None)


def tracing_with(weight: ReplicaWeight | None) -> contextlib.AbstractContextManager[None]:
    """The context in which this thread traces a step with this weight."""
    return overridden([(_traced, "weight", weight)])
