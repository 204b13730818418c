"""Rows of ids for `HashTableEmbedding`: hash tables of bounded size in variables.

    places = table.find(ids, oldest)         # -1 for ids that are not in it
    places = table.claim(new_ids, now)       # free ones, or those used longest ago
    table.put(places, new_ids, now)

    part = Part(layer)                       # all buckets of a layer, or a range of them
    part.step(ids, counts, is_step)          # ids may get rows
    rows = part.rows(ids)

Places are divided into buckets, as in a set-associative cache, and an id may be in any place of its
bucket. So a lookup compares an id with those of one bucket, whole batches at a time, and nothing is
ever moved. With one bucket the table is exactly an LRU cache.

All state of an id is in its bucket; the counts of ids that wait for a row of a bucket are stored
beside it. So each of several parameter servers can have some of the buckets, and the result is that
of one process. A server's part reads and changes the same Keras variables, which then hold the
server's rows (`models.substituted`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfmw.compat import models, row_updates
from tfmw.tables import hashing

WAYS = 16
"""Number of places of a bucket."""


class HashTable:
    """A table of ids with the step in which each was last used.

    The ids given to one call are distinct.

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
        """Finds ids that were used in step `oldest` or later; `ids` may have repetitions.

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
        """Chooses places for ids that are not in the table: free ones, or those used longest ago.

        Args:
            ids: int64 [n]; earlier ids choose first.
            now: int64 [], the step: places used in it are kept.
            kept_steps: number of steps before it whose places are kept, too.

        Returns:
            int64 [n], distinct places; -1 for ids without a free place.
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
        """Records the step in which places int64 [n] are used."""
        row_updates.assign_rows(self._used, places, tf.fill(tf.shape(places), now))

    def _places(self, ids: tf.Tensor) -> tf.Tensor:
        """int64 [n, ways], the places of each id's bucket."""
        first = self._bucket_of(ids) * self._ways
        return first[:, None] + tf.range(self._ways, dtype=tf.int64)


