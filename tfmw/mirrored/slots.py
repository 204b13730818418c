"""An optimizer's slots, of which each replica has a part, for backups and put together again.

Pack by pack, and each in the memory in which it came: that takes least of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfmw.checkpoint.sharded_backups import SlotParts
from tfmw.keras_compat import optimizer_part
from tfmw.keras_compat.memory import new_tensor
from tfmw.keras_compat.optimizer_part import OptimizerPart
from tfmw.mirrored.packs import Pack
from tfmw.mirrored.reduce_scatter import ReduceScatter


def gather_slots(
    parts: Sequence[OptimizerPart],
    packs: Sequence[Pack],
    transport: ReduceScatter,
    keep: bool,
    free: bool = False,
) -> None:
    """Gathers the parts of all slots. All workers call it.

    Args:
        parts: of them, of this process's replicas.
        packs: of the sharded variables.
        transport: of the gradients.
        keep: whether this process puts them into the optimizer.
        free: whether it then frees its parts.
    """
    for name, slots in parts[0].slots:
        for pack in packs:
            cuts = _cuts_in_bytes(slots, pack, transport)
            own = [
                _joined(part, name, pack.elements_in(transport.part_of(pack.cuts, rank)))
                for part, rank in zip(parts, transport.ranks, strict=True)
            ]
            array, tensor = new_tensor([cuts[-1]], tf.uint8)
            transport.all_gather(own, cuts, array)
            del own
            begin = 0
            for index in pack.indices:
                slot = slots[index]
                size = 0 if slot is None else optimizer_part.bytes_of(slot)
                if keep and slot is not None:
                    optimizer_part.put(slot, tensor[begin : begin + size])
                begin += size
                if free:
                    for part in parts:
                        part.free_slot(name, index)


def _joined(part: OptimizerPart, name: str, elements: list[tuple[int, slice]]) -> np.ndarray:
    """uint8 [n], the bytes of a replica's part of a slot of each variable of a pack."""
    own = [part.slot(name, index) for index, _ in elements]
    return own[0] if len(own) == 1 else np.concatenate([np.zeros([0], np.uint8), *own])


def slot_parts(parts: Sequence[OptimizerPart], packs: Sequence[Pack]) -> SlotParts:
    """The parts of this process's replicas, for a backup to which all workers write theirs."""
    variables = [
        slots[index]
        for _, slots in parts[0].slots
        for pack in packs
        for index in pack.indices
        if slots[index] is not None
    ]
    return SlotParts(variables, [own for part in parts for own in part.slot_values()])


def forget_slots(part: OptimizerPart, packs: Sequence[Pack]) -> None:
    """Frees what `gather_slots` has put into the optimizer."""
    for _, slots in part.slots:
        for pack in packs:
            for index in pack.indices:
                if slots[index] is not None:
                    optimizer_part.empty(slots[index])


def _cuts_in_bytes(slots: list[Any], pack: Pack, transport: ReduceScatter) -> list[int]:
    """The bytes of a pack's slots, one after the other, cut into a part for each replica."""
    elements_of = dict(zip(pack.indices, pack.sizes, strict=True))
    sizes = [0] * transport.size
    for rank in range(transport.size):
        for index, elements in pack.elements_in(transport.part_of(pack.cuts, rank)):
            if slots[index] is not None:
                # Where a variable is cut, its slots are of its shape.
                whole = optimizer_part.bytes_of(slots[index])
                share = whole * (elements.stop - elements.start) // elements_of[index]
                sizes[transport.part_number(rank)] += share
    cuts: list[int] = np.cumsum([0, *sizes]).tolist()
    return cuts
