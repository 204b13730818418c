"""Update of the weights, sharded over the replicas.

    update = ShardedUpdate(optimizer, reduction, choice="auto")
    with update.reduced(grads, variables) as (own_grads, own_variables):
        optimizer.apply(own_grads, own_variables)

Without sharding, gradients are all-reduced, and each replica makes the whole update. With it,
gradients are reduce-scattered, so that each replica has one shard of the sum. Each updates that
shard, and the shards of the weights are all-gathered. Each has 1/N of the update's work and of the
optimizer's slots. See Xu et al., Automatic Cross-Replica Sharding of Weight Update in Data-Parallel
Training, 2020, and ZeRO stage 1.

A bucket of gradients is cut into shards as the ring cuts it anyway, so the sums are the same to the
last bit. If an optimizer needs whole variables, buckets are cut between variables.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import math
import os
from collections import Counter
from collections.abc import Container, Iterator
from typing import Any

import tensorflow as tf

from tfmw.compat import optimizer_part, optimizers
from tfmw.compat.graph import inputs_first
from tfmw.compat.kept import kept_with
from tfmw.compat.memory import copies_of
from tfmw.compat.models import native
from tfmw.errors import UsageError
from tfmw.train.mirrored.collectives import reduction as reduction_lib
from tfmw.train.mirrored.collectives.reduction import Reduction
from tfmw.train.mirrored.replicas import flattened, local_index, split_as
from tfmw.train.mirrored.shard_plan import ShardPlan, divided

logger = logging.getLogger("tfmw")

_SHARDED = "sharded over"

_WRITES = (
    "AssignVariableOp",
    "AssignAddVariableOp",
    "AssignSubVariableOp",
    "ResourceApply",
    "ResourceScatter",
    "ResourceSparseApply",
    "ResourceStridedSliceAssign",
)
"""Prefixes of the names of TensorFlow's operations that change a variable."""

SHARD_OPTIMIZER = "TFMW_SHARD_OPTIMIZER"
"""Environment variable with the value of "auto": "on" is True, "off" False."""

MIN_BYTES = 8 << 20
"""Bytes of trainable weights below which "auto" shards no update, as that costs more."""


class Slots(enum.Enum):
    """The place of an optimizer's slots."""

    WHOLE = enum.auto()  # in the optimizer's own variables
    TAKEN = enum.auto()  # in shards, since a step was traced: the optimizer's variables are empty
    PARTS = enum.auto()  # in shards, as in the previous call
    COPIED = enum.auto()  # in shards, and all in the chief's optimizer until the next step


