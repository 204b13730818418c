"""A hash table of bounded size in two variables: the place of each id, the oldest replaced.

    places = table.find(ids, oldest)         # -1 for ids that are not in it
    places = table.claim(new_ids, now)       # of the ids that were used longest ago, or never
    table.put(places, new_ids, now)

Places are divided into buckets, as in a set-associative cache, and an id may be in any place of its
bucket. So a lookup compares an id with those of one bucket, whole batches at a time, and nothing is
ever moved. With one bucket the table is exactly a cache of the ids used last.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfmw.keras_compat import models, row_updates

WAYS = 16
"""Places of a bucket."""


class HashTable:
    """Ids, and the step in which each was last used.

    Ids given to one call are each given once.

    Args:
        ids: Keras variable, int64 [places].
        used: Keras variable, int64 [places]: the step of the last use; 0 for an empty place.
        bucket_of: ids int64 [n] -> the bucket of each, int64 [n], counted from the first one that
            these variables have.
    """

    def __init__(self, ids: Any, used: Any, bucket_of: Callable[[tf.Tensor], tf.Tensor]):
        self._ids = ids
        self._used = used
        self._bucket_of = bucket_of
        self._ways = ways_of(int(ids.shape[0]))

    def find(self, ids: tf.Tensor, oldest: tf.Tensor) -> tf.Tensor:
        """Finds ids that were used in step `oldest` or later; here ids may be repeated.

        Args:
            ids: int64 [n].
            oldest: int64 [], at least 1.

        Returns:
            int64 [n], the place of each, -1 for those that are not in the table.
        """
        places = self._places(ids)
        matches = tf.equal(tf.gather(models.native(self._ids), places), ids[:, None])
        valid = tf.gather(models.native(self._used), places) >= oldest
        return tf.reduce_max(tf.where(matches & valid, places, tf.constant(-1, tf.int64)), axis=1)

    def claim(self, ids: tf.Tensor, now: tf.Tensor, kept_steps: int = 0) -> tf.Tensor:
        """Chooses places for ids that are not in the table: those used longest ago.

        Args:
            ids: int64 [n]; the first ones choose first.
            now: int64 [], the step: places used in it are kept.
            kept_steps: number of steps before it whose places are kept, too.

        Returns:
            int64 [n], distinct places; -1 for ids all of whose places are kept.
        """
        places = self._places(ids)
        used = tf.gather(models.native(self._used), places)
        by_age = tf.argsort(used, axis=1, stable=True)
        turn = _turns(places[:, 0])
        within = tf.minimum(turn, self._ways - 1)[:, None]
        chosen = tf.gather(by_age, within, batch_dims=1)
        place = tf.gather(places, chosen, batch_dims=1)[:, 0]
        last_used = tf.gather(used, chosen, batch_dims=1)[:, 0]
        is_free = (last_used < now - kept_steps) | tf.equal(last_used, 0)
        free = (turn < self._ways) & is_free
        return tf.where(free, place, tf.constant(-1, tf.int64))

    def put(self, places: tf.Tensor, ids: tf.Tensor, now: tf.Tensor) -> None:
        """Stores ids int64 [n] in places int64 [n]."""
        row_updates.assign_rows(self._ids, places, ids)
        self.touch(places, now)

    def touch(self, places: tf.Tensor, now: tf.Tensor) -> None:
        """Notes the step in which places int64 [n] are used."""
        row_updates.assign_rows(self._used, places, tf.fill(tf.shape(places), now))

    def clear(self, places: tf.Tensor) -> None:
        """Removes the ids in places int64 [n]."""
        self.touch(places, tf.constant(0, tf.int64))

    def _places(self, ids: tf.Tensor) -> tf.Tensor:
        """int64 [n, ways], the places of each id's bucket."""
        first = self._bucket_of(ids) * self._ways
        return first[:, None] + tf.range(self._ways, dtype=tf.int64)


class Candidates:
    """Counts of ids; where its table is full, the ids seen longest ago are forgotten.

    Args:
        table: of the ids.
        counts: Keras variable, int64 [places], how often each was seen.
    """

    def __init__(self, table: HashTable, counts: Any):
        self._table = table
        self._counts = counts

    def seen_before(self, ids: tf.Tensor, oldest: tf.Tensor) -> tf.Tensor:
        """int64 [n], how often each id int64 [n] was seen, the last time in `oldest` or later."""
        places = self._table.find(ids, oldest)
        counts = tf.gather(models.native(self._counts), tf.maximum(places, 0))
        return tf.where(places < 0, tf.zeros_like(counts), counts)

    def update(
        self, ids: tf.Tensor, counts: tf.Tensor, admitted: tf.Tensor, now: tf.Tensor, oldest: Any
    ) -> None:
        """Stores counts, and removes the ids that have a row now.

        Args:
            ids: int64 [n], each once; the first ones take free places first.
            counts: int64 [n], how often each was seen, in this step too.
            admitted: bool [n], whether the id has a row now.
            now, oldest: int64 [], steps; see `HashTable`.
        """
        places = self._table.find(ids, oldest)
        known = places >= 0
        self._table.clear(tf.boolean_mask(places, known & admitted))
        stays = known & ~admitted
        self._table.touch(tf.boolean_mask(places, stays), now)
        is_new = ~known & ~admitted
        new = tf.boolean_mask(ids, is_new)
        claimed = self._table.claim(new, now)
        found = claimed >= 0
        self._table.put(tf.boolean_mask(claimed, found), tf.boolean_mask(new, found), now)
        stored = tf.concat(
            [tf.boolean_mask(places, stays), tf.boolean_mask(claimed, found)], axis=0
        )
        values = tf.concat(
            [
                tf.boolean_mask(counts, stays),
                tf.boolean_mask(tf.boolean_mask(counts, is_new), found),
            ],
            axis=0,
        )
        row_updates.assign_rows(self._counts, stored, values)


def ways_of(places: int) -> int:
    """Places of each bucket of a table of this size; see `places_within`."""
    return min(places, WAYS)


def places_within(capacity: int) -> int:
    """The places of the largest table of at most `capacity` places: whole buckets."""
    return capacity - capacity % ways_of(capacity)


def _turns(buckets: tf.Tensor) -> tf.Tensor:
    """int32 [n], how many earlier elements of int64 [n] are equal to each."""
    order = tf.argsort(buckets, stable=True)
    ordered = tf.gather(buckets, order)
    turns = tf.range(tf.size(ordered)) - tf.searchsorted(ordered, ordered)
    return tf.scatter_nd(order[:, None], turns, tf.shape(turns))
