"""Sums of gradients over replicas: their dtype on the wire, and sparse gradients.

    total = Reduction(strategy, compression="bf16")
    summed = total(grads)                  # on each replica; the same on all

`transports.py` sends them.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfmw.cluster import membership
from tfmw.compat.gradients import scaled
from tfmw.compat.row_origins import Origin, row_parts
from tfmw.errors import UsageError
from tfmw.train.arguments import COMPRESSIONS
from tfmw.train.mirrored.collectives.all_reduce import Cuts
from tfmw.train.mirrored.collectives.hierarchy import HierarchicalRing
from tfmw.train.mirrored.collectives.transports import OverRing, transport_of
from tfmw.train.mirrored.replicas import flattened, split

_zero: tf.Variable | None = None  # a 0 that TensorFlow cannot fold, used without reduction


@contextlib.contextmanager
def without_reduction() -> Iterator[None]:
    """Multiplies gradients by 0 instead of reducing them, to measure the cost of the reduction.

    With their local gradients, replicas would diverge.
    """
    global _zero
    _zero = tf.Variable(0.0, trainable=False)
    try:
        yield
    finally:
        _zero = None


def zero_factor() -> tf.Variable | None:
    """The factor 0 within `without_reduction`, otherwise None."""
    return _zero


@dataclasses.dataclass(frozen=True)
class Pack:
    """A bucket of variables whose gradients are sent together, with a shard per replica."""

    # index of a variable -> its number of elements, in the order of the bucket
    sizes: dict[int, int]
    cuts: Cuts  # cuts into the shards
    # rank -> (index, elements) of the flattened variables that have some in its shard
    parts: list[list[tuple[int, slice]]]
    dtype: tf.DType


class Reduction:
    """Sums lists of gradients over the replicas of a strategy.

    Args:
        strategy: the strategy of the replicas.
        compression: "fp16" or "bf16": the wire dtype in which dense float32 gradients are sent and
            summed; None for their own.
    """

    def __init__(self, strategy: tf.distribute.Strategy, compression: str | None = None):
        self.strategy = strategy
        self.transport = transport_of(strategy, membership.reduction_options(strategy))
        self.wire_dtype = None if compression is None else COMPRESSIONS[compression]
        if compression == "bf16" and self.transport.between_gpus:
            raise UsageError(
                'received gradient_compression="bf16": TensorFlow sums no bfloat16 between GPUs. '
                'Use "fp16".'
            )

    def within_machine(self) -> Reduction | None:
        """The sums over this machine's workers only; None if there is one ring of all workers."""
        transport = self.transport
        if not isinstance(transport, OverRing) or not isinstance(transport.ring, HierarchicalRing):
            return None
        own, within = copy.copy(self), copy.copy(transport)
        within.use(transport.ring.within)
        own.transport = within
        return own

    def __call__(self, grads: list[Any]) -> list[Any]:
        """Gradients of this replica -> their sums over all replicas; called in a replica context.

        Args:
            grads: dense tensors, `tf.IndexedSlices`, or None.
        """
        if _zero is not None:
            return scaled(grads, _zero)
        parts = [_parts_of(grad) for grad in grads]
        sent = [self._compressed(part) for own in parts for _, part in own]
        totals = iter(self.transport(sent) if sent else ())
        return [
            None
            if grad is None
            else joined_parts(
                [(origin, _as_type(next(totals), grad.dtype)) for origin, _ in own],
                self.transport.size,
            )
            for grad, own in zip(grads, parts, strict=True)
        ]

    def own_sums(
        self, given: dict[int, Any], packs: Sequence[Pack], rank: int
    ) -> tuple[dict[int, tf.Tensor], dict[int, Any]]:
        """This replica's shard of the sums; called in a replica context.

        Args:
            given: index of a variable -> this replica's gradient.
            packs: buckets of the sharded variables.
            rank: rank of this replica.

        Returns:
            (index -> this replica's elements of the sum, flat; index -> the whole sum, for
            variables in no bucket).
        """
        packed = {index for pack in packs for index in pack.sizes}
        rest = {index: grad for index, grad in given.items() if index not in packed}
        own: dict[int, tf.Tensor] = {}
        if not isinstance(self.transport, OverRing):
            # All of them as without sharding, as TensorFlow's order of addition depends on its
            # packs.
            totals = dict(zip(given, self(list(given.values())), strict=True))
            for index, part in (part for pack in packs for part in pack.parts[rank]):
                if index in totals:
                    own[index] = tf.reshape(totals[index], [-1])[part]
            return own, {index: totals[index] for index in rest}
        for pack in packs:
            # The bucket keeps the place of a variable without a gradient in this step.
            whole = flattened(
                [
                    tf.convert_to_tensor(given[index])
                    if index in given
                    else tf.zeros([size], pack.dtype)
                    for index, size in pack.sizes.items()
                ]
            )
            if _zero is not None:
                total = scaled([whole[self.transport.ring.own_part(pack.cuts)]], _zero)[0]
            else:
                total = self.transport.scattered(self._compressed(whole), pack.cuts)
            lengths = [part.stop - part.start for _, part in pack.parts[rank]]
            values = split(_as_type(total, pack.dtype), lengths)
            for (index, _), value in zip(pack.parts[rank], values, strict=True):
                if index in given:
                    own[index] = value
        return own, dict(zip(rest, self(list(rest.values())), strict=True))

    def _compressed(self, grad: Any) -> Any:
        if (
            self.wire_dtype is None
            or isinstance(grad, tf.IndexedSlices)
            or grad.dtype != tf.float32
        ):
            return grad
        return tf.cast(grad, self.wire_dtype)


