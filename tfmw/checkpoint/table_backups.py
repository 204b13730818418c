"""Rows of tables in a backup: all of them, or those that have changed since the last one."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

from tfmw import tables

logger = logging.getLogger("tfmw")

FULL_EVERY = 10  # backups; those in between have of tables only the rows that have changed
_FEW = 0.5  # of all tables' bytes, from which on a backup of the changed ones would save nothing


class TableBackups:
    """The tables of a run in its backups.

    The first two backups have all rows: those that share files of tables are damaged together.

    Args:
        files: the tables.

    Attributes:
        files: as above.
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
