"""Arrays that a call shuffles: batches of all passes, one after another.

    arrays = ShuffledArrays(rows, count=60_000, size=64, within_batches=False, order=7)
    shard = arrays.shard(Sharding(workers=2, rank=0))
    next(iter(shard.rest(80_000)))          # this worker's rows of batch 80,000 of all passes

The number of a batch, counted over all passes, gives its pass and its place there. Under a global
seed each pass has Keras's order of that seed. Without one, a permutation maps each place in a pass
to a row, and is computed for that place alone: `tf.raw_ops.RandomIndexShuffle`, as in
`tf.data.Dataset.global_shuffle`. So workers agree on the order without a message, and a resumed run
reads nothing again. One pipeline serves all passes, as creating and starting another takes 0.3 s
of each process's time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfmw.compat.pipelines import ENDLESS, Pipeline
from tfmw.data.batches import (
    IN_PARALLEL,
    configured,
    kept_trace,
    parts_and_total,
    without_autograph,
)
from tfmw.data.values import Shard, Sharding, ShardSizes

_ROUNDS = 8  # of the block cipher, as in `global_shuffle`; with 4, orders of ten rows are biased


@dataclasses.dataclass(frozen=True)
class ShuffledArrays:
    """Global batches of shuffled arrays.

    Attributes:
        rows: int64 [k] -> the batch of these rows: structure of tensors [k, ...].
        count: number of rows.
        size: number of rows of a batch; the last one of a pass has the remainder.
        within_batches: whether rows stay in their batch, as with `shuffle="batch"`.
        order: the order of each pass, int64 [count]; or a seed, int64 [], for a new order in each
            pass. The same on all workers.
    """

    rows: Callable[[tf.Tensor], Any]
    count: int
    size: int
    within_batches: bool
    order: tf.Tensor

    @property
    def batches_per_pass(self) -> int:
        """Number of batches in a pass."""
        return -(-self.count // self.size)

    def indices(self, number: tf.Tensor) -> tf.Tensor:
        """int64 [size], or fewer: the rows of batch `number`, counted over all passes."""
        of_batch, _ = _division(*self._layout, number, self.order)
        return of_batch(0, 1)

    @property
    def _layout(self) -> tuple[int, int, bool]:
        return self.count, self.size, self.within_batches

    def one_pass(self) -> tf.data.Dataset:
        """The whole batches of the first pass."""
        numbers = tf.data.Dataset.range(self.batches_per_pass)
        return numbers.map(without_autograph(lambda n: self.rows(self.indices(n))), **IN_PARALLEL)

    def shard(self, sharding: Sharding) -> Shard:
        """One worker's shard of all passes; it copies its own rows only."""
        local_indices = kept_trace(_local_indices, self._layout, sharding)

        @without_autograph
        def local_batch(number: tf.Tensor) -> Any:
            parts, counts, total = local_indices(number, self.order)
            return tuple(map(self.rows, parts)), counts, total

        def rest(start: int) -> tf.data.Dataset:
            numbers = tf.data.Dataset.range(start, ENDLESS)
            return configured(numbers.map(local_batch, **IN_PARALLEL))

        dataset = rest(0)
        return Shard(
            dataset,
            self.batches_per_pass,
            ShardSizes.of(min(self.size, self.count), sharding),
            ShardSizes.of(self.count % self.size or self.size, sharding),
            Pipeline.of(dataset).spec[0][0],
            self.size,
            rest=rest,
            has_all_passes=True,
        )


def _division(
    count: int, size: int, within_batches: bool, number: tf.Tensor, order: tf.Tensor
) -> tuple[Callable[[int, int], tf.Tensor], Any]:
    """(a function, number of rows of the batch); the function returns rows start, start + step, ...

    The number of rows is an int if it is the same in all batches, as each op takes time to trace.
    """
    batches = -(-count // size)
    first = number % batches * size
    stop = first + size if count % size == 0 else tf.minimum(first + size, count)
    total = size if count % size == 0 else stop - first
    if order.shape.rank:
        return lambda start, step: order[first + start : stop : step], total
    drawn, last = (number, total - 1) if within_batches else (number // batches, count - 1)
    key = tf.random.stateless_uniform(
        [3], [order, drawn], minval=None, maxval=None, dtype=tf.uint32
    )

    def rows(start: int, step: int) -> tf.Tensor:
        places = tf.range(first + start if start else first, stop, step)
        drawn_rows = tf.raw_ops.RandomIndexShuffle(
            index=places - first if within_batches else places,
            seed=key,
            max_index=tf.cast(last, tf.int64),
            rounds=_ROUNDS,
        )
        return first + drawn_rows if within_batches else drawn_rows

    return rows, total


def _local_indices(
    layout: tuple[int, int, bool], sharding: Sharding, number: tf.Tensor, order: tf.Tensor
) -> tuple[Any, tf.Tensor, tf.Tensor]:
    count, size, _ = layout
    rows, total = _division(*layout, number, order)
    if (count % size or size) < sharding.replicas:  # a replica may have no row
        return parts_and_total(sharding, rows(0, 1))
    parts = tuple(rows(replica, sharding.replicas) for replica in sharding.local)
    return parts, sharding.counts(total), tf.convert_to_tensor(total, tf.int64)
