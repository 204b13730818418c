"""A dataset's shards: which examples of each global batch this worker reads.

Read `sharding.py` first. `tfds_files.py` opens TFDS data sets by files.

May import: `tfmw.keras_compat`, `tfmw.datasets`, `tfmw.errors`.
"""

from tfmw.data.sharding import (
    INFINITE,
    Order,
    Shard,
    Sharding,
    ShardSizes,
    Source,
    draws_late,
    examples_of,
    ordered,
    shard,
    steps_of,
)
from tfmw.data.tfds_files import tfds

__all__ = [
    "INFINITE",
    "Order",
    "Shard",
    "ShardSizes",
    "Sharding",
    "Source",
    "draws_late",
    "examples_of",
    "ordered",
    "shard",
    "steps_of",
    "tfds",
]
