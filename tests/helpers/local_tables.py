"""A table in backups, without parameter servers."""

from __future__ import annotations

from collections.abc import Collection
from typing import ClassVar

import numpy as np
import tensorflow as tf

from tfmw.tables import files


class LocalTables:
    """A substitute for `files.TableFiles` with one table, an array of this process.

    Attributes:
        rows: float32 [12, 2], the table.
    """

    layout: ClassVar = {"table": [[0, 8], [8, 12]]}

    def __init__(self) -> None:
        self.rows: np.ndarray = np.arange(24, dtype=np.float32).reshape(12, 2)
        self._changed: np.ndarray = np.zeros(12, bool)

    def set(self, ids: list[int], value: float) -> None:
        """Changes rows."""
        self.rows[ids] = value
        self._changed[ids] = True

    def write(
        self, directory: str, must_be_finite: Collection[str] = (), only_changed: bool = False
    ) -> list[str]:
        del must_be_finite
        prefixes = []
        for a, b in self.layout["table"]:
            found = [("table", f"12 2 {a},{b - a}:-", self.rows[a:b])]
            if only_changed:
                ids: np.ndarray = a + np.flatnonzero(self._changed[a:b])
                name = files.changed_name("table", a)
                found = [(files.ids_of(name), "", ids), (name, "", self.rows[ids])]
            prefixes.append(_saved(f"{directory}/server_{a}", found))
        return prefixes

    def clear_marks(self) -> None:
        self._changed[:] = False

    def share_changed(self) -> float:
        return float(self._changed.mean())


def _saved(prefix: str, tensors: list[tuple[str, str, np.ndarray]]) -> str:
    names, specs, values = zip(*tensors, strict=True)
    tf.raw_ops.SaveV2(
        prefix=prefix,
        tensor_names=list(names),
        shape_and_slices=list(specs),
        tensors=[tf.convert_to_tensor(value) for value in values],
    )
    return prefix
