"""Plan of a sharded optimizer update, and gathering of its slots.

packs = divided(optimizer, transport, grads, variables)
plan = ShardPlan(optimizer, transport, packs)       # takes this process's shards of the slots
plan.gather_slots(keep=True)                        # all of them, in the optimizer
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfmw.compat import optimizer_part, optimizers
from tfmw.compat.local_updates import fuses
from tfmw.compat.memory import new_tensor
from tfmw.compat.optimizer_part import OptimizerPart
from tfmw.train.mirrored.collectives.all_reduce import even_cuts
from tfmw.train.mirrored.collectives.reduction import Pack
from tfmw.train.mirrored.collectives.transports import Transport, packs_of

# Types that TensorFlow's collectives gather. Variables of other types are updated on every replica.
_GATHERED = (tf.float16, tf.float32, tf.float64)


def divided(
    optimizer: Any, transport: Transport, grads: list[Any], variables: list[Any]
) -> list[Pack]:
    """Buckets of the variables whose update can be sharded, from the gradients of one step.

    They are the same on all replicas.
    """
    known = optimizers.variables_of(optimizer)
    index = {id(v): i for i, v in enumerate(known)}
    compiled = fuses(optimizer, known)

    def may_share(grad: Any, variable: Any) -> bool:
        return (
            isinstance(grad, tf.Tensor)
            and grad.shape.is_fully_defined()
            and id(variable) in index
            and grad.dtype == tf.as_dtype(variable.dtype)
            and (grad.dtype in _GATHERED or not transport.whole_sums)
            and not variable.overwrite_with_gradient
        )

    packs: list[Pack] = []
    loads = [0] * transport.size
    for positions in packs_of(grads, transport.pack_bytes):
        if not all(may_share(grads[p], variables[p]) for p in positions):
            continue
        own = {index[id(variables[p])]: variables[p] for p in positions}
        sizes = {i: math.prod(variable.shape) for i, variable in own.items()}
        if all(optimizers.updated_by_element(optimizer, v, compiled) for v in own.values()):
            cuts = even_cuts(sum(sizes.values()), transport.size)
        else:
            sizes, cuts = _whole_variables(sizes, loads, transport)
        numbers = map(transport.part_number, range(transport.size))
        parts = [_elements_in(sizes, cuts[n], cuts[n + 1]) for n in numbers]
        packs.append(Pack(sizes, cuts, parts, grads[positions[0]].dtype))
        for rank, part in enumerate(parts):
            loads[rank] += sum(elements.stop - elements.start for _, elements in part)
    return packs


def _elements_in(sizes: dict[int, int], begin: int, end: int) -> list[tuple[int, slice]]:
    """(index, elements) of the flattened variables that have elements in this range."""
    found, start = [], 0
    for index, size in sizes.items():
        first, last = max(begin - start, 0), min(end - start, size)
        if first < last:
            found.append((index, slice(first, last)))
        start += size
    return found


def _whole_variables(
    sizes: dict[int, int], loads: list[int], transport: Transport
) -> tuple[dict[int, int], list[int]]:
    """(sizes in the order of a bucket, its cuts), with cuts between variables only.

    Each variable, large ones first, is assigned to the worker with the fewest elements so far
    (`loads`).
    """
    loads = list(loads)
    parts: list[list[int]] = [[] for _ in loads]
    for index in sorted(sizes, key=sizes.__getitem__, reverse=True):
        worker = int(np.argmin(loads))
        loads[worker] += sizes[index]
        parts[transport.part_number(worker)].append(index)
    lengths = [sum(sizes[index] for index in part) for part in parts]
    cuts: list[int] = np.cumsum([0, *lengths]).tolist()
    return {index: sizes[index] for part in parts for index in part}, cuts


class ShardPlan:
    """Division of an update among replicas, made while the first step is traced.

    Args:
        optimizer: a built optimizer.
        transport: transport of the gradients.
        packs: buckets of variables whose gradients are sent together, cut into shards.
    """

    def __init__(self, optimizer: Any, transport: Transport, packs: Sequence[Pack]):
        self.packs = packs
        # indices of sharded variables
        self.indices = {index for pack in packs for index in pack.sizes}
        self._transport = transport
        self.parts = [  # shards of this process's replicas
            OptimizerPart(optimizer, self._own(rank), self.indices, replica)
            for replica, rank in enumerate(transport.ranks)
        ]

    def _own(self, rank: int) -> dict[int, slice | None]:
        """Index of a variable -> the elements that a replica updates; None for all of them."""
        return {
            index: None if part.stop - part.start == pack.sizes[index] else part
            for pack in self.packs
            for index, part in pack.parts[rank]
        }

    # Bucket by bucket, each in the memory in which it arrived, which takes least memory.

    def gather_slots(self, keep: bool, free: bool = False) -> None:
        """Gathers the shards of all slots. All workers must call it.

        Args:
            keep: whether this process stores them in the optimizer.
            free: whether it then frees its shards.
        """
        for name, slots in self.parts[0].slots:
            for pack in self.packs:
                cuts = self._cuts_in_bytes(slots, pack)
                own = [
                    _joined(part, name, pack.parts[rank])
                    for part, rank in zip(self.parts, self._transport.ranks, strict=True)
                ]
                array, tensor = new_tensor([cuts[-1]], tf.uint8)
                self._transport.gather_between_steps(own, cuts, array)
                del own
                begin = 0
                for index in pack.sizes:
                    slot = slots[index]
                    size = 0 if slot is None else optimizer_part.bytes_of(slot)
                    if keep and slot is not None:
                        optimizer_part.put(slot, tensor[begin : begin + size])
                    begin += size
                    if free:
                        for part in self.parts:
                            part.free_slot(name, index)

    def _cuts_in_bytes(self, slots: list[Any], pack: Pack) -> list[int]:
        """Cuts, in bytes, of a bucket's concatenated slots into a shard for each replica."""
        sizes = [0] * self._transport.size
        for rank, part in enumerate(pack.parts):
            for index, elements in part:
                if slots[index] is not None:
                    # A variable that is cut has slots of its own shape.
                    whole = optimizer_part.bytes_of(slots[index])
                    share = whole * (elements.stop - elements.start) // pack.sizes[index]
                    sizes[self._transport.part_number(rank)] += share
        cuts: list[int] = np.cumsum([0, *sizes]).tolist()
        return cuts

    def whole_slots(self) -> list[Any]:
        """The optimizer's own variables of the slots."""
        return [
            slots[index]
            for _, slots in self.parts[0].slots
            for pack in self.packs
            for index in pack.sizes
            if slots[index] is not None
        ]

    def forget_slots(self) -> None:
        """Frees the values that `gather_slots` has put into the optimizer."""
        for slot in self.whole_slots():
            optimizer_part.empty(slot)


def _joined(part: OptimizerPart, name: str, elements: list[tuple[int, slice]]) -> np.ndarray:
    """uint8 [n], the bytes of a replica's shard of a slot of each variable in a bucket."""
    own = [part.slot(name, index) for index, _ in elements]
    return own[0] if len(own) == 1 else np.concatenate([np.zeros([0], np.uint8), *own])
