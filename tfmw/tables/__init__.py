"""Tables: variables that are divided over parameter servers, and made there.

    tables.create_on_servers(partition, servers=2)      # from now on, in this process
    model = keras.Sequential([keras.layers.Embedding(10**9, 64), ...])
    tables.is_table(model.layers[0].embeddings)         # True: a handle, without rows

Read `table.py` first: the handle that the Keras variable holds, and its shards. `shards.py` looks
up rows of shards, from any process, and those of several tables at once. `creation.py` decides
which variables become tables, and fills them on their servers, small ones in one variable
(`joined.py`). `files.py` has tables in checkpoints, those of SavedModels too; `row_files.py` has
the files in which a SavedModel may look rows up instead.

May import: `tfmw.keras_compat`, `tfmw.storage`, `tfmw.errors`.
"""

from tfmw.tables.creation import create_on_servers
from tfmw.tables.files import (
    Layout,
    NotFinite,
    TableFiles,
    changed_name,
    ids_of,
    is_changed_rows,
    save_tensors,
    verify,
    verify_changed,
    whole_tables,
    write_checkpoint,
)
from tfmw.tables.row_files import tables_in_files
from tfmw.tables.table import Table, is_table, refuse_tables, table_of, tables_among

__all__ = [
    "Layout",
    "NotFinite",
    "Table",
    "TableFiles",
    "changed_name",
    "create_on_servers",
    "ids_of",
    "is_changed_rows",
    "is_table",
    "refuse_tables",
    "save_tensors",
    "table_of",
    "tables_among",
    "tables_in_files",
    "verify",
    "verify_changed",
    "whole_tables",
    "write_checkpoint",
]
