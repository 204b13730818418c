"""Copies of the state of a run in the memory of workers, and the copy from which they continue.

    copy = Copy(record, tensors, shards, held, holds=0)     # complete after messages of all workers
    step, senders = continued([[(42, 0)], [(41, 1), (42, 1)]])

If workers shard the optimizer's slots, each keeps its own shards, and those of the worker before
it in the ring. So all slots survive the loss of one worker.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf


class Shard(NamedTuple):
    """A shard of a slot that no worker has whole."""

    name: str  # name of the slot in a backup
    begin: int  # its first element, of the flattened slot
    elements: int


@dataclasses.dataclass(frozen=True)
class Copy:
    """The state after a step, which a worker has completed with messages of all others."""

    record: dict[str, Any]  # as in a backup
    tensors: Mapping[str, Any]  # by name, as in a backup; without slots that no worker has whole
    shards: Sequence[np.ndarray] = ()  # the bytes of this worker's shards of those slots
    held: np.ndarray | None = None  # uint8 [n]: the bytes of another worker's shards
    holds: int | None = None  # rank of that worker; None: each worker has all slots

    @property
    def step(self) -> int:
        step: int = self.record["step"]
        return step

    def shards_of(self, rank: int) -> Sequence[np.ndarray]:
        """The bytes of a worker's shards: of the one whose shards are held, or else of this one."""
        return self.shards if self.held is None or rank != self.holds else [self.held]


def continued(
    copies: Sequence[Sequence[tuple[int, int | None]]],
) -> tuple[int, dict[int, int]] | None:
    """The step from which all continue, and the worker that sends the state of each; or None.

    It is the latest step whose state is in the complete copies of all workers together.

    Args:
        copies: (step, rank of the worker whose shards are held; None: all slots are whole) of each
            complete copy of each worker, in order of rank.

    Returns:
        (step, rank -> rank of a worker that has its shards).
    """
    for latest in sorted({step for of_one in copies for step, _ in of_one}, reverse=True):
        own, held, whole = {}, {}, True
        for rank, of_one in enumerate(copies):
            for step, holds in of_one:
                if step == latest:
                    own[rank] = rank
                    if holds is not None:
                        held[holds], whole = rank, False
        senders = held | own
        if whole or len(senders) == len(copies):
            return latest, senders
    return None


def bytes_of(shards: Sequence[Shard], shapes: Mapping[str, tuple[str, Sequence[int]]]) -> int:
    """Number of bytes of shards; `shapes` as in `whole_slots`."""
    return sum(shard.elements * tf.as_dtype(shapes[shard.name][0]).size for shard in shards)


def whole_slots(
    shapes: Mapping[str, tuple[str, Sequence[int]]],
    shards: Sequence[Shard],
    received: np.ndarray,
    slots: dict[str, np.ndarray],
) -> None:
    """Copies the shards of one worker into whole slots.

    Args:
        shapes: name of a slot -> its dtype and shape.
        shards: the shards of that worker, in order.
        received: uint8 [n], their bytes.
        slots: the slots by name, to which new ones are added.
    """
    begin = 0
    for name, first, elements in shards:
        dtype, shape = shapes[name]
        type_ = np.dtype(tf.as_dtype(dtype).as_numpy_dtype)
        if name not in slots:
            slots[name] = np.zeros(shape, type_)
        end = begin + elements * type_.itemsize
        slots[name].reshape(-1)[first : first + elements] = received[begin:end].view(type_)
        begin = end
