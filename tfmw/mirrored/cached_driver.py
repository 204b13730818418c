"""The driver of a call: the previous call's, with its traced steps, while they are valid.

    with cached_driver(model, strategy) as driver:
        driver.test(...)

Tracing a step takes seconds for a large model, and a loop that evaluates after every epoch would
trace each time. So a model keeps the driver of its last call, as Keras keeps its functions.

A trace contains the attributes that the step has read, such as a dropout rate or which layers are
trainable. In Keras a change has no effect before the next `compile`. Here a driver is reused only
while every attribute of the model, its layers, metrics, optimizers and variables is unchanged. It
must also have been unchanged at each trace, because a callback may change one during a call.
Changes inside other objects, or of global state, take effect after the next `compile`, as in Keras.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tfmw.cluster import membership
from tfmw.cluster.group import Group
from tfmw.keras_compat import datasets, models, placement
from tfmw.keras_compat.metric_variables import leaf_metrics
from tfmw.keras_compat.optimizers import optimizers_of, with_inner_optimizers
from tfmw.mirrored.collectives import reduction
from tfmw.mirrored.collectives.connection import ring_of
from tfmw.mirrored.sync_driver import SyncDriver

# Prefix of TensorFlow's own attributes, which neither Keras nor `serialization` saves.
_KEPT = "_self_tfmw_kept"
_MOST_KEPT = 2  # one for training and one for evaluation, if precision or compression differ
# Attributes of the model that no step reads.
_SET_BY_CALLS = ("history", "stop_training", "stop_evaluating", "stop_predicting")
_COMPARED_BY_VALUE = (bool, int, float, str, bytes, keras.DTypePolicy)


@dataclasses.dataclass(frozen=True)
class _Dependencies:
    """The objects and settings that traces depend on. References keep ids unique.

    Collecting them takes 5 ms for the 34,000 attributes of MobileNetV2; tracing its steps takes
    seconds. Comparing them is necessary, because a changed dropout rate needs no `compile`.

    Attributes:
        parts: objects that must be the same; a driver with other parts is never valid again.
        settings: names and values of attributes, and the choices of a call.
    """

    parts: list[Any]
    settings: list[Any]

    @classmethod
    def of(
        cls,
        model: keras.Model,
        strategy: tf.distribute.Strategy,
        compression: str | None,
    ) -> _Dependencies:
        optimizers = optimizers_of(model)
        variables = placement.all_variables(model)
        parts = [
            *models.layers_of(model),
            *leaf_metrics(model),
            *(each for o in optimizers for each in with_inner_optimizers(o)),
            *variables,
        ]
        settings = [compression, reduction.nothing(), datasets.is_deterministic()]
        for part in parts:
            for name, value in vars(part).items():
                if not (
                    name.startswith("_self_")
                    or name in models.NOTES_OF_CALLS
                    or (part is model and name in _SET_BY_CALLS)
                ):
                    settings += [name, value]
        return cls(
            [
                strategy,
                ring_of(strategy),
                membership.reduction_options(strategy),
                datasets.source_of_seeds(),
                *parts,
                *map(models.native, variables),
            ],
            settings,
        )

    def same_parts(self, other: _Dependencies) -> bool:
        ours, others = self.parts, other.parts
        return len(ours) == len(others) and all(map(_is, ours, others))

    def same(self, other: _Dependencies) -> bool:
        ours, others = self.settings, other.settings
        return self.same_parts(other) and len(ours) == len(others) and all(map(_is, ours, others))


def _is(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and isinstance(a, _COMPARED_BY_VALUE) and a == b)


@dataclasses.dataclass(frozen=True)
class _CachedDriver:
    facts: _Dependencies
    shard_optimizer: Any
    driver: SyncDriver


@contextlib.contextmanager
def cached_driver(
    model: keras.Model,
    strategy: tf.distribute.Strategy,
    compression: str | None = None,
    shard_optimizer: Any = None,
) -> Iterator[SyncDriver]:
    """A driver in which the model is placed.

    The arguments are those of `SyncDriver`; without `shard_optimizer` the call updates nothing, and
    a driver of any choice serves.
    """
    at_begin = _Dependencies.of(model, strategy, compression)
    # An invalid driver is freed before the call needs memory.
    others = [k for k in vars(model).pop(_KEPT, []) if k.facts.same_parts(at_begin)]
    number = next(
        (
            i
            for i, k in enumerate(others)
            if shard_optimizer in (None, k.shard_optimizer) and k.facts.same(at_begin)
        ),
        None,
    )
    # All workers reuse it, or none does: TensorFlow numbers collectives in the order of tracing.
    numbers = set(Group.of(strategy).from_all(number))
    if number is not None and len(numbers) == 1:
        kept = others.pop(number)
        driver, shard_optimizer = kept.driver, kept.shard_optimizer
        driver.reset()
    else:
        shard_optimizer = shard_optimizer or False
        driver = SyncDriver(model, strategy, compression, shard_optimizer)
    held: list[bool] = []  # at each trace
    try:
        with driver:
            # Including the attributes that the driver sets.
            entered = _Dependencies.of(model, strategy, compression)
            driver.traces_valid = lambda: _Dependencies.of(model, strategy, compression).same(
                entered
            )
            driver.on_trace(lambda: held.append(driver.traces_valid()))
            yield driver
    finally:
        vars(model).pop(_KEPT, None)  # of nested calls
    if driver.outlives_placement and all(held):
        vars(model)[_KEPT] = [_CachedDriver(at_begin, shard_optimizer, driver), *others][
            :_MOST_KEPT
        ]
