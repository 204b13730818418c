"""A dataset's shards: which examples of each global batch this worker reads.

Read `sharding.py` first: it chooses between the ways to shard, which are in `below_maps.py`,
`slices.py` and `whole_batches.py`. `values.py` has their arguments and results,
`order.py` makes the order equal on all workers, `seek.py` begins a pipeline in its middle,
`source.py` reads the data that users pass to `fit`, `comparison.py` refuses data that differs
between workers, `batches.py` has small helpers, `tfds_files.py` opens TFDS data sets by files.
`zips.py` moves maps above zips. `rows.py` reads sources with an index; `grain_datasets.py`,
`parquet.py` and `record_files.py` are such sources. `file_records.py` gives pipelines over files
an index, by `record_index.py` and `interleaving.py`. `at_most_once`, `from_index`, `from_parquet`,
`from_records`, `from_tars`, `shard` and `tfds` are public.

May import: `tfmw.keras_compat`, `tfmw.datasets`, `tfmw.errors`.
"""

from tfmw.data.batches import examples_of, first_rows, gather_rows, map_tensors, static_batch_size
from tfmw.data.file_records import index_in_background
from tfmw.data.grain_datasets import is_grain
from tfmw.data.order import ordered
from tfmw.data.parquet import from_parquet
from tfmw.data.record_files import from_records, from_tars
from tfmw.data.rows import from_index
from tfmw.data.sharding import at_most_once, shard, shard_dataset
from tfmw.data.slices import step_of
from tfmw.data.source import Source, empty_dataset, steps_of
from tfmw.data.tfds_files import tfds
from tfmw.data.values import INFINITE, Order, Shard, Sharding, ShardSizes

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
    "static_batch_size",
    "step_of",
    "steps_of",
    "tfds",
]
