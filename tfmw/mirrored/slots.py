"""An optimizer's slots, of which each worker has a part, put together again.

Pack by pack, and each in the memory in which it came: that takes least of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfmw.keras_compat import optimizer_part
from tfmw.keras_compat.memory import new_tensor
from tfmw.keras_compat.optimizer_part import OptimizerPart
from tfmw.mirrored.collectives.hierarchy import AnyRing
from tfmw.mirrored.packs import Pack


def gather_slots(
    part: OptimizerPart, packs: Sequence[Pack], ring: AnyRing, keep: bool, free: bool = False
) -> None:
    """Gathers the parts of all slots. All workers call it.

    Args:
        part: this worker's part of them.
        packs: of the variables that workers share.
        ring: of the workers.
        keep: whether this worker puts them into the optimizer.
        free: whether this worker then frees its parts.
    """
    for name, slots in part.slots:
        for pack in packs:
            cuts = _cuts_in_bytes(slots, pack, ring)
            own = [
                part.slot(name, index) for index, _ in pack.elements_in(ring.own_part(pack.cuts))
            ]
            flat = own[0] if len(own) == 1 else np.concatenate([np.zeros([0], np.uint8), *own])
            array, tensor = new_tensor([cuts[-1]], tf.uint8)
            ring.all_gather(flat, cuts, what="slots", out=array)
            del own, flat
            begin = 0
            for index in pack.indices:
                slot = slots[index]
                size = 0 if slot is None else optimizer_part.bytes_of(slot)
                if keep and slot is not None:
                    optimizer_part.put(slot, tensor[begin : begin + size])
                begin += size
                if free:
                    part.free_slot(name, index)


def forget_slots(part: OptimizerPart, packs: Sequence[Pack]) -> None:
    """Frees what `gather_slots` has put into the optimizer."""
    for _, slots in part.slots:
        for pack in packs:
            for index in pack.indices:
                if slots[index] is not None:
                    optimizer_part.empty(slots[index])


def _cuts_in_bytes(slots: list[Any], pack: Pack, ring: AnyRing) -> list[int]:
    """The bytes of a pack's slots, one after the other, cut into a part for each worker."""
    elements_of = dict(zip(pack.indices, pack.sizes, strict=True))
    sizes = [0] * ring.size
    for rank in range(ring.size):
        for index, elements in pack.elements_in(ring.part_of(pack.cuts, rank)):
            if slots[index] is not None:
                # Where a variable is cut, its slots are of its shape.
                whole = optimizer_part.bytes_of(slots[index])
                share = whole * (elements.stop - elements.start) // elements_of[index]
                sizes[ring.part_number(rank)] += share
    cuts: list[int] = np.cumsum([0, *sizes]).tolist()
    return cuts
