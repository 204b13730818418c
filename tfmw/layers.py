"""Layers whose state follows the data: embeddings of ids that come and go.

    layer = tfmw.layers.HashTableEmbedding(16, capacity=100_000, min_count=2, max_age=10_000)

May import: `tfmw.tables`.
"""

from tfmw.tables.hash_table_embedding import HashTableEmbedding

__all__ = ["HashTableEmbedding"]
