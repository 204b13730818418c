"""A dataset's shards: which examples of each global batch this worker reads.

Read `sharding.py` first: it chooses between the ways to shard, which are in `below_maps.py`
and `whole_batches.py`. `values.py` has their arguments and results,
`order.py` makes the order equal on all workers, `seek.py` begins a pipeline in its middle,
`source.py` reads the data that users pass to `fit`, `comparison.py` refuses data that differs
between workers, `batches.py` has small helpers, `tfds_files.py` opens TFDS data sets by files.
`by_index.py` reads sources with an index, such as those of `grain_datasets.py` and
`record_files.py`, and moves maps above zips; `file_records.py` gives pipelines over files an index,
by `record_index.py`. `at_most_once`, `from_index`, `from_parquet`, `from_records`, `from_tars`,
`shard` and `tfds` are public.

May import: `tfmw.cluster`, `tfmw.keras_compat`, `tfmw.datasets`, `tfmw.runtime`, `tfmw.errors`.
"""

from tfmw.data.batches import examples_of, first_rows, gather_rows, map_tensors
from tfmw.data.by_index import from_index
from tfmw.data.file_records import index_in_background
from tfmw.data.grain_datasets import is_grain
from tfmw.data.order import ordered
from tfmw.data.record_files import from_parquet, from_records, from_tars
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
