"""Layers that replace rows of their variables in a step, with the optimizer's slots.

note_slots()                                   # once, before optimizers are built
ids, counts = counts_of_all_replicas(ids, counts)
assign_rows(variable, rows, values)
reset_slots(variable, rows)                    # to their initial values
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.tensorflow import optimizer as _tf_optimizer

from tfmw.compat.losses import CannotCompile, current_weight
from tfmw.compat.models import native
from tfmw.compat.objects import overridden
from tfmw.compat.parameter_servers import RemoteRows
from tfmw.errors import UsageError

_SLOTS = "_tfmw_slots"  # attribute of Keras variables: (optimizer's id, [(slot, initializer)])
_RESET = "_tfmw_resets_rows"
_making = threading.local()  # `slot_of`: the variable for which an optimizer creates a slot


def resets_rows(variable: Any) -> None:
    """Marks a Keras variable, before an optimizer is built, as one for `reset_slots`."""
    setattr(variable, _RESET, True)


@functools.cache
def note_slots() -> None:
    """Makes optimizers record the slots that they create; see `slot_of_new` and `reset_slots`.

    Adagrad and Ftrl do so for marked variables, and for those whose rows are on servers. Keras 3.8
    creates their slots with `add_variable`, later releases all with `add_variable_from_reference`.
    """
    keras_slot = _tf_optimizer.TFOptimizer.add_variable_from_reference

    @functools.wraps(keras_slot)
    def add_variable_from_reference(
        self: Any, reference_variable: Any, name: Any = None, initializer: Any = "zeros"
    ) -> Any:
        with overridden([(_making, "slot_of", reference_variable)]):
            slot = keras_slot(self, reference_variable, name=name, initializer=initializer)
        if getattr(reference_variable, _RESET, False):
            optimizer, slots = getattr(reference_variable, _SLOTS, (None, []))
            if optimizer != id(self):  # the model was compiled again
                slots = []
            setattr(reference_variable, _SLOTS, (id(self), [*slots, (slot, initializer)]))
        return slot

    _tf_optimizer.TFOptimizer.add_variable_from_reference = add_variable_from_reference
    if not hasattr(keras.optimizers.Optimizer, "add_optimizer_variables"):
        for kind in (keras.optimizers.Adagrad, keras.optimizers.Ftrl):
            kind.build = _naming_variables(kind.build)


def slot_of_new() -> Any | None:
    """The Keras variable for which an optimizer creates a slot now; None if it creates none."""
    return getattr(_making, "slot_of", None)


def _naming_variables(keras_build: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(keras_build)
    def build(self: Any, variables: list[Any]) -> None:
        keras_add, remaining = self.add_variable, iter(variables)

        def add_variable(**described: Any) -> Any:
            # `add_variable_from_reference` calls this, too, with a longer name.
            if described["name"] != "accumulator":
                return keras_add(**described)
            variable = next(remaining)  # slots are created in the order of the variables
            if not (getattr(variable, _RESET, False) or isinstance(native(variable), RemoteRows)):
                return keras_add(**described)
            return self.add_variable_from_reference(
                variable, name="accumulator", initializer=described["initializer"]
            )

        with overridden([(self, "add_variable", add_variable)]):
            keras_build(self, variables)

    return build


def assign_rows(variable: Any, rows: tf.Tensor, values: tf.Tensor) -> None:
    """Replaces rows, in place, by values that are equal on all replicas.

    Args:
        variable: a Keras variable [size, ...].
        rows: int64 [n], distinct.
        values: [n, ...].
    """
    with equal_on_all_replicas():
        native(variable).scatter_update(tf.IndexedSlices(values, rows))


def equal_on_all_replicas() -> contextlib.AbstractContextManager[None]:
    """A context for a step's assignments of values that are equal on all replicas.

    Other values that a step assigns are combined over replicas, or refused.
    """
    weight = current_weight()
    return overridden([] if weight is None else [(weight, "watches", False)])


def reset_slots(variable: Any, rows: tf.Tensor) -> None:
    """Resets the slots of some rows of a marked variable to their initial values.

    Slots of another shape than the variable's stay unchanged.

    Args:
        rows: int64 [n], distinct.
    """
    _, slots = getattr(variable, _SLOTS, (None, []))
    for slot, initializer in slots:
        if slot.shape == variable.shape:
            row = keras.initializers.get(initializer)([1, *slot.shape[1:]], dtype=slot.dtype)
            assign_rows(slot, rows, tf.repeat(tf.convert_to_tensor(row), tf.size(rows), axis=0))


def counts_of_all_replicas(ids: tf.Tensor, counts: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Counts of ids on all replicas of a training step; with one replica, its own counts.

    With several replicas this is a collective.

    Args:
        ids: int64 [n]; n may differ between replicas.
        counts: int64 [n].

    Returns:
        (int64 [m], int64 [m]), the concatenated ids and counts of all replicas. A replica without
        examples has counts of 0.

    Raises:
        UsageError: several replicas train without `tfmw.fit`.
    """
    weight = current_weight()
    if weight is None:
        if tf.distribute.get_strategy().num_replicas_in_sync > 1:
            raise UsageError(
                "a layer that looks at the global batch was called on one of several replicas, "
                "outside of tfmw: train the model with tfmw.fit."
            )
        return ids, counts
    if weight.deferred is not None or weight.gather is None:
        raise CannotCompile
    counts = tf.where(weight.examples > 0, counts, tf.zeros_like(counts))
    shape = tf.constant([tf.int64.max], tf.int64)  # the op requires a shape; any id is possible
    gathered = weight.gather(tf.IndexedSlices(counts, ids, shape))
    return gathered.indices, gathered.values