class ShardedUpdate:
    """The update of the weights by one optimizer, on each worker.

    Args:
        optimizer: a built optimizer of a placed model.
        reduction: reduction of the strategy's gradients.
        choice: True, False or "auto", which shards if that saves time.
        eager: whether steps run op by op.
    """

    def __init__(
        self,
        optimizer: Any,
        reduction: Reduction,
        choice: Any = False,
        eager: bool = False,
    ):
        self.optimizer = optimizer
        self._reduction = reduction
        self._transport = reduction.transport
        self._choice = _environments_choice() if choice == "auto" else choice
        self._variables = optimizers.variables_of(optimizer)
        self._index = {id(v): i for i, v in enumerate(self._variables)}
        self._plan: ShardPlan | None = None
        self._slots = Slots.WHOLE
        self.weights_stale = False  # whether code other than the steps may have assigned to them
        self.made = False  # whether any update has been traced
        self._assigned_in_steps = False
        self.read_between_steps = False  # whether callbacks of this call may read the optimizer
        self._refused = self._why_not(eager)

    @property
    def reason(self) -> str | None:
        """The reason for a whole update on each worker; None if they shard it."""
        return self._refused or self.refused_in_call

    @property
    def refused_in_call(self) -> str | None:
        """The reason of this call for a whole update; None if it may be sharded."""
        shares = self._choice is True or not self.read_between_steps
        return None if shares else "a callback may look at the optimizer between steps"

    @property
    def _plan_in_call(self) -> ShardPlan | None:
        """The plan, if the steps of this call follow it."""
        return self._plan if self.reason is None else None

    def _why_not(self, eager: bool) -> str | None:
        if not self._choice:
            return "shard_optimizer=False"
        if self._transport.size == 1:
            return "there is one replica"
        if eager:
            return "run_eagerly"
        refused = optimizers.refuses_parts(self.optimizer)
        if refused or self._choice is True:
            return refused
        if self._transport.whole_sums:
            return "TensorFlow's collectives would send half as many bytes again"
        if self._reduction.wire_dtype is not None:
            return "gradient_compression halves gradients, and not weights"
        size = sum(v.shape.num_elements() * v.value.dtype.size for v in self._variables)
        if size < MIN_BYTES:
            return f"{size / 1e6:.1f} MB of weights are few"
        if not optimizers.has_slots(self.optimizer):
            return "the optimizer keeps no state for each variable"
        return None

    @property
    def description(self) -> str:
        """Description in one line, for people."""
        if self.reason is not None:
            return f"on every worker ({self.reason})"
        return f"{_SHARDED} {self._transport.size} {self._transport.of}"

    # ------------------------------------------------------------ within a step

    @contextlib.contextmanager
    def reduced(
        self, grads: list[Any], variables: list[Any]
    ) -> Iterator[tuple[list[Any], list[Any]]]:
        """Sums gradients; within the context the optimizer makes its shard of the update.

        All replicas enter it in a replica context, with their gradients as in `Reduction` and the
        Keras variable of each. It yields the gradients and variables to apply.
        """
        if self.reason is None and self._plan is None:
            self._make_plan(grads, variables)
        if not self.made and self._transport.ranks[0] == 0 and self._choice:
            level = logging.WARNING if self.reason and self._choice is True else logging.INFO
            logger.log(level, "%s updates the weights %s", self.optimizer.name, self.description)
        self.made = True
        plan = self._plan_in_call
        if plan is None:
            yield self._reduction(grads), variables
            return
        local = local_index(self._reduction.strategy)
        given = {
            self._index[id(v)]: g for g, v in zip(grads, variables, strict=True) if g is not None
        }
        self._refuse_idle(plan, given)
        own, rest = self._reduction.own_sums(given, plan.packs, self._transport.ranks[local])
        for index, total in own.items():
            shape = self._variables[index].shape
            if total.shape.num_elements() == math.prod(shape):  # all elements, flat
                own[index] = tf.reshape(total, shape)
        totals, updated = [], []
        for variable, grad in zip(variables, grads, strict=True):
            index = self._index[id(variable)]
            if grad is None or index in own or index in rest:
                totals.append(own.get(index, rest.get(index)))
                updated.append(variable)
        if self._assigned_in_steps:
            plan.parts[local].refresh()
        with self._known_of_all(own, rest), plan.parts[local].in_place():
            yield totals, updated
        self._gather_weights(plan, local)

    def _refuse_idle(self, plan: ShardPlan, given: dict[int, Any]) -> None:
        """Raises UsageError on all workers if a replica would have no variable to update."""
        for rank in range(self._transport.size):
            own = {index for pack in plan.packs for index, _ in pack.parts[rank]}
            if not any(i in own or i not in plan.indices for i in given):
                raise UsageError(
                    f"{self.optimizer.name!r} updates {len(given)} of {len(self._variables)} "
                    "variables here, and one worker has no part of them: train with "
                    "shard_optimizer=False."
                )

    @contextlib.contextmanager
    def _known_of_all(self, own: dict[int, Any], rest: dict[int, Any]) -> Iterator[None]:
        """Gives the optimizer its global norm and finiteness over all gradients."""
        asks_finite = optimizers.checks_finite(self.optimizer)
        asks_norm = optimizers.global_clipnorm(self.optimizer) is not None
        if not asks_finite and not asks_norm:
            yield
            return
        scale = optimizers.loss_scale(self.optimizer)
        local = _facts(list(own.values()), scale)
        facts = self._transport.summed(local) + _facts(list(rest.values()), scale)
        finite = tf.equal(facts[0], 0) if asks_finite else None
        norm = tf.sqrt(facts[1]) if asks_norm else None
        with optimizer_part.all_gradients_known(self.optimizer, finite, norm):
            yield

    def _gather_weights(self, plan: ShardPlan, local: int) -> None:
        """Gives a replica of this process the updated weights of all."""
        if reduction_lib.zero_factor() is not None:
            return
        part, rank = plan.parts[local], self._transport.ranks[local]
        assigned: list[Any] = []
        for pack in plan.packs:
            own = [part.weight(i) for i, _ in pack.parts[rank]] or [tf.zeros([0], pack.dtype)]
            flat = flattened(own)
            # The memory of the earlier weights is for the next bucket, so it must be free by then.
            with tf.control_dependencies(assigned):
                total = self._transport.gathered(flat, pack.cuts)
            variables = [self._variables[index].value for index in pack.sizes]
            values = zip(variables, split_as(total, variables), strict=True)
            updates = [variable.assign(value) for variable, value in values]
            assigned = [tf.no_op() if update is None else update.op for update in updates]

    def follows(self, step: Any) -> bool:
        """Whether a traced step handles its own assignments to weights correctly.

        A layer may assign to its own weights (as keras.layers.SpectralNormalization does), or a
        user's train_step. This worker's shard is a copy, so from then on each update copies it
        again first. If the result is False, the step must be traced again.
        """
        plan = self._plan_in_call
        if plan is None or self._assigned_in_steps:
            return True
        counts = assignments(step)
        copies = (copies_of(native(self._variables[index])) for index in plan.indices)
        self._assigned_in_steps = any(counts[id(v.handle)] > 1 for of_one in copies for v in of_one)
        return not self._assigned_in_steps

    # ------------------------------------------------------------ who updates what

    def _make_plan(self, grads: list[Any], variables: list[Any]) -> None:
        """Divides the variables, while the first step is traced, equally on all workers."""
        packs = divided(self.optimizer, self._transport, grads, variables)
        has_part = [any(parts) for parts in zip(*(pack.parts for pack in packs), strict=True)]
        clips = optimizers.global_clipnorm(self.optimizer) is not None
        if {id(v) for v in variables} != self._index.keys():
            # A replica that updates none of them would not count the update.
            self._refused = "the step updates some of the variables at a time"
        elif clips and any(isinstance(g, tf.IndexedSlices) for g in grads):
            self._refused = "global_clipnorm looks at sparse gradients"
        elif not has_part or not all(has_part):
            self._refused = f"there are fewer variables than {self._transport.of}"
        if self.reason is None:
            self._plan = ShardPlan(self.optimizer, self._transport, packs)
            self._slots = Slots.TAKEN

    # ------------------------------------------------------------ between steps

    def before_steps(self) -> bool:
        """Takes this process's shards of the state, if the optimizer has all of it.

        Returns whether the optimizer's own slots are empty since the last call.
        """
        plan = self._plan_in_call
        if plan is None:
            return False
        emptied = self._slots is not Slots.PARTS
        self.forget_copy()
        for part in plan.parts:
            if self._slots is Slots.WHOLE:
                part.take()
            if self.weights_stale:
                part.refresh()
        self._slots, self.weights_stale = Slots.PARTS, False
        return emptied

    def restore_whole(self) -> None:
        """Gives the optimizer the whole state, on all workers. All workers must call it."""
        plan = self.parted
        if plan is None:
            return
        self.forget_copy()
        for part in plan.parts:
            part.free_weights()
        plan.gather_slots(keep=True, free=True)
        self.given_whole()

    def given_whole(self) -> None:
        """Notes that the optimizer has its whole state, as after a restore of a failed call."""
        self._slots, self.weights_stale = Slots.WHOLE, True

    def restore_alone(self) -> None:
        """Gives the optimizer the whole state after an error, if this process has all shards."""
        if len(self._transport.ranks) == self._transport.size:
            with contextlib.suppress(Exception):
                self.restore_whole()

    def copy_to_chief(self) -> None:
        """Gives the chief's optimizer the whole state, until the next step; a collective."""
        if self._plan is not None and self._slots in (Slots.TAKEN, Slots.PARTS):
            self._plan.gather_slots(keep=self._transport.ranks[0] == 0)
            self._slots = Slots.COPIED

    @property
    def parted(self) -> ShardPlan | None:
        """Plan of the slots' shards; None if the optimizer has all slots."""
        return None if self._slots is Slots.WHOLE else self._plan

    def forget_copy(self) -> None:
        """Frees the copy of `copy_to_chief`."""
        if self._plan is not None and self._slots is Slots.COPIED:
            self._plan.forget_slots()
            self._slots = Slots.PARTS


