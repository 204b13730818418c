"""The driver of a call: that of the call before, with the steps it has traced, where that holds.

    with driving(model, strategy) as driver:
        driver.test(...)

To trace a step takes seconds for a large model, and a loop that evaluates after every epoch would
take them each time. So a model keeps the driver of its last call, as Keras keeps its functions.

What a step finds in attributes, such as a rate of dropout or which layers are trainable, is in its
trace for good: Keras takes no notice of a change before `compile`. Here a driver is used again only
while every attribute of the model, its layers, metrics and optimizers is what it was. What is
changed inside of other objects, or is global, counts from the next `compile` on, as in Keras.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tfmw import keras_compat, placement, reduction, strategies
from tfmw.group import Group
from tfmw.sync import SyncDriver

# TensorFlow's own notes are called so, which neither Keras nor `travel` takes for the model's.
_KEPT = "_self_tfmw_kept"
# What every call sets, and no step reads.
_IGNORED = ("history", "stop_training", *keras_compat.NOTES_OF_CALLS, _KEPT)
_COMPARED_BY_VALUE = (bool, int, float, str, bytes, keras.DTypePolicy)


@contextlib.contextmanager
def driving(
    model: keras.Model,
    strategy: tf.distribute.Strategy,
    compression: str | None = None,
    anew: bool = False,
) -> Iterator[SyncDriver]:
    """A driver in which the model is lifted.

    Args:
        model, strategy, compression: as of `SyncDriver`.
        anew: whether to trace in any case.
    """
    facts = _facts(model, strategy, compression)
    kept: _Kept | None = vars(model).pop(_KEPT, None)  # an error leaves none
    holds = kept is not None and not anew and _same(kept.facts, facts)
    # All or none: TensorFlow numbers its collectives as they are traced.
    if all(Group.of(strategy).from_all(holds)):
        assert kept is not None
        driver = kept.driver
        driver.begin_anew()
    else:
        driver = SyncDriver(model, strategy, compression)
    with driver:
        yield driver
    if driver.outlives_the_lift:
        vars(model)[_KEPT] = _Kept(facts, driver)


@dataclasses.dataclass(frozen=True)
class _Kept:
    facts: list[Any]
    driver: SyncDriver


def _facts(
    model: keras.Model, strategy: tf.distribute.Strategy, compression: str | None
) -> list[Any]:
    """What traces depend on, in a fixed order. It holds all of it, so that no id is used twice."""
    facts: list[Any] = [
        strategy,
        strategies.ring_of(strategy),
        strategies.reduction_options(strategy),
        compression,
        reduction.nothing(),
    ]
    optimizers = keras_compat.optimizers_of(model)
    for part in (
        *keras_compat.layers_of(model),
        *keras_compat.leaf_metrics(model),
        *optimizers,
        *map(keras_compat.inner_optimizer, optimizers),
    ):
        facts.append(part)
        for name, value in vars(part).items() if part is not None else ():
            if name not in _IGNORED:
                facts += [name, value]
    for variable in placement.all_variables(model):
        facts += [variable, variable.trainable, keras_compat.native(variable)]
    return facts


def _same(before: list[Any], now: list[Any]) -> bool:
    return len(before) == len(now) and all(
        a is b or (type(a) is type(b) and isinstance(a, _COMPARED_BY_VALUE) and a == b)
        for a, b in zip(before, now, strict=True)
    )
