"""The replicas of a strategy, those of this process, and the functions traced for them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import tensorflow as tf

from tfmw.cluster.group import Group
from tfmw.data import Sharding
from tfmw.keras_compat import models, placement
from tfmw.runtime.progress import blocking_call


class Replicas:
    """All replicas of a synchronous strategy, and the local ones of this process.

    Attributes:
        strategy: mirrored, multi-worker mirrored, or TensorFlow's default.
        group: the processes that train together.
        sharding: how global batches are divided between the replicas.

    Args:
        all_reduce: the sum over all replicas of a flat tensor, in a replica context.
    """

    def __init__(
        self, strategy: tf.distribute.Strategy, all_reduce: Callable[[tf.Tensor], tf.Tensor]
    ):
        self._all_reduce = all_reduce
        self.strategy = strategy
        self.group = Group.of(strategy)
        self.sharding = Sharding(
            self.group.size, self.group.rank, placement.local_replicas(strategy)
        )

    @property
    def count(self) -> int:
        """Number of replicas, over all processes."""
        return self.strategy.num_replicas_in_sync

    @property
    def local(self) -> int:
        """Number of replicas of this process."""
        return self.sharding.local_replicas

    def local_index(self) -> int:
        """See `local_index`."""
        return local_index(self.strategy)

    def run(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Runs a model's function on each local replica; see `tf.distribute.Strategy.run`."""
        return self.strategy.run(models.with_unseeded_generator(function), args=args)

    def sum(self, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Sums over all replicas, one reduction per carrier dtype. In a replica context."""
        return in_packs(values, self._all_reduce)

    def own_row(self, value: tf.Tensor) -> tf.Tensor:
        """[replicas, ...]: the value in the row of this replica, and zeros in the others.

        The sum over replicas has the values of all. In a replica context.
        """
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        numbers = tf.reshape(tf.range(self.count), [-1] + [1] * value.shape.rank)
        return tf.where(numbers == replica, value[None], tf.zeros_like(value)[None])

    def rows(self, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """[replicas, ...], the values of all replicas, of each value. In a replica context."""
        rows = [self.own_row(value) for value in values]
        return self.sum(rows) if self.count > 1 else rows

    def local_results(self, value: Any) -> tuple[Any, ...]:
        """The values on this process's replicas, of a result of `strategy.run`."""
        results: tuple[Any, ...] = self.strategy.experimental_local_results(value)
        return results

    def first_result(self, value: Any) -> Any:
        """The value on this process's first replica: for values that are the same on all."""
        return self.local_results(value)[0]


def local_index(strategy: tf.distribute.Strategy) -> int:
    """The index of the running replica among this process's. In a replica context."""
    if placement.local_replicas(strategy) == 1:
        return 0
    replica = tf.distribute.get_replica_context()
    number = int(tf.get_static_value(replica.replica_id_in_sync_group))
    return number - placement.first_local_replica(strategy)


def carrier_of(dtype: tf.DType) -> tf.DType:
    """The dtype in which values of `dtype` are sent unchanged: collectives support only a few."""
    if dtype.is_floating:
        return tf.float64 if dtype == tf.float64 else tf.float32
    return tf.int64


def in_packs(
    values: Sequence[tf.Tensor], exchange: Callable[[tf.Tensor], tf.Tensor]
) -> list[tf.Tensor]:
    """Calls a collective on one flat tensor per carrier dtype, instead of on each value.

    Args:
        values: the same shapes and dtypes on all replicas.
        exchange: a collective, [n] -> [n], such as a sum over replicas.

    Returns:
        The results in the shapes and dtypes of `values`.
    """
    out: list[Any] = [None] * len(values)
    by_carrier: dict[tf.DType, list[int]] = {}
    for i, value in enumerate(values):
        by_carrier.setdefault(carrier_of(value.dtype), []).append(i)
    for carrier, positions in sorted(by_carrier.items(), key=lambda item: item[0].name):
        flat = tf.concat([tf.reshape(tf.cast(values[i], carrier), [-1]) for i in positions], axis=0)
        sizes = [tf.size(values[i]) for i in positions]
        parts = tf.split(exchange(flat), sizes, num=len(positions))
        for i, part in zip(positions, parts, strict=True):
            out[i] = tf.cast(tf.reshape(part, tf.shape(values[i])), values[i].dtype)
            out[i].set_shape(values[i].shape)
    return out


class Traces:
    """The functions that a driver has traced, each under a key."""

    def __init__(self) -> None:
        self._functions: dict[Hashable, Callable[..., Any]] = {}

    def get(self, key: Hashable, make: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
        """The function under `key`; `make` creates it at the first call."""
        if key not in self._functions:
            self._functions[key] = make()
        return self._functions[key]

    def function(self, function: Callable[..., Any], **options: Any) -> Any:
        """A `tf.function`; while it is traced, the task counts as alive."""

        def noted(*arguments: Any) -> Any:
            with blocking_call("tracing"):
                return function(*arguments)

        return new_function(noted, **options)


def new_function(function: Callable[..., Any], **options: Any) -> Any:
    """A `tf.function` of one driver.

    TensorFlow warns if the same code is traced often, but each driver must trace its own copy. A
    partial of each driver's own is counted separately.
    """
    return tf.function(functools.partial(function), autograph=False, **options)
