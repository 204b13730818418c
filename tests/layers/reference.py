"""The rules of `HashTableEmbedding` in plain Python, with lists and loops."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

WAYS = 16


@dataclasses.dataclass
class Place:
    """A slot for an id; free while `used` is 0."""

    id: int = 0
    used: int = 0
    count: int = 0


class Table:
    """Buckets of places, of which an id may be in those of its own.

    Args:
        places: their number.
        bucket: id -> the bucket that it belongs to.
    """

    def __init__(self, places: int, bucket: Callable[[int], int]):
        self.places = [Place() for _ in range(places)]
        self._ways = min(places, WAYS)
        self._bucket = bucket

    def _of(self, id_: int) -> Iterator[Place]:
        first = self._bucket(id_) * self._ways
        return iter(self.places[first : first + self._ways])

    def find(self, id_: int, oldest: int) -> Place | None:
        return next((p for p in self._of(id_) if p.id == id_ and p.used >= oldest), None)

    def take(self, id_: int, now: int) -> Place | None:
        """The place used longest ago, unless it was in this step, too."""
        place = min(self._of(id_), key=lambda p: p.used)  # the first of equal ones
        if place.used == now:
            return None
        place.id, place.used = id_, now
        return place


class Reference:
    """Rows of the ids, step after step."""

    def __init__(self, table: Table, candidates: Table | None, min_count: int, max_age: int | None):
        self.table, self.candidates = table, candidates
        self.min_count, self.max_age = min_count, max_age
        self.now = 0

    @property
    def oldest(self) -> int:
        return 1 if self.max_age is None else max(self.now - self.max_age, 1)

    def step(self, ids: Iterable[int]) -> None:
        counts = Counter(ids)
        if not counts:
            return
        self.now += 1
        for id_ in list(counts):
            if place := self.table.find(id_, self.oldest):
                place.used = self.now
                del counts[id_]
        if self.candidates is None:
            for id_ in sorted(counts):
                self.table.take(id_, self.now)
        else:
            self._count(self.candidates, counts)

    def _count(self, candidates: Table, counts: Counter[int]) -> None:
        """Counts ids that have no row, and gives rows to those that were seen often enough."""
        known = {id_: candidates.find(id_, self.oldest) for id_ in counts}
        for id_, place in known.items():
            counts[id_] += place.count if place else 0
        waiting = sorted(counts, key=lambda id_: (-counts[id_], id_))
        often = [id_ for id_ in waiting if counts[id_] >= self.min_count]
        admitted = [id_ for id_ in often if self.table.take(id_, self.now)]
        still = [id_ for id_ in waiting if id_ not in admitted]
        for id_ in admitted:
            if place := known[id_]:
                place.used = 0
        for id_ in still:
            if place := known[id_]:
                place.used, place.count = self.now, counts[id_]
        for id_ in still:
            if known[id_] is None and (place := candidates.take(id_, self.now)):
                place.count = counts[id_]

    def row_of(self, id_: int) -> int:
        place = self.table.find(id_, self.oldest)
        return (
            0
            if place is None
            else next(i + 1 for i, p in enumerate(self.table.places) if p is place)
        )
