"""Layers whose state follows the data: embeddings of ids that come and go.

    layer = tfmw.layers.HashTableEmbedding(16, capacity=100_000, min_count=2, max_age=10_000)

Read `hash_table_embedding.py` first: the Keras layer and its variables. `hash_table.py` finds the
place of an id, counts ids that have no row yet, and has one step of a layer, in all buckets or in
those of a server; `hashing.py` has the hash functions and the first values of a row.

May import: `tfmw.keras_compat`, `tfmw.errors`.
"""

from tfmw.layers.hash_table_embedding import HashTableEmbedding

__all__ = ["HashTableEmbedding"]