def is_driven(model: Any) -> bool:
    """Whether a call of fit, evaluate or predict is using the model."""
    return bool(kept_with(model).updates)


@contextlib.contextmanager
def sharded_updates(model: Any, updates: list[ShardedUpdate]) -> Iterator[None]:
    """Gives optimizers their whole state again at the end; all workers enter and leave it.

    If a worker may be lost, the state cannot be gathered: later calls refuse the model.

    Raises:
        UsageError: the state of an optimizer was lost in an earlier call.
    """
    kept = kept_with(model)
    outer = kept.updates
    for update in outer:  # within another call, by a callback
        update.restore_whole()
        update.weights_stale = True
    for update in updates:
        optimizer_part.refuse_empty(update.optimizer)
        update.given_whole()
    kept.updates = updates
    try:
        yield
        for update in updates:
            update.restore_whole()
        if any(update.made for update in updates):
            kept.last_updates = [update.description for update in updates]
    except BaseException:
        for update in updates:
            update.restore_alone()
        raise
    finally:
        kept.updates = outer


def is_sharded(model: Any) -> bool:
    """Whether the steps of the last call sharded the update of the weights."""
    return any(line.startswith(_SHARDED) for line in kept_with(model).last_updates)


def description(model: Any) -> str:
    """A description of the updates in the steps of the last call."""
    return "; ".join(kept_with(model).last_updates)