def _as_type(grad: Any, dtype: tf.DType) -> Any:
    return grad if grad.dtype == dtype else tf.cast(grad, dtype)


def _parts_of(grad: Any) -> list[tuple[Origin | None, Any]]:
    """(origin of its rows, part) of a gradient; a dense one is a single part, None has no part."""
    if grad is None:
        return []
    return [*row_parts(grad)] if isinstance(grad, tf.IndexedSlices) else [(None, grad)]


def joined_parts(parts: list[tuple[Origin | None, Any]], replicas: int) -> Any:
    """The gradient of the global batch, the same on all replicas.

    Args:
        parts: (origin of its rows, part): dense ones summed over replicas, slices of all replicas
            concatenated.
        replicas: number of replicas.
    """
    origin, first = parts[0]
    if origin is None:
        return first
    slices = [_added_up(origin, part, replicas) for origin, part in parts if origin is not None]
    if len(slices) == 1:
        return slices[0]
    return tf.IndexedSlices(
        tf.concat([part.values for part in slices], 0),
        tf.concat([part.indices for part in slices], 0),
        first.dense_shape,
    )


def _added_up(origin: Origin, part: tf.IndexedSlices, replicas: int) -> tf.IndexedSlices:
    """The rows of one lookup on all replicas, equal to those of one process."""
    if origin is Origin.EXAMPLES:
        return part
    rows, size = part.indices, tf.size(part.indices)
    of_one = size // replicas
    blocks = tf.reshape(rows[: of_one * replicas], [replicas, of_one])
    equal = tf.logical_and(of_one * replicas == size, tf.reduce_all(blocks == blocks[:1]))
    distinct, position = tf.unique(rows)
    number = tf.size(distinct)
    if origin is Origin.SAME:  # each occurrence separately, if they can be distinguished
        position = tf.where(equal, tf.range(size) % tf.maximum(of_one, 1), position)
        number = tf.where(equal, of_one, number)
    elif origin is Origin.UNKNOWN:
        alike = tf.logical_and(equal, number == of_one)
        position = tf.where(alike, position, tf.range(size))
        number = tf.where(alike, number, size)
    return tf.IndexedSlices(
        tf.math.unsorted_segment_sum(part.values, position, number),
        tf.math.unsorted_segment_max(rows, position, number),
        part.dense_shape,
    )
