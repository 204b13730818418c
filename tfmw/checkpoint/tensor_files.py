"""The tensors of one backup on disk: TensorFlow checkpoints, of which servers write the tables.

The checkpoint `TABLES` has the rows of tables, all of them. Of the next few backups it is the same
one, by hard links, and their checkpoint `PREFIX` has the rows that have changed since.
`TableBackups` decides which of both a backup writes.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import numpy as np

from tfmw import storage, tables
from tfmw.checkpoint.sharded_backups import Piece, SharedWrite, save

logger = logging.getLogger("tfmw")

PREFIX = "tensors"
TABLES = "tables"
FULL_EVERY = 10  # backups; those in between have of tables only the rows that have changed
_FEW = 0.5  # of all tables' bytes, from which on a backup of the changed ones would save nothing


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
    """Writes tensors, parts of slots or tables as checkpoints in a directory that exists.

    The other arguments and the errors are those of `BackupStore.write`.
    """
    prefix = os.path.join(directory, PREFIX)
    if shared is not None:
        shared.write(prefix, tensors, pieces)
        return
    if table_files is None:
        save(prefix, tensors)
        return
    parts = os.path.join(directory, "parts")

    if base is None:
        write_tables = functools.partial(table_files.write, must_be_finite=must_be_finite)
        tables.write_checkpoint(os.path.join(directory, TABLES), parts, write_tables)
        save(prefix, tensors)
        return
    for name in os.listdir(base):
        if name.startswith(f"{TABLES}."):
            os.link(os.path.join(base, name), os.path.join(directory, name))
    write_tables = functools.partial(table_files.write_changed, must_be_finite=must_be_finite)
    tables.write_checkpoint(prefix, parts, write_tables, lambda own: save(own, tensors))


class TableBackups:
    """The tables of a run in its backups.

    The first two backups have all rows: those that share files of tables are damaged together.

    Args:
        files: the tables.
    """

    def __init__(self, files: tables.TableFiles):
        self.files = files
        self._last: str | None = None  # the directory of the last backup
        self._full = 0  # backups with all rows so far
        self._since_full = 0  # backups of changed rows only

    def write(self, write: Callable[[str | None], str]) -> None:
        """Writes one backup, with all rows or with those that have changed.

        Args:
            write: (directory of a backup whose files of tables to link, or None for all rows) ->
                the directory of the new backup.

        Raises:
            OSError or tf.errors.OpError, tables.NotFinite: of `write`; the next backup has these
                changes, too.
        """
        base = self._base()
        if base is not None:
            try:
                self._last = write(base)
                self._since_full += 1
                return
            except OSError as e:  # a file system without hard links, for example
                logger.info("no backup of changed rows (%s): all rows are written", e)
        self._last = write(None)
        self._full, self._since_full = self._full + 1, 0
        self.files.clear_marks()

    def _base(self) -> str | None:
        if self._full < 2 or self._since_full >= FULL_EVERY - 1:
            return None
        if self._last is None or not os.path.isdir(self._last):
            return None
        return self._last if self.files.share_changed() < _FEW else None
