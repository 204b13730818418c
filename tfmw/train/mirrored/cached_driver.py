"""The driver of a call: the previous call's, with its traced steps, while they are valid.

    with cached_driver(model, strategy) as driver:
        driver.run_steps("test", ...)

Tracing a step takes seconds for a large model, and a loop that evaluates after every epoch would
trace each time. So a model keeps the driver of its last call, as Keras keeps its functions.

A trace is valid as long as Keras's would be: until the next `compile`, or until layers or variables
are other objects. A changed attribute, such as a dropout rate, has no effect before `compile`. Only
`trainable` has, at the next call: variables are placed by it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfmw.cluster import membership
from tfmw.cluster.group import Group
from tfmw.compat import datasets, models, placement
from tfmw.train.mirrored.collectives import reduction
from tfmw.train.mirrored.collectives.connection import ring_of
from tfmw.train.mirrored.sync_driver import SyncDriver

# Prefix of TensorFlow's own attributes, which neither Keras nor `objects.saveable_state` saves.
_KEPT = "_self_tfmw_kept"
_MOST_KEPT = 2  # one for training and one for evaluation, if precision or compression differ


class _CachedDriver(NamedTuple):
    """A driver, and the objects and settings that its traces depend on."""

    parts: list[Any]  # must be the same objects; with others the driver is never valid again
    settings: list[Any]  # of the model and of the call, compared by value
    shard_optimizer: Any
    driver: SyncDriver


def same_objects(some: list[Any], others: list[Any]) -> bool:
    """Whether the lists contain the same objects; kept lists keep their ids unique."""
    return len(some) == len(others) and all(a is b for a, b in zip(some, others, strict=True))


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
    layers, variables = models.layers_of(model), placement.all_variables(model)
    parts = [
        strategy,
        ring_of(strategy),
        membership.reduction_options(strategy),
        datasets.source_of_seeds(),
        reduction.nothing(),
        *models.compiled_parts(model),
        *layers,
        *variables,
        *map(models.native, variables),
    ]
    settings = [
        compression,
        datasets.is_deterministic(),
        model.run_eagerly,
        model.jit_compile,
        *(layer.dtype_policy.name for layer in layers),
        *(variable.trainable for variable in variables),
    ]
    # An invalid driver is freed before the call needs memory.
    others = [k for k in vars(model).pop(_KEPT, []) if same_objects(k.parts, parts)]
    number = next(
        (
            i
            for i, k in enumerate(others)
            if shard_optimizer in (None, k.shard_optimizer) and k.settings == settings
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
    try:
        with driver:
            yield driver
    finally:
        vars(model).pop(_KEPT, None)  # of nested calls
    # Others have copies of variables, which change between calls.
    natives = map(models.native, placement.all_variables(model))
    distributed = any(isinstance(v, tf.distribute.DistributedValues) for v in natives)
    if driver.replicas.local == 1 and not distributed:
        kept_drivers = [_CachedDriver(parts, settings, shard_optimizer, driver), *others]
        vars(model)[_KEPT] = kept_drivers[:_MOST_KEPT]
