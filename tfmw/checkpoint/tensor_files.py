"""The tensors of one backup on disk: a TensorFlow checkpoint, of which servers write the tables."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np
import tensorflow as tf

from tfmw import tables
from tfmw.checkpoint.parts import Piece, SharedWrite, save

PREFIX = "tensors"


class SavedTensors(Mapping[str, np.ndarray]):
    """The tensors of a backup by name; tables are read when they are asked for.

    Args:
        prefix: of the checkpoint.
        arrays: the tensors that are no tables.
        layout: the slices of the tables.
    """

    def __init__(self, prefix: str, arrays: dict[str, np.ndarray], layout: tables.Layout):
        self.prefix = prefix
        self.layout = layout
        self._arrays = arrays

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self.layout:
            return self._arrays[name]
        array: np.ndarray = tf.train.load_checkpoint(self.prefix).get_tensor(name)
        return array

    def __iter__(self) -> Iterator[str]:
        yield from self._arrays
        yield from self.layout

    def __len__(self) -> int:
        return len(self._arrays) + len(self.layout)


def write(
    directory: str,
    tensors: Mapping[str, np.ndarray],
    shared: SharedWrite | None,
    pieces: Sequence[Piece],
    table_files: tables.TableFiles | None,
    must_be_finite: Collection[str],
) -> None:
    """Writes tensors, parts of slots or tables as the checkpoint `PREFIX` in a directory.

    Args:
        directory: exists.
        tensors: name -> array, of any dtype of TensorFlow.
        shared: the writing by several workers, which have no tables.
        pieces: this task's.
        table_files: tables, which their servers write.
        must_be_finite: names of tables whose rows are checked.

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
    tables.write_checkpoint(
        prefix,
        os.path.join(directory, "parts"),
        lambda own: save(own, tensors),
        table_files,
        must_be_finite,
    )
