"""How often ids were seen that have no row yet, in bounded memory."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfmw.keras_compat import models, row_updates
from tfmw.layers.hash_table import HashTable


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
