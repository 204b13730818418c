"""Reduce-scatter of gradients and all-gather of weights; each replica updates its part in between.

    transport = reduce_scatter_of(reduction)
    own, rest = transport.sums(gradients, packs, rank)    # the first half
    ...                                                # each replica updates its part of a pack
    weights = transport.gathered(own_weights, pack.cuts)  # the second half

tfmw's ring stops its all-reduce half way, so the same bytes travel as without sharing.
tf.distribute has an all-reduce and an all-gather, and no reduce-scatter: there each replica takes
its part of a whole sum, and half as many bytes again travel. Update and slots are 1/N in both.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfmw.keras_compat import placement
from tfmw.mirrored.collectives.all_reduce import Cuts, Parts
from tfmw.mirrored.collectives.reduction import Reduction, TracedRing
from tfmw.mirrored.replicas import local_index

PACK = 32 << 20
"""Bytes of weights that TensorFlow gathers at a time."""


@dataclasses.dataclass(frozen=True)
class Pack:
    """Variables whose gradients travel together.

    Attributes:
        sizes: index of a variable -> its elements, in the order in which they travel.
        cuts: into a part for each worker.
        dtype: of all of them.
    """

    sizes: dict[int, int]
    cuts: Cuts
    dtype: tf.DType

    def elements_in(self, part: slice) -> list[tuple[int, slice]]:
        """(index, elements) of the flattened variables that have some in a part of the pack."""
        found, start = [], 0
        for index, size in self.sizes.items():
            begin, end = max(part.start - start, 0), min(part.stop - start, size)
            if begin < end:
                found.append((index, slice(begin, end)))
            start += size
        return found


class ReduceScatter(Parts):
    """Reduce-scatter and all-gather over one transport, and which part of a pack each replica has.

    Attributes:
        size: number of replicas.
        ranks: of this process's replicas.
        pack_bytes: of gradients that form a pack.
        whole_sums: whether the first half sends as many bytes as a whole sum.
        of: "workers" or "replicas", in messages.
    """

    size: int
    ranks: Sequence[int]
    pack_bytes: int
    whole_sums: bool
    of: str

    @abc.abstractmethod
    def sums(
        self, given: dict[int, Any], packs: Sequence[Pack], rank: int
    ) -> tuple[dict[int, tf.Tensor], dict[int, Any]]:
        """The first half. In a replica context.

        Args:
            given: index of a variable -> this replica's gradient.
            packs: of the sharded variables.
            rank: of this replica.

        Returns:
            (index -> this replica's elements of the sum, in a flat form; index -> the whole sum, of
            variables in no pack).
        """

    @abc.abstractmethod
    def gathered(self, own: tf.Tensor, cuts: Cuts) -> tf.Tensor:
        """The parts of all replicas, in order: [m] -> [n]. In a replica context."""

    @abc.abstractmethod
    def all_gather(self, own: Sequence[np.ndarray], cuts: Cuts, out: np.ndarray) -> None:
        """Gathers the parts of a value between steps. All workers call it.

        Args:
            own: uint8 [m] each, of this process's replicas.
            cuts: into a part for each replica.
            out: uint8 [n], to fill.
        """

    @property
    def in_one_process(self) -> bool:
        """Whether this process has all parts."""
        return len(self.ranks) == self.size


def reduce_scatter_of(reduction: Reduction) -> ReduceScatter | None:
    """The reduce-scatter and all-gather transport of `reduction`; None with one replica."""
    if reduction.over_ring is not None:
        return _OverRing(reduction, reduction.over_ring)
    if reduction.strategy.num_replicas_in_sync > 1:
        return _OverTensorFlow(reduction)
    return None


class _OverRing(ReduceScatter):
    whole_sums, of = False, "workers"

    def __init__(self, reduction: Reduction, over_ring: TracedRing):
        self._reduction, self._over_ring, self._ring = reduction, over_ring, over_ring.ring
        self.size, self.ranks = self._ring.size, [self._ring.rank]
        self.pack_bytes = over_ring.pack_bytes

    def part_number(self, rank: int) -> int:
        return self._ring.part_number(rank)

    def sums(
        self, given: dict[int, Any], packs: Sequence[Pack], rank: int
    ) -> tuple[dict[int, tf.Tensor], dict[int, Any]]:
        own: dict[int, tf.Tensor] = {}
        for pack in packs:
            # Without a gradient this time, a variable's place in the pack stays.
            flat = [
                tf.zeros([size], pack.dtype)
                if index not in given
                else tf.reshape(tf.convert_to_tensor(given[index]), [-1])
                for index, size in pack.sizes.items()
            ]
            total = self._reduction.scattered(
                flat[0] if len(flat) == 1 else tf.concat(flat, axis=0), pack.cuts
            )
            parts = pack.elements_in(self.part_of(pack.cuts, rank))
            values = split(total, [part.stop - part.start for _, part in parts])
            for (index, _), value in zip(parts, values, strict=True):
                if index in given:
                    own[index] = value
        rest = _in_no_pack(given, packs)
        return own, dict(zip(rest, self._reduction(list(rest.values())), strict=True))

    def gathered(self, own: tf.Tensor, cuts: Cuts) -> tf.Tensor:
        return self._over_ring.gathered(own, cuts)

    def all_gather(self, own: Sequence[np.ndarray], cuts: Cuts, out: np.ndarray) -> None:
        self._ring.all_gather(own[0], cuts, what="slots", out=out)


class _OverTensorFlow(ReduceScatter):
    whole_sums, of = True, "replicas"

    def __init__(self, reduction: Reduction):
        self._reduction, self._strategy = reduction, reduction.strategy
        self.size, self.pack_bytes = self._strategy.num_replicas_in_sync, PACK
        first = placement.first_local_replica(self._strategy)
        self.ranks = range(first, first + placement.local_replicas(self._strategy))

    def part_number(self, rank: int) -> int:
        return rank

    def sums(
        self, given: dict[int, Any], packs: Sequence[Pack], rank: int
    ) -> tuple[dict[int, tf.Tensor], dict[int, Any]]:
        # All of them as without sharing: TensorFlow adds in an order that depends on its packs.
        totals = dict(zip(given, self._reduction(list(given.values())), strict=True))
        own = {
            index: tf.reshape(totals[index], [-1])[part]
            for pack in packs
            for index, part in pack.elements_in(self.part_of(pack.cuts, rank))
            if index in totals
        }
        return own, _in_no_pack(totals, packs)

    def gathered(self, own: tf.Tensor, cuts: Cuts) -> tf.Tensor:
        total = self._gathered(own)
        total.set_shape([cuts[-1]])
        return total

    def _gathered(self, own: tf.Tensor) -> tf.Tensor:
        replica = tf.distribute.get_replica_context()
        return replica.all_gather(own, axis=0, options=self._reduction.options)

    def all_gather(self, own: Sequence[np.ndarray], cuts: Cuts, out: np.ndarray) -> None:
        if self.in_one_process:
            np.concatenate(own, out=out)
            return
        # Parts of one length, as values that collectives know, and that nothing computes with.
        sizes = np.diff(cuts)
        length = -(-max(sizes) // 4) * 4
        padded = [np.pad(part, (0, length - len(part))).view(np.float32) for part in own]
        results = self._gather_between_steps([tf.constant(part) for part in padded])
        first = self._strategy.experimental_local_results(results)[0]
        gathered = first.numpy().view(np.uint8).reshape(self.size, length)
        for part, size, begin in zip(gathered, sizes, cuts, strict=False):
            out[begin : begin + size] = part[:size]

    @functools.cached_property
    def _gather_between_steps(self) -> Any:
        def on_replica(own: list[tf.Tensor]) -> tf.Tensor:
            # On the replica's device.
            return self._gathered(tf.identity(own[local_index(self._strategy)]))

        return tf.function(
            lambda own: self._strategy.run(on_replica, args=(own,)),
            autograph=False,
            input_signature=[[tf.TensorSpec([None], tf.float32)] * len(self.ranks)],
        )


def split(flat: tf.Tensor, sizes: list[int]) -> list[tf.Tensor]:
    """[n] -> one [size] for each of `sizes`, without a copy for one alone."""
    if len(sizes) < 2:
        return [flat][: len(sizes)]
    parts: list[tf.Tensor] = tf.split(flat, sizes)
    return parts


def _in_no_pack(values: dict[int, Any], packs: Sequence[Pack]) -> dict[int, Any]:
    packed = {index for pack in packs for index in pack.sizes}
    return {index: value for index, value in values.items() if index not in packed}
