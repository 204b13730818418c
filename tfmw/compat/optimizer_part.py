"""The shard of an optimizer's state that one worker keeps if workers shard the update.

    part = OptimizerPart(optimizer, own={0: slice(0, 50), 2: None}, sharded={0, 1, 2})
    part.take()                        # frees the slots of other workers' shards
    with part.in_place():              # while a step is traced
        optimizer.apply(grads_of_parts, variables)

The optimizer stays the user's own object, with its counters, learning rate, decay and clipping.
While an update is traced, its variables hold `tf.Variable`s of the worker's shard only, and it has
no others. In between it has its ordinary variables, whose slots are empty until `put` fills them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.ops import resource_variable_ops as _resource_variables

from tfmw.compat import memory
from tfmw.compat.kept import kept_with
from tfmw.compat.models import native
from tfmw.compat.objects import overridden
from tfmw.compat.optimizers import (
    slot_lists,
    stable_variable_keys,
    variables_of,
    with_inner_optimizers,
)
from tfmw.errors import UsageError

_AVERAGES = "_model_variables_moving_average"


@contextlib.contextmanager
def all_gradients_known(optimizer: Any, finite: Any, norm: Any) -> Iterator[None]:
    """Gives the optimizer the values that it would compute from all gradients.

    Args:
        finite: bool [], whether all gradients are finite; None if the optimizer does not check it.
        norm: float [], global norm after unscaling; None if the optimizer does not use it.
    """
    overrides: list[tuple[Any, str, Any]] = []
    if finite is not None:
        overrides.append((optimizer, "check_finite", lambda grads: finite))
    if norm is not None:
        inner = list(with_inner_optimizers(optimizer))[-1]
        clipnorm = inner.global_clipnorm

        def clip(grads: list[Any]) -> list[Any]:
            # Formula of keras.src.optimizers.base_optimizer.clip_by_global_norm; NaN if the norm
            # isn't finite.
            scale = clipnorm * tf.minimum(1.0 / norm, 1.0 / clipnorm) + (norm - norm)
            return [g if g is None else g * tf.cast(scale, g.dtype) for g in grads]

        overrides.append((inner, "_clip_gradients", clip))
    with overridden(overrides):
        yield


class OptimizerPart:
    """This worker's shard of the variables that an optimizer updates, and of their slots.

    Args:
        optimizer: a built optimizer.
        own: index of a variable -> the elements that this worker updates, in a flat form; None for
            the whole variable.
        sharded: indices of the variables whose update is sharded. Every worker updates the others.
        replica: the local index of the replica that has the shard.

    Attributes:
        slots: (name, Keras variables in the order of the optimizer's variables; None if a variable
            has no slot).

    The constructor calls `take`.
    """

    def __init__(
        self, optimizer: Any, own: dict[int, slice | None], sharded: set[int], replica: int = 0
    ):
        self._optimizer = optimizer
        self._own = own
        self._sharded = sharded
        self._replica = replica
        self._variables = variables_of(optimizer)
        self.slots = _state_of(optimizer)
        self._slot_parts: dict[tuple[str, int], tf.Variable] = {}
        with tf.init_scope():
            self.take()
            self._weight_parts = {
                i: self._new_part(self._variables[i], self._part_of(i, self._variables[i]))
                for i in own
            }

    def _copy(self, variable: Any) -> tf.Variable:
        """The replica's own `tf.Variable` of a Keras variable."""
        copies = memory.copies_of(native(variable))
        return copies[self._replica] if len(copies) > 1 else copies[0]

    def _new_part(self, variable: Any, value: Any) -> tf.Variable:
        # A plain `tf.Variable` would be the strategy's, and all workers would get the chief's
        # value.
        with tf.device(self._copy(variable).device or "cpu:0"):
            return _resource_variables.ResourceVariable(
                value, trainable=False, name=variable.name.split(":")[0]
            )

    def _part_of(self, index: int, variable: Any) -> tf.Tensor:
        value, part = self._copy(variable).read_value(), self._own[index]
        return value if part is None else tf.reshape(value, [-1])[part]

    # ------------------------------------------------------------ values

    def take(self) -> None:
        """Copies this worker's shard of all slots, and frees the optimizer's own variables."""
        # One kind of slot after the other: two copies of all slots would be the peak memory of a
        # run. The shards of a kind wait outside of TensorFlow's memory until all its slots are
        # freed. Then they are adjacent, and the free memory beside them is large enough for
        # gradients.
        for name, slots in self.slots:
            parts: dict[int, np.ndarray] = {}
            for i in self._sharded:
                if slots[i] is None:
                    continue
                if i in self._own:
                    parts[i] = np.array(memory.view_of(self._part_of(i, slots[i])))
                kept_with(slots[i]).is_gathered = False
                memory.free(self._copy(slots[i]))
            for i in sorted(parts, key=lambda i: parts[i].nbytes, reverse=True):
                value = parts.pop(i)
                if (name, i) in self._slot_parts:
                    memory.fill(self._slot_parts[name, i], tf.constant(value))
                else:
                    self._slot_parts[name, i] = self._new_part(slots[i], value)

    def refresh(self) -> None:
        """Copies this worker's shard of the weights from the model."""
        for i, part in self._weight_parts.items():
            memory.fill(part, self._part_of(i, self._variables[i]))

    def free_weights(self) -> None:
        """Frees the shards of the weights, until `refresh`."""
        for part in self._weight_parts.values():
            memory.free(part)

    def free_slot(self, name: str, index: int) -> None:
        """Frees the shard of a slot, if there is one, until `take`."""
        part = self._slot_parts.get((name, index))
        if part is not None:
            memory.free(part)

    def weight(self, index: int) -> tf.Tensor:
        """[m], the shard of a variable."""
        return tf.reshape(self._weight_parts[index].read_value(), [-1])

    def slot(self, name: str, index: int) -> np.ndarray:
        """uint8 [n], the bytes of a slot's shard; empty if the slot does not exist."""
        part = self._slot_parts.get((name, index))
        if part is None:
            return np.zeros([0], np.uint8)
        return memory.view_of(part.read_value()).reshape(-1).view(np.uint8)

    def slot_values(self) -> Iterator[tuple[Any, slice, tf.Tensor]]:
        """Yields (slot, slice of its flattened values, those values)."""
        slots = dict(self.slots)
        for (name, index), part in self._slot_parts.items():
            slot = slots[name][index]
            elements = self._own[index] or slice(0, slot._value.shape.num_elements())
            yield slot, elements, tf.reshape(part.read_value(), [-1])

    # ------------------------------------------------------------ while an update is traced

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Gives the optimizer this worker's shard alone, in this context."""
        kept = [i for i in range(len(self._variables)) if i in self._own or i not in self._sharded]
        overrides: list[tuple[Any, str, Any]] = []
        for each in with_inner_optimizers(self._optimizer):
            overrides.append((each, "_trainable_variables", [self._variables[i] for i in kept]))
            for name, slots in slot_lists(each):
                here = [slots[i] if i in kept else None for i in range(len(slots))]
                # Keras pairs averages with variables, and looks up all other slots by index.
                overrides.append(
                    (each, name, [slots[i] for i in kept] if name == _AVERAGES else here)
                )
        stand_ins = [(self._variables[i], part) for i, part in self._weight_parts.items()]
        stand_ins += [(dict(self.slots)[name][i], p) for (name, i), p in self._slot_parts.items()]
        for variable, part in stand_ins:
            shape = tuple(part.shape)
            overrides += [(variable, "_value", part), (variable, "_shape", shape)]
            overrides.append((variable, "_ndim", len(shape)))
        with stable_variable_keys([self._optimizer], self._variables), overridden(overrides):
            yield