def _environments_choice() -> Any:
    """The environment's choice: True, False or "auto". Raises UsageError for another value."""
    value = os.environ.get(SHARD_OPTIMIZER, "auto")
    choices = {"auto": "auto", "on": True, "off": False}
    if value not in choices:
        raise UsageError(f"{SHARD_OPTIMIZER} is {value!r}: expected auto, on or off.")
    return choices[value]


def _facts(grads: list[Any], scale: Any) -> tf.Tensor:
    """float64 [2]: number of nonfinite gradients, and the sum of squares after unscaling."""
    if not grads:
        return tf.zeros([2], tf.float64)
    values = [g.values if isinstance(g, tf.IndexedSlices) else g for g in grads]
    wrong = [tf.cast(tf.reduce_any(~tf.math.is_finite(v)), tf.float64) for v in values]
    squares = [
        tf.cast(tf.reduce_sum(tf.square(v / tf.cast(scale, v.dtype))), tf.float64) for v in values
    ]
    return tf.stack([tf.add_n(wrong), tf.add_n(squares)])


def assignments(function: Any) -> Counter[int]:
    """Number of operations that change each variable, in the function and in those that it calls.

    A loop's body counts once, and all branches of a condition count. The function is a
    `tf.types.experimental.ConcreteFunction`; returns the id of a captured handle -> their number.
    """
    definition = function.graph.as_graph_def()
    bodies = {body.signature.name: body for body in definition.library.function}
    counts: dict[str, list[int]] = {}  # counts for the arguments of a function
    for name in inputs_first(
        _called(definition.node, bodies), lambda name: _called(bodies[name].node_def, bodies)
    ):
        inside = _changed(bodies[name].node_def, counts)
        counts[name] = [inside[arg.name] for arg in bodies[name].signature.input_arg]
    found = _changed(definition.node, counts)
    handles = function.captured_inputs
    names = [tensor.op.name for tensor in function.inputs[len(function.inputs) - len(handles) :]]
    return Counter({id(h): found[name] for h, name in zip(handles, names, strict=True)})


def _changed(nodes: Any, counts: dict[str, list[int]]) -> Counter[str]:
    """Name of a node, or of a function's argument -> number of operations that change it."""
    found: Counter[str] = Counter()
    for node in nodes:
        inputs = [name.partition(":")[0] for name in node.input if not name.startswith("^")]
        if node.op.startswith(_WRITES):
            found.update(inputs)
        for called in _called([node], counts):
            # a condition has its index before the arguments
            found.update(dict(zip(reversed(inputs), reversed(counts[called]), strict=False)))
    return found


def _called(nodes: Any, known: Container[str]) -> list[str]:
    """Names of the known functions that nodes call."""
    attributes = [a for node in nodes for a in node.attr.values()]
    return [f.name for a in attributes for f in [a.func, *a.list.func] if f.name in known]
