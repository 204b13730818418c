"""The replicas of a strategy, those of this process, and the functions traced for them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import tensorflow as tf

from tfmw.cluster.group import Group
from tfmw.data import Sharding
from tfmw.keras_compat import models, placement
from tfmw.mirrored.tensors import in_packs
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
        """The index of the running replica among this process's. In a replica context."""
        if self.local == 1:
            return 0
        replica = tf.distribute.get_replica_context()
        return (
            int(tf.get_static_value(replica.replica_id_in_sync_group)) - self.sharding.local.start
        )

    def run(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Runs a model's function on each local replica; see `tf.distribute.Strategy.run`."""
        return self.strategy.run(models.with_unseeded_generator(function), args=args)

    def sum(self, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Sums over all replicas, one reduction per carrier dtype. In a replica context."""
        return in_packs(values, self._all_reduce)

    def local_results(self, value: Any) -> tuple[Any, ...]:
        """The values on this process's replicas, of a result of `strategy.run`."""
        results: tuple[Any, ...] = self.strategy.experimental_local_results(value)
        return results

    def first_result(self, value: Any) -> Any:
        """The value on this process's first replica: for values that are the same on all."""
        return self.local_results(value)[0]


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
