"""Copies of the state of a run in the memory of workers, and the copy from which they continue.

    copy = Copy(record, tensors, layout, {0: [...], 2: [...]})   # complete: messages of all came
    continued([[copy.held], [other.held]]).senders               # {0: 0, 1: 1, 2: 0}

If workers shard the optimizer's slots, each keeps its own shards, and those of the worker before it
in the ring. So all slots survive the loss of one worker.

With local SGD, a shard has the rows of a worker's replicas. It is not sent, as the network may be
slow: it survives in a file on the worker's machine. If the machine is lost, the mean of the other
rows takes its place.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf


class Shard(NamedTuple):
    """A shard of a slot that no worker has whole."""

    name: str  # name of the slot in a backup
    begin: int  # its first element, of the flattened slot
    elements: int


class Layout(NamedTuple):
    """The shards of slots that no worker has whole; without entries if there are none."""

    shards: Sequence[Sequence[Shard]] = ()  # of each worker, in order of rank
    slots: Mapping[str, tuple[str, Sequence[int]]] = {}  # name of a slot -> its dtype and shape
    has_rows: bool = False  # whether slots are [replicas, elements], and shards whole rows

    @classmethod
    def of(
        cls, shards: Sequence[Sequence[Any]], slots: Mapping[str, Any], has_rows: bool = False
    ) -> Layout:
        """The layout in the JSON of another one."""
        return cls([[Shard(*shard) for shard in of_one] for of_one in shards], slots, has_rows)

    def shards_in(self, slots: Mapping[str, np.ndarray], rank: int) -> list[np.ndarray]:
        """uint8: the bytes of a worker's shards in whole slots, in order."""
        views = (slots[n].reshape(-1)[begin : begin + m] for n, begin, m in self.shards[rank])
        return [view.view(np.uint8) for view in views]

    def sizes(self, rank: int) -> list[int]:
        """Numbers of bytes of a worker's shards."""
        return [m * tf.as_dtype(self.slots[name][0]).size for name, _, m in self.shards[rank]]

    def rows_in(self, values: Sequence[np.ndarray], rank: int) -> Iterator[tuple[str, np.ndarray]]:
        """Names and rows, [replicas of the worker, elements], in the bytes of its shards."""
        for (name, _, _), array in zip(self.shards[rank], values, strict=True):
            dtype, (replicas, elements) = self.slots[name]
            own = array.view(tf.as_dtype(dtype).as_numpy_dtype)
            yield name, own.reshape(replicas // len(self.shards), elements)

    def lost(self, present: Collection[int]) -> list[int]:
        """The workers whose shards are missing."""
        return [rank for rank in range(len(self.shards)) if rank not in present]

    def replace_lost(self, slots: Mapping[str, np.ndarray], present: Collection[int]) -> None:
        """Gives lost rows the mean of all others.

        Args:
            slots: whole slots, [replicas, elements].
            present: the workers whose rows are in them.
        """
        here, lost = sorted(present), self.lost(present)
        for array in slots.values():
            replicas, elements = array.shape
            of_one = replicas // len(self.shards)
            rows = array.reshape(len(self.shards), of_one, elements)
            others = rows[here].reshape(len(here) * of_one, elements)
            rows[lost] = others.mean(0, dtype=np.result_type(others, np.float64))


WHOLE = Layout()
"""The layout of a model whose slots each worker has whole."""


class Held(NamedTuple):
    """The description of a copy that a worker has, or of a file with one on its machine."""

    step: int
    attempt: int  # the attempt of the run in which it was taken
    workers: int = 0  # number of workers that have shards; 0: the copy has all slots whole
    ranks: Sequence[int] = ()  # the workers whose shards it has
    has_rows: bool = False  # see `Layout`


@dataclasses.dataclass(frozen=True)
class Copy:
    """The state after a step, which a worker has completed with messages of all others."""

    record: dict[str, Any]  # as in a backup
    tensors: Mapping[str, Any]  # by name, as in a backup; without slots that no worker has whole
    layout: Layout = WHOLE
    # rank -> the bytes of that worker's shards: of this one's, and of the one before it
    shards: Mapping[int, Sequence[np.ndarray]] = dataclasses.field(default_factory=dict)
    attempt: int = 0
    memory: tuple[Any, ...] = ()  # owners of the memory of the tensors and shards

    @property
    def held(self) -> Held:
        step: int = self.record["step"]
        workers, has_rows = len(self.layout.shards), self.layout.has_rows
        return Held(step, self.attempt, workers, list(self.shards), has_rows)


class Continued(NamedTuple):
    """The state from which all continue."""

    step: int
    attempt: int
    source: int  # rank of the worker that sends what all copies have
    senders: dict[int, int]  # rank in the copies -> rank of the worker that sends its shards

    def of(self, copies: Sequence[Copy], rank: int | None = None) -> Copy:
        """The copy of that state among those of a sender, with the shards of `rank`."""
        same = [copy for copy in copies if copy.held[:2] == (self.step, self.attempt)]
        return next(copy for copy in same if rank is None or rank in copy.shards)


def continued(known: Sequence[Sequence[Held]]) -> Continued | None:
    """The latest step whose state is in the complete copies of all workers together; or None.

    If no state is complete, it is the latest one of which only replicas' rows are missing.

    Args:
        known: the copies of each worker, in order of rank.
    """
    incomplete = None
    for latest in sorted({held[:2] for of_one in known for held in of_one}, reverse=True):
        having = [(r, h) for r, of_one in enumerate(known) for h in of_one if h[:2] == latest]
        senders = {rank: sender for sender, held in reversed(having) for rank in held.ranks}
        # a worker that has its own shards sends them itself
        senders |= {rank: rank for rank, held in having if rank in held.ranks}
        source, first = having[0]
        found = Continued(*latest, source, senders)
        if len(senders) == first.workers:
            return found
        if first.has_rows and incomplete is None:
            incomplete = found
    return incomplete


def copy_shards(values: Sequence[np.ndarray], to: Sequence[np.ndarray]) -> None:
    """Copies the bytes of shards, which are one array or one for each shard."""
    if len(values) != len(to):
        values = np.split(np.concatenate(values), np.cumsum([len(view) for view in to])[:-1])
    for array, view in zip(values, to, strict=True):
        view[...] = array
