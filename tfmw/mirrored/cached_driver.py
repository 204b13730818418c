"""The driver of a call: that of the call before, with the steps it has traced, where that holds.

    with cached_driver(model, strategy) as driver:
        driver.test(...)

To trace a step takes seconds for a large model, and a loop that evaluates after every epoch would
take them each time. So a model keeps the driver of its last call, as Keras keeps its functions.

What a step finds in attributes, such as a rate of dropout or which layers are trainable, is in its
trace for good: Keras takes no notice of a change before `compile`. Here a driver is used again only
while every attribute of the model, its layers, metrics, optimizers and variables is what it was,
and was so whenever anything was traced: a callback may change one for the length of a call. What is
changed inside of other objects, or is global, counts from the next `compile` on, as in Keras.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tfmw import keras_compat
from tfmw.cluster import membership
from tfmw.cluster.group import Group
from tfmw.keras_compat import placement
from tfmw.mirrored.collectives import reduction
from tfmw.mirrored.collectives.connection import ring_of
from tfmw.mirrored.driver import SyncDriver

# TensorFlow's own notes are called so, which neither Keras nor `travel` takes for the model's.
_KEPT = "_self_tfmw_kept"
_MOST_KEPT = 2  # training and evaluation, where they differ: in precision, or compression
_SET_BY_CALLS = ("history", "stop_training")  # on the model, and read by no step
_COMPARED_BY_VALUE = (bool, int, float, str, bytes, keras.DTypePolicy)


@dataclasses.dataclass(frozen=True)
class _Facts:
    """What traces depend on. They hold all of it, so that no id is used twice.

    To collect them takes 5 ms for the 34,000 attributes of MobileNetV2, and to trace its steps
    takes seconds; Keras's `compile` alone does not show a changed rate of dropout.

    Attributes:
        parts: what has to be the same object; where it is not, it will not be again.
        settings: names and values of attributes, and what else a call may choose.
    """

    parts: list[Any]
    settings: list[Any]

    @classmethod
    def of(
        cls, model: keras.Model, strategy: tf.distribute.Strategy, compression: str | None
    ) -> _Facts:
        optimizers = keras_compat.optimizers_of(model)
        variables = placement.all_variables(model)
        parts = [
            *keras_compat.layers_of(model),
            *keras_compat.leaf_metrics(model),
            *(each for o in optimizers for each in keras_compat.with_inner_optimizers(o)),
            *variables,
        ]
        settings = [compression, reduction.nothing()]
        for part in parts:
            for name, value in vars(part).items():
                if not (
                    name.startswith("_self_")
                    or name in keras_compat.NOTES_OF_CALLS
                    or (part is model and name in _SET_BY_CALLS)
                ):
                    settings += [name, value]
        return cls(
            [
                strategy,
                ring_of(strategy),
                membership.reduction_options(strategy),
                keras_compat.source_of_seeds(),
                *parts,
                *map(keras_compat.native, variables),
            ],
            settings,
        )

    def same_parts(self, other: _Facts) -> bool:
        ours, others = self.parts, other.parts
        return len(ours) == len(others) and all(map(_is, ours, others))

    def same(self, other: _Facts) -> bool:
        ours, others = self.settings, other.settings
        return self.same_parts(other) and len(ours) == len(others) and all(map(_is, ours, others))


def _is(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and isinstance(a, _COMPARED_BY_VALUE) and a == b)


@dataclasses.dataclass(frozen=True)
class _Kept:
    facts: _Facts
    driver: SyncDriver


@contextlib.contextmanager
def cached_driver(
    model: keras.Model, strategy: tf.distribute.Strategy, compression: str | None = None
) -> Iterator[SyncDriver]:
    """A driver in which the model is placed; the arguments are those of `SyncDriver`."""
    at_begin = _Facts.of(model, strategy, compression)
    # What cannot serve again goes now, before the call needs memory.
    others = [k for k in vars(model).pop(_KEPT, []) if k.facts.same_parts(at_begin)]
    number = next((i for i, k in enumerate(others) if k.facts.same(at_begin)), None)
    # All take the same one, or none: TensorFlow numbers its collectives as they are traced.
    numbers = set(Group.of(strategy).from_all(number))
    if number is not None and len(numbers) == 1:
        driver = others.pop(number).driver
        driver.reset()
    else:
        driver = SyncDriver(model, strategy, compression)
    held: list[bool] = []  # whenever anything was traced
    try:
        with driver:
            entered = _Facts.of(model, strategy, compression)  # with what the driver itself sets
            driver.traces_valid = lambda: _Facts.of(model, strategy, compression).same(entered)
            driver.on_trace(lambda: held.append(driver.traces_valid()))
            yield driver
    finally:
        vars(model).pop(_KEPT, None)  # of calls within this one
    if driver.outlives_placement and all(held):
        vars(model)[_KEPT] = [_Kept(at_begin, driver), *others][:_MOST_KEPT]