class Part:
    """The rows of ids in a range of buckets of a layer.

    Args:
        layer: a `HashTableEmbedding` that is built.
        first_bucket: the first bucket whose rows the layer's variables hold.
        kept_steps: number of steps before the current one whose ids cannot lose their rows.
    """

    def __init__(self, layer: Any, first_bucket: int = 0, kept_steps: int = 0):
        self._layer = layer
        self._first_bucket = first_bucket
        self._kept_steps = kept_steps
        self._first_place = first_bucket * ways_of(int(layer.ids.shape[0]))
        self._rows_before = int(first_bucket == 0)  # row 0, which belongs to no place
        self._table = HashTable(layer.ids, layer.used, self._bucket)
        self._candidates: HashTable | None = None  # the ids that wait for a row
        if layer.min_count > 1:
            self._candidates = HashTable(
                layer.candidate_ids, layer.candidate_used, self._candidate_bucket
            )

    def step(self, ids: tf.Tensor, counts: tf.Tensor, is_step: tf.Tensor) -> None:
        """Updates the tables for a step with these ids.

        Args:
            ids: int64 [n] of these buckets, distinct, in increasing order.
            counts: int64 [n], how often each is in the batch.
            is_step: bool [], whether the batch has any ids, of these buckets or others.
        """
        now = self._now() + tf.cast(is_step, tf.int64)
        oldest = self.oldest(now)
        places = self._table.find(ids, oldest)
        has_row = places >= 0
        self._table.touch(tf.boolean_mask(places, has_row), now)
        ids, counts = where(~has_row, ids, counts)
        if self._candidates is None:
            self._admit(ids, counts, now)
        else:
            self._admit_counted(self._candidates, ids, counts, now, oldest)
        with row_updates.equal_on_all_replicas():
            self._layer.step.assign(now)

    def rows(self, ids: tf.Tensor) -> tf.Tensor:
        """int64 [n], the row in the whole table of each id of these buckets; 0 if it has none."""
        places = self._table.find(ids, self.oldest())
        return tf.where(places < 0, tf.zeros_like(places), places + self._first_place + 1)

    def values(self, rows: tf.Tensor) -> tf.Tensor:
        """[n, output_dim], values of rows int64 [n]; undefined for rows of other buckets."""
        local = tf.maximum(rows - self._first_place - 1 + self._rows_before, 0)
        return tf.gather(models.native(self._layer.embeddings), local)

    def oldest(self, now: tf.Tensor | None = None) -> tf.Tensor:
        """int64 [], the first step whose ids are still known at `now`, by default the last step."""
        if self._layer.max_age is None:
            return tf.constant(1, tf.int64)
        return tf.maximum((self._now() if now is None else now) - self._layer.max_age, 1)

    def _now(self) -> tf.Tensor:
        return tf.convert_to_tensor(models.native(self._layer.step))

    def _admit(self, ids: tf.Tensor, counts: tf.Tensor, now: tf.Tensor) -> tf.Tensor:
        """Gives rows to ids that were seen often enough; bool [n], which of them have one."""
        asks = tf.where(counts >= self._layer.min_count)[:, 0]
        asking = tf.gather(ids, asks)
        places = self._table.claim(asking, now, self._kept_steps)
        places, new, asks = where(places >= 0, places, asking, asks)
        self._table.put(places, new, now)
        embeddings, rows = self._layer.embeddings, places + self._rows_before
        row_updates.assign_rows(embeddings, rows, self._initial(new))
        row_updates.reset_slots(embeddings, rows)
        return tf.scatter_nd(asks[:, None], tf.ones_like(places, tf.bool), tf.shape(ids, tf.int64))

    def _admit_counted(
        self,
        candidates: HashTable,
        ids: tf.Tensor,
        counts: tf.Tensor,
        now: tf.Tensor,
        oldest: tf.Tensor,
    ) -> None:
        """Gives rows to ids that are counted until they have a row; see `_admit`.

        If there is no place to count an id, the one that was seen longest ago is forgotten.
        """
        places = candidates.find(ids, oldest)
        before = tf.gather(models.native(self._layer.candidate_counts), tf.maximum(places, 0))
        counts += tf.where(places < 0, tf.zeros_like(before), before)
        order = tf.argsort(counts, direction="DESCENDING", stable=True)
        ids, counts, places = (tf.gather(each, order) for each in (ids, counts, places))
        admitted = self._admit(ids, counts, now)
        known = places >= 0
        removed = tf.boolean_mask(places, known & admitted)
        candidates.touch(removed, tf.constant(0, tf.int64))
        kept = where(known & ~admitted, places, counts)
        candidates.touch(kept[0], now)
        new, new_counts = where(~known & ~admitted, ids, counts)
        claimed = candidates.claim(new, now)
        claimed, new, new_counts = where(claimed >= 0, claimed, new, new_counts)
        candidates.put(claimed, new, now)
        stored, values = (
            tf.concat(pair, axis=0) for pair in zip(kept, (claimed, new_counts), strict=True)
        )
        row_updates.assign_rows(self._layer.candidate_counts, stored, values)

    def _initial(self, ids: tf.Tensor) -> tf.Tensor:
        """[n, output_dim], the initial values of the rows of ids int64 [n]."""
        layer = self._layer
        initializer, dtype = layer.embeddings_initializer, layer.variable_dtype
        if isinstance(initializer, keras.initializers.RandomUniform):
            low, high = initializer.minval, initializer.maxval
            drawn = hashing.uniform(ids, layer.output_dim, layer.seed)
            return tf.cast(low + drawn * (high - low), dtype)
        row = tf.convert_to_tensor(initializer([1, layer.output_dim], dtype=dtype))
        return tf.repeat(row, tf.size(ids), axis=0)

    def _bucket(self, ids: tf.Tensor) -> tf.Tensor:
        return bucket_of(self._layer, ids) - self._first_bucket

    def _candidate_bucket(self, ids: tf.Tensor) -> tf.Tensor:
        """Bucket that counts an id: a second hash chooses among those of its row's bucket."""
        places = int(self._layer.candidate_ids.shape[0])
        beside = places // ways_of(places) // bucket_count(self._layer)
        one_of_them = hashing.buckets(ids, beside, self._layer.seed + 1)
        return self._bucket(ids) * beside + one_of_them


def bucket_count(layer: Any) -> int:
    """Number of buckets of a layer."""
    places = int(layer.ids.shape[0])
    return places // ways_of(places)


def bucket_of(layer: Any, ids: tf.Tensor) -> tf.Tensor:
    """int64 [n], the bucket of each id int64 [n], among all buckets of a layer."""
    return hashing.buckets(ids, bucket_count(layer), layer.seed)


def where(mask: tf.Tensor, *tensors: tf.Tensor) -> list[tf.Tensor]:
    """The elements of each tensor [n, ...] where bool [n] is true."""
    return [tf.boolean_mask(tensor, mask) for tensor in tensors]


def counted(ids: tf.Tensor, counts: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """(the distinct ids int64 [n] in increasing order, the total count of each)."""
    unique, positions = tf.unique(ids, out_idx=tf.int64)
    sums = tf.math.unsorted_segment_sum(counts, positions, tf.size(unique))
    order = tf.argsort(unique, stable=True)
    return tf.gather(unique, order), tf.gather(sums, order)


def ways_of(places: int) -> int:
    """Places of each bucket of a table of this size; see `places_within`."""
    return min(places, WAYS)


def places_within(capacity: int) -> int:
    """The places of the largest table of at most `capacity` places: whole buckets."""
    return capacity - capacity % ways_of(capacity)


def _turns(buckets: tf.Tensor) -> tf.Tensor:
    """int32 [n], the number of earlier elements of int64 [n] that are equal to each."""
    order = tf.argsort(buckets, stable=True)
    ordered = tf.gather(buckets, order)
    turns = tf.range(tf.size(ordered)) - tf.searchsorted(ordered, ordered)
    return tf.scatter_nd(order[:, None], turns, tf.shape(turns))
