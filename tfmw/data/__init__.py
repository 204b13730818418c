"""A dataset's shards: which examples of each global batch this worker reads.

Read `sharding.py` first: it chooses between the ways to shard, and `values.py` has their arguments
and results. `source.py` reads the data that users pass to `fit`, `order.py` makes its order equal
on all workers, `seek.py` begins a pipeline in its middle.

`prediction_files.py` has the files that `tfmw.predict` writes.

May import: `tfmw.cluster`, `tfmw.compat`, `tfmw.observe`, `tfmw.storage`, `tfmw.errors`.
"""

from tfmw.data.batches import examples_of as examples_of
from tfmw.data.batches import first_rows as first_rows
from tfmw.data.batches import gather_rows as gather_rows
from tfmw.data.batches import map_tensors as map_tensors
from tfmw.data.by_index import from_index
from tfmw.data.grain_datasets import is_grain as is_grain
from tfmw.data.order import ordered as ordered
from tfmw.data.prediction_files import read_predictions
from tfmw.data.record_files import from_parquet, from_records, from_tars
from tfmw.data.record_files import index_in_background as index_in_background
from tfmw.data.sharding import at_most_once, shard
from tfmw.data.source import Source as Source
from tfmw.data.source import empty_dataset as empty_dataset
from tfmw.data.tfds_files import tfds
from tfmw.data.values import INFINITE as INFINITE
from tfmw.data.values import Cursor as Cursor
from tfmw.data.values import Shard as Shard
from tfmw.data.values import Sharding as Sharding
from tfmw.data.values import ShardSizes as ShardSizes
from tfmw.data.values import SharedOrder as SharedOrder
from tfmw.data.whole_batches import is_at_most_once as is_at_most_once
from tfmw.data.whole_batches import step_of as step_of

# The public names. The others, imported as themselves, are for the rooms above.
__all__ = [
    "at_most_once",
    "from_index",
    "from_parquet",
    "from_records",
    "from_tars",
    "read_predictions",
    "shard",
    "tfds",
]
