"""A dataset's shards: which examples of each global batch this worker reads.

Read `sharding.py` first: it chooses between the ways to shard, and `values.py` has their arguments
and results. `source.py` reads the data that users pass to `fit`, `order.py` makes its order equal
on all workers, `seek.py` begins a pipeline in its middle.

May import: `tfmw.cluster`, `tfmw.compat`, `tfmw.observe`, `tfmw.errors`.
"""

from tfmw.data.batches import examples_of, first_rows, gather_rows, map_tensors
from tfmw.data.by_index import from_index
from tfmw.data.grain_datasets import is_grain
from tfmw.data.order import ordered
from tfmw.data.record_files import from_parquet, from_records, from_tars, index_in_background
from tfmw.data.sharding import at_most_once, shard, shard_dataset
from tfmw.data.source import Source, empty_dataset
from tfmw.data.tfds_files import tfds
from tfmw.data.values import INFINITE, Order, Shard, Sharding, ShardSizes
from tfmw.data.whole_batches import step_of

__all__ = [
    "INFINITE",
    "Order",
    "Shard",
    "ShardSizes",
    "Sharding",
    "Source",
    "at_most_once",
    "empty_dataset",
    "examples_of",
    "first_rows",
    "from_index",
    "from_parquet",
    "from_records",
    "from_tars",
    "gather_rows",
    "index_in_background",
    "is_grain",
    "map_tensors",
    "ordered",
    "shard",
    "shard_dataset",
    "step_of",
    "tfds",
]
