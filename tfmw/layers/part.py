"""The rows of ids in successive buckets of a `HashTableEmbedding`.

    part = Part(layer)                                # all buckets
    part.step(ids, counts, is_step)                   # ids may get rows
    rows = part.rows(ids)

Whatever happens to an id happens in its bucket: the ids that wait for a row of a bucket are counted
beside it. So each of several parameter servers can have some of the buckets, and together they do
what one process does. A server's part reads and changes the same Keras variables, which then hold
the server's rows (`models.substituted`).
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfmw.keras_compat import models, row_updates
from tfmw.layers import hashing
from tfmw.layers.hash_table import Candidates, HashTable, ways_of


class Part:
    """Some buckets of a layer.

    Args:
        layer: a `HashTableEmbedding` that is built.
        first_bucket: from which on the layer's variables hold rows.
        kept_steps: number of steps before the current one whose rows are not taken from their ids.
    """

    def __init__(self, layer: Any, first_bucket: int = 0, kept_steps: int = 0):
        self._layer = layer
        self._first_bucket = first_bucket
        self._kept_steps = kept_steps
        self._first_place = first_bucket * ways_of(int(layer.ids.shape[0]))
        self._rows_before = int(first_bucket == 0)  # row 0, which is of no place
        self._table = HashTable(layer.ids, layer.used, self._bucket)
        self._candidates = None
        if layer.min_count > 1:
            table = HashTable(layer.candidate_ids, layer.candidate_used, self._candidate_bucket)
            self._candidates = Candidates(table, layer.candidate_counts)

    def step(self, ids: tf.Tensor, counts: tf.Tensor, is_step: tf.Tensor) -> None:
        """A step with these ids.

        Args:
            ids: int64 [n] of these buckets, in increasing order, each once.
            counts: int64 [n], how often each is in the batch.
            is_step: bool [], whether the batch has any ids, of these buckets or others.
        """
        now = self._now() + tf.cast(is_step, tf.int64)
        oldest = self._oldest(now)
        places = self._table.find(ids, oldest)
        has_row = places >= 0
        self._table.touch(tf.boolean_mask(places, has_row), now)
        ids, counts = tf.boolean_mask(ids, ~has_row), tf.boolean_mask(counts, ~has_row)
        if self._candidates is not None:
            counts += self._candidates.seen_before(ids, oldest)
            order = tf.argsort(counts, direction="DESCENDING", stable=True)
            ids, counts = tf.gather(ids, order), tf.gather(counts, order)
        admitted = self._admit(ids, counts, now)
        if self._candidates is not None:
            self._candidates.update(ids, counts, admitted, now, oldest)
        self._layer.step.assign(now)

    def rows(self, ids: tf.Tensor) -> tf.Tensor:
        """int64 [n], the row in the whole of each id of these buckets; 0 for those without one."""
        places = self._table.find(ids, self.oldest())
        return tf.where(places < 0, tf.zeros_like(places), places + self._first_place + 1)

    def values(self, rows: tf.Tensor) -> tf.Tensor:
        """[n, output_dim], rows int64 [n]; of those of other buckets, such as row 0, any values."""
        local = tf.maximum(rows - self._first_place - 1 + self._rows_before, 0)
        return tf.gather(models.native(self._layer.embeddings), local)

    def oldest(self) -> tf.Tensor:
        """int64 [], the first step whose ids are still known."""
        return self._oldest(self._now())

    def _now(self) -> tf.Tensor:
        return tf.convert_to_tensor(models.native(self._layer.step))

    def _oldest(self, now: tf.Tensor) -> tf.Tensor:
        if self._layer.max_age is None:
            return tf.constant(1, tf.int64)
        return tf.maximum(now - self._layer.max_age, 1)

    def _admit(self, ids: tf.Tensor, counts: tf.Tensor, now: tf.Tensor) -> tf.Tensor:
        """Gives rows to ids that were seen often enough: bool [n], which of them have one."""
        asks = tf.where(counts >= self._layer.min_count)[:, 0]
        asking = tf.gather(ids, asks)
        places = self._table.claim(asking, now, self._kept_steps)
        found = places >= 0
        places, new = tf.boolean_mask(places, found), tf.boolean_mask(asking, found)
        self._table.put(places, new, now)
        embeddings, rows = self._layer.embeddings, places + self._rows_before
        row_updates.assign_rows(embeddings, rows, self._initial(new))
        row_updates.reset_slots(embeddings, rows)
        return tf.scatter_nd(
            tf.boolean_mask(asks, found)[:, None],
            tf.ones_like(places, tf.bool),
            tf.shape(ids, tf.int64),
        )

    def _initial(self, ids: tf.Tensor) -> tf.Tensor:
        """[n, output_dim], the first values of the rows of ids int64 [n]."""
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
        """Of those beside the bucket of the id's row, one that another hash function chooses."""
        places = int(self._layer.candidate_ids.shape[0])
        beside = places // ways_of(places) // bucket_count(self._layer)
        one_of_them = hashing.buckets(ids, beside, self._layer.seed + 1)
        return self._bucket(ids) * beside + one_of_them


def bucket_count(layer: Any) -> int:
    """Number of buckets of a layer."""
    places = int(layer.ids.shape[0])
    return places // ways_of(places)


def bucket_of(layer: Any, ids: tf.Tensor) -> tf.Tensor:
    """int64 [n], the bucket of each id int64 [n], of all of a layer."""
    return hashing.buckets(ids, bucket_count(layer), layer.seed)


def counted(ids: tf.Tensor, counts: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """(the distinct ids int64 [n] in increasing order, the sum of the counts of each)."""
    unique, positions = tf.unique(ids, out_idx=tf.int64)
    sums = tf.math.unsorted_segment_sum(counts, positions, tf.size(unique))
    order = tf.argsort(unique, stable=True)
    return tf.gather(unique, order), tf.gather(sums, order)
