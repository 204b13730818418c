"""Tables in SavedModels: servers write their rows into it, and none goes through this process.

    with whole_tables(model.variables) as written:       # or: tables_in_files(...)
        ...                                              # make the archive of a SavedModel
        written.track(archive)
        ...                                              # write the SavedModel to `path`
        written.write_into(path)

`whole_tables`: each table is a variable. While the SavedModel is made it has no value, and in the
checkpoint of its variables there is a mark in its place. The servers then write the rows under the
names of these marks.

`tables_in_files`: rows are looked up in files. The SavedModel has an asset, `assets/tables.json`,
which names the files of rows, and beside it these files, which the servers write.
"""

from __future__ import annotations

import contextlib
import functools
import json
import posixpath
import tempfile
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

import tensorflow as tf

from tfmw import storage
from tfmw.errors import TfmwError
from tfmw.keras_compat import models, table_variables
from tfmw.runtime import disk
from tfmw.tables.files import TableFiles, write_checkpoint
from tfmw.tables.row_files import RowFiles
from tfmw.tables.table import NeedsAllRows, Table, tables_among

_MARK = "tfmw: the rows of table"


class WholeTables:
    """The stand-ins of tables in a SavedModel.

    Args:
        tables: by the marks in the checkpoint.
    """

    def __init__(self, tables: dict[str, Table]):
        self._tables = tables

    def track(self, archive: Any) -> None:
        """Makes an archive ready to be written: it has all that it needs."""

    def write_into(self, directory: str) -> None:
        """Replaces the marks in a SavedModel by the tables' rows, which their servers write.

        Raises:
            OSError or tf.errors.OpError: a file could not be written.
        """
        if not self._tables:
            return
        prefix = posixpath.join(directory, "variables", "variables")
        tables, names, tensors = {}, [], []
        with storage.checkpoint_reader(prefix) as reader:
            for name in sorted(reader.get_variable_to_shape_map()):
                tensor = reader.get_tensor(name)
                if isinstance(tensor, bytes) and tensor.decode(errors="replace") in self._tables:
                    tables[name] = self._tables[tensor.decode()]
                else:
                    names.append(name)
                    tensors.append(tf.convert_to_tensor(tensor))
        for file in storage.files_of(f"{prefix}."):
            tf.io.gfile.remove(file)

        def save(own: str) -> None:
            with tf.device("/CPU:0"):
                tf.raw_ops.SaveV2(
                    prefix=own,
                    tensor_names=names,
                    shape_and_slices=[""] * len(names),
                    tensors=tensors,
                )

        write_checkpoint(prefix, f"{prefix}.parts", TableFiles(tables).write, save)


@contextlib.contextmanager
def whole_tables(variables: Iterable[object]) -> Iterator[WholeTables]:
    """Within this context Keras variables that are tables hold variables without values."""
    found: dict[str, Table] = {}
    pairs = []
    for number, variable in enumerate(tables_among(variables)):
        table: Table = models.native(variable)
        mark = f"{_MARK} {number}"
        found[mark] = table
        name = f"tfmw_exported_{number}"
        stand_in = table_variables.StandIn(name, table.shape, table.dtype, table.trainable, mark)
        pairs.append((variable, stand_in))
    with models.substituted(pairs):
        yield WholeTables(found)


class TablesInFiles:
    """Tables of a SavedModel whose rows are looked up in files.

    Args:
        tables: by their names in the asset.
        folder: an empty directory, for the asset.
    """

    def __init__(self, tables: dict[str, Table], folder: str):
        self._files = RowFiles(tables)
        path = posixpath.join(folder, "tables.json")
        with open(path, "w") as file:
            json.dump(self._files.as_json(), file)
        self._asset = tf.saved_model.Asset(path)

    def look_up(self, name: str, ids: tf.Tensor) -> tf.Tensor:
        """Rows of a table, in the SavedModel that is being made."""
        path: tf.Tensor = self._asset.asset_path  # where the SavedModel is loaded from
        return self._files.look_up(name, tf.strings.regex_replace(path, "/[^/]*$", ""), ids)

    def track(self, archive: Any) -> None:
        """Adds the asset to an archive, if there are tables."""
        if self._files.tables:
            table_variables.track_asset(archive, self._asset)

    def write_into(self, directory: str) -> None:
        """Adds the files to a SavedModel; servers write their rows.

        Raises:
            OSError or tf.errors.OpError: a file could not be written.
            TfmwError: rows are not where a lookup reads them.
        """
        if not self._files.tables:
            return
        folder = disk.absolute(posixpath.join(directory, "assets"))
        self._files.write(folder)
        for name, table in self._files.tables.items():
            ids = self._files.first_and_last(name)
            with tf.device("CPU:0"):
                written = self._files.look_up(name, tf.constant(folder), ids)
            if written.numpy().tobytes() != table.sparse_read(ids).numpy().tobytes():
                raise TfmwError(
                    f"the rows of {name} in {folder!r} are not those of the parameter servers: "
                    "this TensorFlow writes records in another way than those that tfmw knows; "
                    'export with tables="whole".'
                )


@contextlib.contextmanager
def tables_in_files(
    variables: Iterable[object], weights: Iterable[object]
) -> Iterator[TablesInFiles]:
    """Within this context Keras variables that are tables look up rows in files, in graphs.

    Args:
        variables: of the model, its optimizer and its metrics.
        weights: those of the model. Of the others, such as slots, nothing is written.
    """
    of_model = {id(variable) for variable in weights}
    named: dict[str, Any] = {}
    for variable in tables_among(variables):
        name = variable.path
        named[name if name not in named else f"{name} ({len(named)})"] = variable
    tables = {name: models.native(v) for name, v in named.items() if id(v) in of_model}
    with tempfile.TemporaryDirectory() as folder:
        files = TablesInFiles(tables, folder)
        pairs = [
            (variable, _elsewhere(files, name, variable, number))
            for number, (name, variable) in enumerate(named.items())
        ]
        with models.substituted(pairs):
            yield files


def _elsewhere(files: TablesInFiles, name: str, variable: Any, number: int) -> Any:
    """The table of a Keras variable, with rows in files."""
    table: Table = models.native(variable)

    def refuse() -> NoReturn:
        raise NeedsAllRows(
            f'{table.path} cannot be exported with tables="sharded": a layer reads all rows of it, '
            'and a sharded table serves the rows of some ids only; export with tables="whole".'
        )

    return table_variables.RowsElsewhere(
        f"tfmw_exported_{number}",
        table.shape.as_list(),
        table.dtype,
        functools.partial(files.look_up, name),
        refuse,
        table.trainable,
    )
