"""The update of the weights, which the workers of a ring share.

    update = SharedUpdate(optimizer, reduction, choice="auto")
    with update.reduced(grads, variables) as (own_grads, own_variables):
        optimizer.apply(own_grads, own_variables)

Without sharing, gradients are summed over all workers, and each worker makes the whole update. With
it, a sum stops half way, where each worker has one part of it; each updates that part, and the
parts of the weights travel on as the second half of the sum would have. The same bytes travel, and
each worker has an N-th of the update's work and of the optimizer's slots (Xu et al., Automatic
Cross-Replica Sharding of Weight Update in Data-Parallel Training, 2020; ZeRO stage 1).

A pack of gradients is cut into parts as the ring cuts it anyway, so the sums are the same to the
last bit. Where an optimizer looks at whole variables, packs are cut between variables.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tfmw.errors import UsageError
from tfmw.keras_compat import optimizer_part
from tfmw.keras_compat.fused_update import fuses
from tfmw.keras_compat.optimizer_part import OptimizerPart
from tfmw.mirrored.collectives import reduction as reduction_lib
from tfmw.mirrored.collectives.hierarchy import AnyRing
from tfmw.mirrored.collectives.reduction import Reduction
from tfmw.mirrored.collectives.ring import even_cuts
from tfmw.mirrored.packs import Pack
from tfmw.mirrored.slots import forget_slots, gather_slots

logger = logging.getLogger("tfmw")

_UPDATES = "_self_tfmw_updates"  # so called, it does not count as the model's own
_SHARED = "shared by"
_LAST = "_self_tfmw_last_updates"

SHARD_OPTIMIZER = "TFMW_SHARD_OPTIMIZER"
"""Environment variable: what "auto" is. "on" is True, "off" is False, "auto" the default."""

MIN_BYTES = 8 << 20
"""Trainable weights below which "auto" shares no update: it saves less than it costs."""


class SharedUpdate:
    """How one optimizer updates the weights on each worker.

    Args:
        optimizer: built, of a model that is placed.
        reduction: of the strategy's gradients.
        choice: True, False or "auto": where it pays.
        eager: whether steps run op by op.
        compressed: whether gradients are sent in 16 bits.

    Attributes:
        of_call: why the steps of this call do not share the update; None where they may.
        made: whether any update has been traced.
    """

    def __init__(
        self,
        optimizer: Any,
        reduction: Reduction,
        choice: Any = False,
        *,
        eager: bool = False,
        compressed: bool = False,
    ):
        self.optimizer = optimizer
        self._reduction = reduction
        self._choice = _environments_choice() if choice == "auto" else choice
        self._variables = optimizer_part.variables_of(optimizer)
        self._index = {id(v): i for i, v in enumerate(self._variables)}
        self._packs: list[Pack] = []
        self._part: OptimizerPart | None = None
        self._whole = True  # whether the optimizer's own variables have the state
        self._copied = False  # to the chief alone
        self._stale = False
        self.made = False
        self._read_between_steps = False
        self.of_call: str | None = None
        self._refused = self._why_not(eager, compressed)

    @property
    def reason(self) -> str | None:
        """Why each worker makes the whole update; None where they share it."""
        return self._refused or self.of_call

    def begin(self, read_between_steps: bool) -> None:
        """Before the steps of a call of fit.

        Args:
            read_between_steps: whether callbacks may look at the optimizer there.
        """
        self._read_between_steps = read_between_steps
        shares = self._choice is True or not read_between_steps
        self.of_call = None if shares else "a callback may look at the optimizer between steps"

    def _why_not(self, eager: bool, compressed: bool) -> str | None:
        if self._choice is False:
            return "shard_optimizer=False"
        if self._reduction.ring is None:
            return "gradients do not travel over tfmw's ring"
        if eager:
            return "run_eagerly"
        refused = optimizer_part.refuses_parts(self.optimizer)
        if refused or self._choice is True:
            return refused
        if compressed:
            return "gradient_compression halves gradients, and not weights"
        size = sum(v.shape.num_elements() * v.value.dtype.size for v in self._variables)
        if size < MIN_BYTES:
            return f"{size / 1e6:.1f} MB of weights are few"
        if not optimizer_part.has_slots(self.optimizer):
            return "the optimizer keeps no state for each variable"
        return None

    @property
    def description(self) -> str:
        """One line for people."""
        if self.reason is not None:
            return f"on every worker ({self.reason})"
        return f"{_SHARED} {self._ring.size} workers"

    @property
    def _ring(self) -> AnyRing:
        ring = self._reduction.ring
        assert ring is not None  # else there is a reason
        return ring

    # ------------------------------------------------------------ within a step

    @contextlib.contextmanager
    def reduced(
        self, grads: list[Any], variables: list[Any]
    ) -> Iterator[tuple[list[Any], list[Any]]]:
        """Sums gradients; within the context the optimizer makes this worker's part of the update.

        All workers enter it. In a replica context.

        Args:
            grads: of this replica, as in `Reduction`.
            variables: Keras variables, of each gradient.

        Returns:
            The gradients to apply, and the variables to apply them to.
        """
        if self.reason is None and self._part is None:
            self._plan(grads, variables)
        if not self.made:
            self._log()
        self.made = True
        if self._part is None or self.reason is not None:
            yield self._reduction(grads), variables
            return
        given = {
            self._index[id(v)]: g for g, v in zip(grads, variables, strict=True) if g is not None
        }
        self._refuse_idle(given)
        own, rest = self._scattered(given), self._rest(given)
        totals, updated = [], []
        for variable, grad in zip(variables, grads, strict=True):
            index = self._index[id(variable)]
            if grad is None or index in own or index in rest:
                totals.append(own.get(index, rest.get(index)))
                updated.append(variable)
        with self._known_of_all(own, rest), self._part.in_place():
            yield totals, updated
        self._gather_weights()

    def _scattered(self, given: dict[int, Any]) -> dict[int, tf.Tensor]:
        """Index of a variable -> the sum of its gradients, in this worker's part of them."""
        own: dict[int, tf.Tensor] = {}
        for pack in self._packs:
            # Without a gradient this time, a variable's place in the pack stays.
            flat = [self._flat(given.get(i), i) for i in pack.indices]
            total = self._reduction.scattered(
                flat[0] if len(flat) == 1 else tf.concat(flat, axis=0), pack.cuts
            )
            parts = self._own_elements(pack)
            sizes = [part.stop - part.start for _, part in parts]
            values = _split(total, sizes)
            for (index, part), value in zip(parts, values, strict=True):
                if index in given:
                    whole = part.stop - part.start == self._elements(index)
                    own[index] = value
                    if whole and self._own[index] is None:
                        own[index] = tf.reshape(value, self._variables[index].shape)
        return own

    def _refuse_idle(self, given: dict[int, Any]) -> None:
        """Raises UsageError on all workers where one would have nothing to update."""
        ring = self._ring
        packed = {i for pack in self._packs for i in pack.indices}
        for rank in range(ring.size):
            parts = (pack.elements_in(ring.part_of(pack.cuts, rank)) for pack in self._packs)
            own = {index for part in parts for index, _ in part}
            if not any(i in own or i not in packed for i in given):
                raise UsageError(
                    f"{self.optimizer.name!r} updates {len(given)} of {len(self._variables)} "
                    "variables here, and a worker has a part of none of them: train with "
                    "shard_optimizer=False."
                )

    def _rest(self, given: dict[int, Any]) -> dict[int, Any]:
        """Index of a variable that each worker updates -> the sum of its gradients."""
        packed = {i for pack in self._packs for i in pack.indices}
        rest = {i: g for i, g in given.items() if i not in packed}
        return dict(zip(rest, self._reduction(list(rest.values())), strict=True))

    def _flat(self, grad: Any, index: int) -> tf.Tensor:
        if grad is None:
            return tf.zeros([self._elements(index)], self._dtype(index))
        return tf.reshape(tf.convert_to_tensor(grad), [-1])

    @contextlib.contextmanager
    def _known_of_all(self, own: dict[int, Any], rest: dict[int, Any]) -> Iterator[None]:
        """Gives the optimizer what it would compute of all gradients."""
        asks_finite = optimizer_part.checks_finite(self.optimizer)
        asks_norm = optimizer_part.global_clipnorm(self.optimizer) is not None
        if not asks_finite and not asks_norm:
            yield
            return
        scale = optimizer_part.loss_scale(self.optimizer)
        local = _facts(list(own.values()), scale)
        facts = self._reduction.sum(local) + _facts(list(rest.values()), scale)
        finite = tf.equal(facts[0], 0) if asks_finite else None
        norm = tf.sqrt(facts[1]) if asks_norm else None
        with optimizer_part.all_gradients_known(self.optimizer, finite, norm):
            yield

    def _gather_weights(self) -> None:
        """Gives all workers the updated weights."""
        if reduction_lib.nothing() is not None:
            return
        assert self._part is not None
        assigned: list[Any] = []
        for pack in self._packs:
            own = [self._part.weight(i) for i, _ in self._own_elements(pack)]
            flat = tf.concat(own, axis=0) if own else tf.zeros([0], pack.dtype)
            # The memory of the weights before is for the next pack: it must be free by then.
            with tf.control_dependencies(assigned):
                total = self._reduction.gathered(own[0] if len(own) == 1 else flat, pack.cuts)
            assigned = []
            values = _split(total, pack.sizes)
            for index, value in zip(pack.indices, values, strict=True):
                variable = self._variables[index]
                update = variable.value.assign(tf.reshape(value, variable.shape))
                assigned.append(update.op if update is not None else tf.no_op())

    # ------------------------------------------------------------ who updates what

    def _plan(self, grads: list[Any], variables: list[Any]) -> None:
        """Divides the variables, while the first step is traced: the same on all workers."""
        ring = self._ring
        loads = [0] * ring.size
        packs = []
        for positions in self._reduction.packs(grads):
            if not all(self._may_share(grads[p], variables[p]) for p in positions):
                continue
            indices = [self._index[id(variables[p])] for p in positions]
            packs.append(self._pack(indices, loads))
            for worker in range(ring.size):
                part = ring.part_of(packs[-1].cuts, worker)
                loads[worker] += part.stop - part.start
        clips = optimizer_part.global_clipnorm(self.optimizer) is not None
        if {id(v) for v in variables} != self._index.keys():
            # A worker that updates none of them would not count the update.
            self._refused = "the step updates some of the variables at a time"
        elif clips and any(isinstance(g, tf.IndexedSlices) for g in grads):
            self._refused = "global_clipnorm looks at sparse gradients"
        elif not all(loads):
            self._refused = "there are fewer variables than workers"
        if self.reason is None:
            self._packs = packs
            self._own = {
                index: part
                for pack in packs
                for index, part in self._as_parts(self._own_elements(pack))
            }
            shared = {i for pack in packs for i in pack.indices}
            self._part = OptimizerPart(self.optimizer, self._own, shared)
            self._whole = False

    def _log(self) -> None:
        """Tells people how the weights are updated, where they chose or might wonder."""
        ring = self._reduction.ring
        if ring is not None and ring.rank == 0 and self._choice is not False:
            level = logging.WARNING if self.reason and self._choice is True else logging.INFO
            logger.log(level, "%s updates the weights %s", self.optimizer.name, self.description)

    def _may_share(self, grad: Any, variable: Any) -> bool:
        return (
            isinstance(grad, tf.Tensor)
            and grad.shape.is_fully_defined()
            and id(variable) in self._index
            and grad.dtype == self._dtype(self._index[id(variable)])
            and not variable.overwrite_with_gradient
        )

    def _pack(self, indices: list[int], loads: list[int]) -> Pack:
        """Cuts a pack, and adds what each worker gets to `loads`."""
        compiled = fuses(self.optimizer, self._variables)
        workers = len(loads)
        if all(
            optimizer_part.updated_by_element(self.optimizer, self._variables[i], compiled)
            for i in indices
        ):
            starts = self._starts(indices)
            cuts = even_cuts(starts[-1], workers)
        else:
            # Each variable, large ones first, to the worker with least so far.
            parts: list[list[int]] = [[] for _ in loads]
            loads = list(loads)
            for index in sorted(indices, key=self._elements, reverse=True):
                worker = int(np.argmin(loads))
                loads[worker] += self._elements(index)
                parts[self._ring.part_number(worker)].append(index)
            indices = [index for part in parts for index in part]
            starts = self._starts(indices)
            cuts = [starts[sum(map(len, parts[:number]))] for number in range(workers + 1)]
        return Pack(indices, starts, cuts, self._dtype(indices[0]))

    def _starts(self, indices: list[int]) -> list[int]:
        starts: list[int] = np.cumsum([0, *map(self._elements, indices)]).tolist()
        return starts

    def _own_elements(self, pack: Pack) -> list[tuple[int, slice]]:
        """(index, elements) of the variables of a pack that have some in this worker's part."""
        return pack.elements_in(self._ring.own_part(pack.cuts))

    def _as_parts(self, elements: list[tuple[int, slice]]) -> list[tuple[int, slice | None]]:
        """The same, with None for whole variables."""
        return [
            (index, None if part.stop - part.start == self._elements(index) else part)
            for index, part in elements
        ]

    def _elements(self, index: int) -> int:
        return int(np.prod(self._variables[index].shape))

    def _dtype(self, index: int) -> tf.DType:
        return tf.as_dtype(self._variables[index].dtype)

    # ------------------------------------------------------------ between steps

    def weights_changed(self) -> None:
        """Others than the steps may have assigned to the weights."""
        self._stale = True

    def before_steps(self) -> None:
        """Takes this worker's part of the state, where the optimizer has all of it."""
        if self._part is None or self.reason is not None:
            return
        self.forget_copy()
        if self._whole:
            self._part.take()
            self._whole = False
        if self._stale:
            self._part.refresh()
            self._stale = False

    def after_steps(self) -> None:
        """Lets callbacks between steps see the whole state. All workers call it."""
        if self._read_between_steps:
            self.restore_whole()
            self.weights_changed()

    def restore_whole(self) -> None:
        """Gives the optimizer the whole state, on all workers. All workers call it."""
        if self._part is None or self._whole:
            return
        self.forget_copy()
        self._part.free_weights()
        gather_slots(self._part, self._packs, self._ring, keep=True, free=True)
        self._whole = self._stale = True

    def copy_to_chief(self) -> None:
        """Gives the chief's optimizer the whole state, until the next step. All workers call it."""
        ring = self._reduction.ring
        if self._part is not None and not self._whole and not self._copied:
            assert ring is not None
            gather_slots(self._part, self._packs, ring, keep=ring.rank == 0)
            self._copied = True

    def forget_copy(self) -> None:
        """Frees what `copy_to_chief` made."""
        if self._copied and self._part is not None:
            forget_slots(self._part, self._packs)
            self._copied = False


