"""Arguments and results of sharding: the division of a global batch, and a worker's shard."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfmw.cluster.group import Group
from tfmw.compat.file_readers import default_cycle_length
from tfmw.compat.pipelines import INFINITE as INFINITE
from tfmw.data.reshuffles import ShuffleProgress


@dataclasses.dataclass(frozen=True)
class Sharding:
    """The division of global batches between replicas.

    Attributes:
        workers: number of processes that train.
        rank: rank of this process, from 0.
        local_replicas: number of replicas (devices) of each process.
    """

    workers: int = 1
    rank: int = 0
    local_replicas: int = 1

    @property
    def replicas(self) -> int:
        """Number of replicas of all processes."""
        return self.workers * self.local_replicas

    @property
    def local(self) -> range:
        """Indices of this process's replicas."""
        first = self.rank * self.local_replicas
        return range(first, first + self.local_replicas)

    def is_local(self, position: Any) -> Any:
        """Whether the example at `position` (int or integer tensor) belongs to this worker."""
        replica = position % self.replicas
        return (replica >= self.local.start) & (replica < self.local.stop)

    def local_rows(self, total: int) -> int:
        """Number of examples, of `total`, that belong to this worker."""
        return sum(len(range(replica, total, self.replicas)) for replica in self.local)

    def counts(self, total: int | tf.Tensor) -> tf.Tensor:
        """int64 [local replicas]: number of examples of each, of `total` (int64 [])."""
        if isinstance(total, int):
            return tf.constant([len(range(r, total, self.replicas)) for r in self.local], tf.int64)
        before = tf.constant(list(self.local), tf.int64)
        return tf.maximum(np.int64(0), (total - before + self.replicas - 1) // self.replicas)


@dataclasses.dataclass(frozen=True)
class SharedOrder:
    """Seeds and cycle lengths that all workers share, so that their examples have one order.

    Attributes:
        seed: for shuffles without a seed; negative if each worker has an order of its own.
        group: the tasks that read the data.
        index_dir: keeps the indices of files of records; None makes them anew.
        cycle_lengths: the results of `cycle_length` and `cycle_length_of`.
    """

    seed: int = 0
    group: Group = dataclasses.field(default_factory=lambda: Group(0, 1))
    index_dir: str | None = None
    cycle_lengths: dict[str, int] = dataclasses.field(default_factory=dict)

    def agree(self, local: Any) -> Any:
        """The JSON value of the chief, on all tasks."""
        return self.group.from_chief(lambda: local)

    def cycle_length(self, calls: int | None) -> int:
        """The cycle length of an `interleave` without one: tf.data's, on the chief's machine.

        tf.data chooses it by the number of cores, so the order would differ between machines.

        Args:
            calls: number of its parallel calls.
        """
        return self.cycle_length_of(str(calls), lambda: default_cycle_length(calls))

    def cycle_length_of(self, name: str, own: Callable[[], int]) -> int:
        """The chief's cycle length of the transformation with this name; `own` is this worker's."""
        if name not in self.cycle_lengths:
            self.cycle_lengths[name] = self.group.from_chief(own)
        return self.cycle_lengths[name]


@dataclasses.dataclass(frozen=True)
class ShardSizes:
    """Known facts about the sizes of the replicas' shards in one step.

    Attributes:
        uneven: whether they may differ in size.
        empty: whether one of them may be empty.
    """

    uneven: bool
    empty: bool

    @classmethod
    def of(cls, total: int, sharding: Sharding) -> ShardSizes:
        """The sizes for a global batch of `total` examples."""
        return cls(total % sharding.replicas != 0, total < sharding.replicas)


@dataclasses.dataclass(frozen=True)
class Cursor:
    """A place in the data, which a backup contains as JSON.

    Attributes:
        seed: seed for shuffles without one.
        passes: number of passes begun.
        in_pass: number of steps in the current pass; None between two passes.
        done: number of steps in the current epoch.
        begun: whether an epoch has started and not ended.
        steps: number of steps of an epoch, or the most of one; None if unknown.
        pass_steps: the most steps of a pass; None if unknown, and for infinite data.
        batches_per_step: the number of replicas, if batches are not split.
        source: the source's own state. "orders" has the number of passes of each reshuffling
            shuffle before the current one. "orders_now" has it at this position, as other calls and
            validations count, too, and "orders_left" after a call that ends here. "kept" is that of
            `ShuffleProgress`, "cycle_lengths" that of `SharedOrder`, and "drawn_from" that of
            `EpochHooks.state` within a pass.
    """

    seed: int
    passes: int
    in_pass: int | None
    done: int
    begun: bool
    steps: int | None
    pass_steps: int | None = None
    batches_per_step: int = 1
    source: dict[str, Any] = dataclasses.field(default_factory=dict)


class EpochHooks:
    """Calls of a source around epochs; they do nothing unless it is Python code."""

    def state(self, batches: int) -> Any:
        """A JSON value from which `restore` continues the current pass after so many batches."""

    def length(self) -> int | None:
        """The number of batches of a pass from now on; None if it never changes."""

    def reset(self) -> None:
        """Ends an epoch that was not read, as Keras's fit and evaluate do when they begin."""

    def begin(self, new_pass: bool, continued: bool) -> None:
        """Begins an epoch.

        Args:
            new_pass: whether a pass over the data begins with it.
            continued: whether an earlier run has begun this epoch.
        """

    def end(self) -> None:
        """Ends an epoch."""

    def leave(self) -> None:
        """Ends a call, perhaps within an epoch."""

    def skip(self) -> None:
        """Skips an epoch that an earlier run has already read."""

    def restore(self, state: Any) -> None:
        """Continues a pass that an earlier run has begun, from its `state`."""


@dataclasses.dataclass
class Shard:
    """One worker's shard of a dataset.

    Attributes:
        dataset: elements (parts, counts, total). The parts are one batch for each local replica.
            The counts, int64 [local replicas], are the numbers of examples that count: 0 if the
            part of a replica is a copy of some example. The total, int64 [], is the number of
            examples of this step over all replicas; -1 if this worker cannot compute it. In this
            case the replicas add up their examples, and the dataset continues indefinitely with
            parts that do not count. The data has ended once the sum of a step is 0. Alternatively,
            elements are ((whole global batch,),), which the step itself divides by
            `sharding.step_of`.
        steps: number of global batches in one epoch; INFINITE; None if unknown before reading.
        full: shard sizes of every step but the last one.
        last: shard sizes of the last step of an epoch.
        element_spec: spec of one batch of one replica.
        batch_size: size of the global batch, if known.
        size_known: whether the dataset contains the number of examples of each step.
        reshuffles: its shuffles that have a new order in each pass.
        hooks: hooks to call around each epoch.
        rest: number of batches -> the dataset without them, if batches have an index; otherwise
            None.
        has_all_passes: whether the dataset has all passes, one after another, whose batches `rest`
            counts.
    """

    dataset: tf.data.Dataset
    steps: int | None
    full: ShardSizes
    last: ShardSizes
    element_spec: Any
    batch_size: int | None = None
    size_known: bool = True
    reshuffles: ShuffleProgress = dataclasses.field(default_factory=ShuffleProgress)
    hooks: EpochHooks = dataclasses.field(default_factory=EpochHooks)
    rest: Callable[[int], tf.data.Dataset] | None = None
    has_all_passes: bool = False

    def batches(self, start: int, per_step: int = 1) -> tf.data.Dataset:
        """The dataset from a batch of the data on, of which `per_step` make a step."""
        return self.dataset.skip(start // per_step) if self.rest is None else self.rest(start)
