"""The tensors of one backup on disk: TensorFlow checkpoints, of which servers write the tables.

The checkpoint `TABLES` has the rows of tables, all of them. Of the next few backups it is the same
one, by hard links, and their checkpoint `PREFIX` has the rows that have changed since.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np

from tfmw import storage, tables
from tfmw.checkpoint.sharded_backups import Piece, SharedWrite, save

PREFIX = "tensors"
TABLES = "tables"


class SavedTensors(Mapping[str, np.ndarray]):
    """The tensors of a backup by name; tables are read when they are asked for.

    Args:
        tables_prefix: of the checkpoint with the tables.
        arrays: the tensors that are no tables.
        layout: the slices of the tables.
        changed_prefix: of the checkpoint with rows that have changed since; None: none have.
    """

    def __init__(
        self,
        tables_prefix: str,
        arrays: dict[str, np.ndarray],
        layout: tables.Layout,
        changed_prefix: str | None = None,
    ):
        self.layout = layout
        self._arrays = arrays
        self._tables = tables_prefix
        self._changed = changed_prefix

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self.layout:
            return self._arrays[name]
        with storage.checkpoint_reader(self._tables) as reader:
            array: np.ndarray = reader.get_tensor(name)
        if self._changed is not None:
            with storage.checkpoint_reader(self._changed) as reader:
                for start, _ in self.layout[name]:
                    rows = tables.changed_name(name, start)
                    array[reader.get_tensor(tables.ids_of(rows))] = reader.get_tensor(rows)
        return array

    def __iter__(self) -> Iterator[str]:
        yield from self._arrays
        yield from self.layout

    def __len__(self) -> int:
        return len(self._arrays) + len(self.layout)

    def restore(self, table_files: tables.TableFiles) -> None:
        """Restores tables; their servers read them."""
        table_files.read(self._tables, self.layout)
        if self._changed is not None:
            table_files.read_changed(self._changed, self.layout)


def write(
    directory: str,
    tensors: Mapping[str, np.ndarray],
    shared: SharedWrite | None,
    pieces: Sequence[Piece],
    table_files: tables.TableFiles | None,
    must_be_finite: Collection[str],
    base: str | None,
) -> None:
    """Writes tensors, parts of slots or tables as checkpoints in a directory.

    Args:
        directory: exists.
        tensors: name -> array, of any dtype of TensorFlow.
        shared: the writing by several workers, which have no tables.
        pieces: this task's.
        table_files: tables, which their servers write.
        must_be_finite: names of tables whose rows are checked.
        base: an earlier backup, since which few rows have changed; None to write all rows.

    Raises:
        tables.NotFinite: one of the tables `must_be_finite` is not.
        OSError or tf.errors.OpError: a file could not be written.
    """
    prefix = os.path.join(directory, PREFIX)
    if shared is not None:
        shared.write(prefix, tensors, pieces)
        return
    if table_files is None:
        save(prefix, tensors)
        return
    parts = os.path.join(directory, "parts")

    def save_own(own: str) -> None:
        save(own, tensors)

    if base is None:
        write_tables = functools.partial(table_files.write, must_be_finite=must_be_finite)
        tables.write_checkpoint(os.path.join(directory, TABLES), parts, write_tables)
        save_own(prefix)
        return
    for name in os.listdir(base):
        if name.startswith(f"{TABLES}."):
            os.link(os.path.join(base, name), os.path.join(directory, name))
    write_tables = functools.partial(table_files.write_changed, must_be_finite=must_be_finite)
    tables.write_checkpoint(prefix, parts, write_tables, save_own)
