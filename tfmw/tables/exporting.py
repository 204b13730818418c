"""Tables in SavedModels: servers write their rows into the checkpoint of its variables.

    with stand_ins(model.variables) as written:
        ...                                        # write a SavedModel of the model to `path`
        written.write_into(f"{path}/variables/variables")

While a SavedModel is made each table is a variable without a value, and in the checkpoint there is
a mark in its place. The servers then write the rows under the names of these marks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import tensorflow as tf

from tfmw import keras_compat
from tfmw.tables.files import TableFiles, write_checkpoint
from tfmw.tables.table import Table, tables_among

_MARK = "tfmw: the rows of table"


class StandIns:
    """What stands for tables in a SavedModel.

    Args:
        tables: by the marks in the checkpoint.
    """

    def __init__(self, tables: dict[str, Table]):
        self._tables = tables

    def write_into(self, prefix: str) -> None:
        """Replaces the marks in a checkpoint by the tables' rows, which their servers write.

        Args:
            prefix: of the checkpoint.

        Raises:
            OSError or tf.errors.OpError: a file could not be written.
        """
        if not self._tables:
            return
        reader = tf.train.load_checkpoint(prefix)
        tables, names, tensors = {}, [], []
        for name in sorted(reader.get_variable_to_shape_map()):
            tensor = reader.get_tensor(name)
            if isinstance(tensor, bytes) and tensor.decode(errors="replace") in self._tables:
                tables[name] = self._tables[tensor.decode()]
            else:
                names.append(name)
                tensors.append(tf.convert_to_tensor(tensor))
        for file in tf.io.gfile.glob(f"{prefix}.index") + tf.io.gfile.glob(f"{prefix}.data-*"):
            tf.io.gfile.remove(file)

        def save(own: str) -> None:
            with tf.device("/CPU:0"):
                tf.raw_ops.SaveV2(
                    prefix=own,
                    tensor_names=names,
                    shape_and_slices=[""] * len(names),
                    tensors=tensors,
                )

        write_checkpoint(prefix, f"{prefix}.parts", save, TableFiles(tables))


@contextlib.contextmanager
def stand_ins(variables: Iterable[object]) -> Iterator[StandIns]:
    """Within this context Keras variables that are tables hold variables without values."""
    found: dict[str, Table] = {}
    pairs = []
    for number, variable in enumerate(tables_among(variables)):
        table: Table = keras_compat.native(variable)
        mark = f"{_MARK} {number}"
        found[mark] = table
        name = f"tfmw_exported_{number}"
        stand_in = keras_compat.StandIn(name, table.shape, table.dtype, table.trainable, mark)
        pairs.append((variable, stand_in))
    with keras_compat.substituted(pairs):
        yield StandIns(found)
