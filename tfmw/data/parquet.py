"""Rows of parquet files, by their row groups.

rows = tfmw.data.from_parquet("part-*.parquet", columns=["x", "y"])
train = rows.map(lambda row: (row["x"], row["y"])).shuffle(10_000).batch(64)
"""

from __future__ import annotations

import collections
import glob
import os
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfmw.data.rows import from_index, stacked
from tfmw.errors import UsageError

_GROUPS = 8  # decoded row groups kept


def from_parquet(
    files: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    columns: Sequence[str] | None = None,
) -> tf.data.Dataset:
    """The rows of parquet files, one by one, as dicts; needs pyarrow.

    A row group is decoded whole, and the last 8 are kept. So a shuffle over many row groups decodes
    each of them often: write row groups of some thousand rows, and shuffle less than eight of them,
    or shuffle when you write.

    Args:
        files: a path, a pattern, or several paths, in the order of the rows.
        columns: names of those to read; by default all. A column of lists needs lists of one
            length.

    Raises:
        UsageError: no file, no rows, or a column that is no array.
    """
    found: list[str] = []
    for each in [files] if isinstance(files, str | os.PathLike) else files:
        path = os.fspath(each)
        found += [path] if os.path.exists(path) else sorted(glob.glob(path))
    if not found:
        raise UsageError(f"no parquet file {files!r}: expected a path, a pattern or several paths.")
    return from_index(_ParquetRows(found, columns))


class _ParquetRows:
    """The rows of files, by index; the footers are read at once."""

    def __init__(self, paths: Sequence[str], columns: Sequence[str] | None):
        import pyarrow.parquet

        self._files = [pyarrow.parquet.ParquetFile(path) for path in paths]
        self._columns = columns
        self._groups = [(f, g) for f in self._files for g in range(f.metadata.num_row_groups)]
        sizes = [f.metadata.row_group(g).num_rows for f, g in self._groups]
        self._ends: np.ndarray = np.cumsum(sizes)
        self._decoded: collections.OrderedDict[int, dict[str, np.ndarray]] = (
            collections.OrderedDict()
        )

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {name: rows[0] for name, rows in self.columns_at([index]).items()}

    def columns_at(self, indices: Sequence[int]) -> dict[str, np.ndarray]:
        """The columns [number of indices, ...] of these rows."""
        out: dict[str, list[np.ndarray]] = {}
        for index in indices:
            group = int(np.searchsorted(self._ends, index, side="right"))
            for name, rows in self._group(group).items():
                out.setdefault(name, []).append(rows[index - int(self._ends[group])])
        return {name: stacked(rows) for name, rows in out.items()}

    def _group(self, number: int) -> dict[str, np.ndarray]:
        if number not in self._decoded:
            file, group = self._groups[number]
            table = file.read_row_group(group, columns=self._columns)
            self._decoded[number] = {name: _rows(name, table[name]) for name in table.column_names}
            if len(self._decoded) > _GROUPS:
                self._decoded.popitem(last=False)
        self._decoded.move_to_end(number)
        return self._decoded[number]


def _rows(name: str, column: Any) -> np.ndarray:
    """A column of a table -> [number of rows, ...]."""
    rows: np.ndarray = column.to_numpy()
    if rows.dtype != object or not len(rows) or isinstance(rows[0], str | bytes):
        return rows
    try:
        return np.stack([np.stack(r) if r.dtype == object else r for r in rows])
    except (AttributeError, TypeError, ValueError) as error:
        raise UsageError(
            f"column {name!r} has rows of different sizes, or missing values: expected numbers, "
            "strings, or lists of one length; leave it out by columns=[...]."
        ) from error