@contextlib.contextmanager
def shared_updates(model: Any, updates: list[SharedUpdate]) -> Iterator[None]:
    """In the end the optimizers have their whole state again; all workers enter and leave it.

    After an error they have not, as workers may be gone; the model is refused from then on.

    Raises:
        UsageError: the state of an optimizer was lost so.
    """
    outer: list[SharedUpdate] = vars(model).get(_UPDATES, [])
    for update in outer:  # within another call, by a callback
        update.restore_whole()
        update.weights_changed()
    for update in updates:
        optimizer_part.refuse_empty(update.optimizer)
        update.weights_changed()
    vars(model)[_UPDATES] = updates  # past Keras's __setattr__
    try:
        yield
        for update in updates:
            update.restore_whole()
        if any(update.made for update in updates):
            vars(model)[_LAST] = [update.description for update in updates]
    finally:
        vars(model)[_UPDATES] = outer


def is_shared(model: Any) -> bool:
    """Whether the steps of the last call shared an update of the weights."""
    return any(line.startswith(_SHARED) for line in vars(model).get(_LAST, []))


def description(model: Any) -> str:
    """How the steps of the last call updated the weights."""
    return "; ".join(vars(model).get(_LAST, []))


def _environments_choice() -> Any:
    """True, False or "auto".

    Raises:
        UsageError: the environment has another value.
    """
    value = os.environ.get(SHARD_OPTIMIZER, "auto")
    choices = {"auto": "auto", "on": True, "off": False}
    if value not in choices:
        raise UsageError(f"{SHARD_OPTIMIZER} is {value!r}: expected auto, on or off.")
    return choices[value]


def _split(flat: tf.Tensor, sizes: list[int]) -> list[tf.Tensor]:
    """[n] -> one [size] for each of `sizes`, without a copy for one alone."""
    if len(sizes) < 2:
        return [flat][: len(sizes)]
    parts: list[tf.Tensor] = tf.split(flat, sizes)
    return parts


def _facts(grads: list[Any], scale: Any) -> tf.Tensor:
    """float64 [2]: how many gradients are not finite, and the sum of squares after unscaling."""
    if not grads:
        return tf.zeros([2], tf.float64)
    values = [g.values if isinstance(g, tf.IndexedSlices) else g for g in grads]
    wrong = [tf.cast(tf.reduce_any(~tf.math.is_finite(v)), tf.float64) for v in values]
    squares = [
        tf.cast(tf.reduce_sum(tf.square(v / tf.cast(scale, v.dtype))), tf.float64) for v in values
    ]
    return tf.stack([tf.add_n(wrong), tf.add_n(squares)])