def bytes_of(slot: Any) -> int:
    """Size of a whole slot in bytes."""
    return int(slot._value.shape.num_elements() * slot._value.dtype.size)


def put(slot: Any, values: tf.Tensor) -> None:
    """Assigns a value to a freed slot.

    Args:
        values: uint8 [n], the bytes of all its elements.
    """
    kept_with(slot).is_gathered = True
    dtype = slot._value.dtype
    flat = tf.bitcast(tf.reshape(values, [-1, dtype.size]), dtype)
    memory.fill(slot._value, tf.reshape(flat, slot._value.shape))


def empty(slot: Any) -> None:
    """Frees the memory of a slot."""
    kept_with(slot).is_gathered = False
    memory.free(slot._value)


def refuse_empty(optimizer: Any) -> None:
    """Raises UsageError if the state of the optimizer is freed."""
    for _, slots in _state_of(optimizer):
        if any(slot is not None and memory.is_freed(slot._value) for slot in slots):
            raise UsageError(
                f"the state of the optimizer {optimizer.name!r} was lost when the last call ended "
                "with an error, as each worker had a part of it: compile the model again, or "
                "restore a backup into a new one."
            )


def _state_of(optimizer: Any) -> list[tuple[str, list[Any]]]:
    """Slots that have state: Adafactor also keeps lists of unused variables."""
    tracked = {id(v) for v in optimizer.variables}
    return [
        (name, [slot if id(slot) in tracked else None for slot in slots])
        for each in with_inner_optimizers(optimizer)
        for name, slots in slot_lists(each)
    ]
