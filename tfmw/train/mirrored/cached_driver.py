"""Driver of a call: the previous call's, with its traced steps, while they are valid.

    with cached_driver(model, EachStep(strategy)) as driver:
        driver.run_steps("test", ...)

Tracing a step takes seconds for a large model, and a loop that evaluates after every epoch would
trace each time. So a model keeps the driver of its last call, as Keras keeps its functions.

A trace is valid as long as Keras's would be: until the next `compile`, or until layers or variables
are other objects. A changed attribute, such as a dropout rate, has no effect before `compile`. Only
`trainable` has an effect, at the next call, because the placement of variables depends on it. A
trace also stays valid after the loss of a worker, if a new one takes its place.

With several replicas in this process the traces use copies of the variables, which stay with the
driver. Between calls their memory is free.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfmw.cluster import membership
from tfmw.cluster.group import Group
from tfmw.compat import datasets, memory, models, placement
from tfmw.compat.kept import kept_with
from tfmw.train.mirrored.collectives import reduction
from tfmw.train.mirrored.collectives.connection import ring_of
from tfmw.train.mirrored.sync_driver import SyncDriver

_MOST_KEPT = 2  # one for training and one for evaluation, if precision or compression differ


class _CachedDriver(NamedTuple):
    """A driver, and the objects and settings on which its traces depend."""

    parts: list[Any]  # must be the same objects; a driver with others never becomes valid again
    settings: list[Any]  # settings of the model and of the call, compared by value
    driver: SyncDriver
    unseeded: Any  # the state of draws without a seed; None: its traces draw none

    @property
    def suits_new_workers(self) -> bool:
        """Whether a worker that has traced no step exchanges the same values."""
        state = self.driver.state
        return same_objects(state.variables(), state.all_variables())


def same_objects(some: list[Any], others: list[Any]) -> bool:
    """Whether the lists contain the same objects; kept lists keep their ids unique."""
    return len(some) == len(others) and all(a is b for a, b in zip(some, others, strict=True))


@contextlib.contextmanager
def cached_driver(model: keras.Model, sync: Any) -> Iterator[SyncDriver]:
    """A driver in which the model is placed.

    Args:
        sync: an `EachStep`. If its `shard_optimizer` is None, the call updates nothing, and a
            driver with any choice is valid.
    """
    strategy = sync.strategy
    layers, variables = models.layers_of(model), placement.all_variables(model)
    ring = ring_of(strategy)
    parts = [
        strategy,
        ring,
        membership.reduction_options(strategy),
        datasets.source_of_seeds(),
        reduction.zero_factor(),
        *models.compiled_parts(model),
        *layers,
        *variables,
        *map(models.native, variables),
    ]
    settings = [
        sync.compression,
        datasets.is_deterministic(),
        model.run_eagerly,
        model.jit_compile,
        *(layer.dtype_policy.name for layer in layers),
        *(variable.trainable for variable in variables),
    ]
    # An invalid driver is freed before the call needs memory.
    kept = kept_with(model)
    unseeded = models.unseeded_state()
    others = [
        k
        for k in kept.drivers
        if same_objects(k.parts, parts) and (k.unseeded is None or k.unseeded is unseeded)
    ]
    kept.drivers = ()
    choices = [k.driver.sync.shard_optimizer or False for k in others]
    valid = [sync.shard_optimizer in (None, choice) for choice in choices]
    number = next((i for i, k in enumerate(others) if valid[i] and k.settings == settings), None)
    # All workers reuse it, or none does: TensorFlow numbers collectives in the order of tracing.
    # Over the ring, a new worker may trace alone.
    same = len(set(Group.of(strategy).from_all(number))) == 1
    if number is not None and (same or (ring is not None and others[number].suits_new_workers)):
        driver = others.pop(number).driver
        driver.reset()
    else:
        driver = SyncDriver(model, sync)
    lost: tf.errors.UnavailableError | None = None
    try:
        with driver:
            yield driver
    except tf.errors.UnavailableError as e:
        lost = e  # a worker; this one may continue with a new one in its place
    finally:
        kept.drivers = ()  # drivers of nested calls
    unseeded = models.unseeded_state()  # exists from the first draw on
    _free_copies(driver, [*variables, unseeded])
    kept.drivers = [_CachedDriver(parts, settings, driver, unseeded), *others][:_MOST_KEPT]
    if lost is not None:
        raise lost


def _free_copies(driver: SyncDriver, variables: list[Any]) -> None:
    """Frees the memory of a driver's copies, and drops those of other variables than these."""
    for i in set(driver.copies) - {id(variable) for variable in variables}:
        del driver.copies[i]
    for copy in driver.copies.values():
        memory.free(copy)
