"""Agreement of all workers on equal variables: the chief's values.

    changed = agree(group, strategy, variables)

Unseeded initializers draw different values in each process, and a callback may change the weights
of one task only. Training would continue without an error, because gradients of different weights
can be summed too. So workers exchange a checksum of every variable: one pass over the values, and
one message. Variables that differ are broadcast, over tfmw's ring if there is one.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfmw.cluster.group import Group
from tfmw.compat import placement
from tfmw.compat.memory import new_tensor, view_of
from tfmw.train.mirrored.collectives.connection import ring_of
from tfmw.train.mirrored.replicas import in_packs
from tfmw.train.mirrored.settings import Settings

_LARGE = 1 << 18  # bytes from which on TensorFlow's checksum is faster


def agree(
    group: Group,
    strategy: tf.distribute.Strategy,
    variables: Sequence[Any],
    settings: Settings | None = None,
) -> list[Any]:
    """Sets Keras variables to the chief's values on all workers. All workers must call it.

    Args:
        group: tasks of `strategy`.
        variables: the same variables on all workers, in the same order. Strings are not changed.
        settings: settings that have to be equal on all workers.

    Returns:
        The variables that differed, in order.

    Raises:
        UsageError: the settings differ; raised on all workers.
    """
    if group.size == 1:
        return []
    values = [placement.local_copies(strategy, v) for v in variables]
    # `value()` takes a third of the time of `read_value`.
    own = [[checksum(c.value()) for c in v if c.dtype != tf.string] for v in values]
    digests, everyone = zip(*group.from_all([settings and settings.digest, own]), strict=True)
    if settings is not None and len(set(digests)) > 1:
        group.require_same(settings.read())
    differs = [any(s != sums[0] for s in sums) for sums in zip(*everyone, strict=True)]
    different = [copies for copies, d in zip(values, differs, strict=True) if d]
    if different:
        broadcast(strategy, [copies[0] for copies in different])
        for one, *others in different:
            for other in others:
                other.assign(one.read_value())
    return [variable for variable, d in zip(variables, differs, strict=True) if d]


def checksum(value: tf.Tensor) -> int:
    """A checksum of a value; the same on every machine."""
    if value.dtype.size * value.shape.num_elements() < _LARGE:
        return zlib.crc32(_bytes(value).data)
    # FarmHash64, four times as fast; TensorFlow's operations take longer for small values.
    (digest,) = tf.fingerprint(tf.reshape(value, [1, -1])).numpy()
    return int.from_bytes(digest.tobytes(), "little")


def _bytes(value: tf.Tensor) -> np.ndarray:
    """uint8 [n], the bytes of a value."""
    return np.ascontiguousarray(view_of(value)).reshape(-1).view(np.uint8)


def broadcast(strategy: tf.distribute.Strategy, variables: Sequence[tf.Variable]) -> None:
    """Sets variables of this process to the chief's values. All workers must call it."""
    ring = ring_of(strategy)
    if ring is None:
        _broadcast_by_tensorflow(strategy, variables)
        return
    for variable in variables:
        if ring.rank == 0:
            ring.broadcast(_bytes(variable.read_value()))
            continue
        array, tensor = new_tensor(variable.shape, variable.dtype)
        ring.broadcast(array.reshape(-1).view(np.uint8))
        variable.assign(tensor)


def _broadcast_by_tensorflow(
    strategy: tf.distribute.Strategy, variables: Sequence[tf.Variable]
) -> None:
    def first_of_all(flat: tf.Tensor) -> tf.Tensor:
        # A variable created in the scope takes the chief's initial value on every worker.
        with strategy.scope():
            shared = tf.Variable(flat, trainable=False)
        return strategy.experimental_local_results(shared)[0].read_value()

    values = in_packs([v.read_value() for v in variables], first_of_all)
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)
