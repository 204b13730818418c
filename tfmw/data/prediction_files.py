"""Files of predictions: parts that workers write, and an index of the rows of each part.

    predictions/_index.json
    predictions/part-00000000-0-of-2/       # row.npy, predictions.npy: rows 0, 2, 4, ...
    predictions/part-00000000-1-of-2/       # rows 1, 3, 5, ...

    for group in tfmw.data.read_predictions("predictions"):     # in the order of the dataset
        group["predictions"]

A part has the predictions of one worker for some consecutive global batches, with the number of
each row in the dataset. Only parts in the index belong to the result. A part is a directory of
arrays, a parquet file, or a file of `tf.train.Example`.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import quote

import numpy as np
import tensorflow as tf

from tfmw.errors import UsageError
from tfmw.storage import directories, disk

INDEX = "_index.json"  # readers of parquet directories ignore names that begin with an underscore

ROW = "row"
"""Name of the column with the number of each row in the dataset."""

_STRING = "string"


class Column(NamedTuple):
    """The values of one output for some rows.

    Attributes:
        flat: array [values, ...] of numbers, or of bytes objects.
        lengths: for each ragged dimension, the outermost first, int64 [rows of that dimension].
    """

    flat: np.ndarray
    lengths: list[np.ndarray]

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.lengths[0] if self.lengths else self.flat)

    @property
    def nbytes(self) -> int:
        """Number of bytes of the values."""
        if self.flat.dtype == object:
            return sum(map(len, self.flat.ravel().tolist()))
        return self.flat.nbytes

    @property
    def kind(self) -> list[Any]:
        """JSON that is equal in all parts: dtype, inner shape, number of ragged dimensions."""
        dtype = _STRING if self.flat.dtype == object else self.flat.dtype.name
        return [dtype, list(self.flat.shape[1:]), len(self.lengths)]


def joined(name: str, pieces: Sequence[Any], is_ragged: bool) -> Column:
    """Concatenates the outputs of several steps.

    Args:
        name: name of the output, for errors.
        pieces: tensors or arrays, one or more.
        is_ragged: whether inner dimensions of dense pieces may differ.

    Raises:
        UsageError: sparse pieces, or dense ones of different shapes.
    """
    if any(isinstance(piece, tf.SparseTensor) for piece in pieces):
        raise UsageError(
            f"the output {name!r} is a sparse tensor, which output_dir= cannot write: return a "
            "dense or ragged tensor, such as tf.sparse.to_dense(outputs)."
        )
    if is_ragged or any(isinstance(piece, tf.RaggedTensor) for piece in pieces):
        all_ragged = [
            piece
            if isinstance(piece, tf.RaggedTensor)
            else tf.RaggedTensor.from_tensor(piece, ragged_rank=max(1, len(piece.shape) - 2))
            for piece in pieces
        ]
        ragged = tf.concat(all_ragged, axis=0)
        lengths = [each.numpy().astype(np.int64) for each in ragged.nested_row_lengths()]
        return Column(_plain(ragged.flat_values.numpy()), lengths)
    arrays = [np.asarray(piece) for piece in pieces]
    shapes = {array.shape[1:] for array in arrays}
    if len(shapes) > 1:
        raise UsageError(
            f"the shape of the output {name!r} changes from batch to batch: {sorted(shapes)}. For "
            "output_dir=, return a tf.RaggedTensor, or outputs of one shape."
        )
    return Column(_plain(np.concatenate(arrays)), [])


def _plain(array: np.ndarray) -> np.ndarray:
    """The array in a dtype of NumPy's own: bfloat16 and float8 become float32."""
    return array.astype(np.float32) if array.dtype.kind == "V" else array


# ---- formats -----------------------------------------------------------------------------------


def _write_npy(path: str, columns: Mapping[str, Column]) -> None:
    """Writes a directory with an array for each column, and for its lengths."""
    os.makedirs(path)
    for name, column in columns.items():
        flat = column.flat
        arrays = {f"lengths{level}": lengths for level, lengths in enumerate(column.lengths)}
        if flat.dtype == object:
            texts = flat.ravel().tolist()
            arrays["bytes"] = np.array([len(t) for t in texts], np.int64).reshape(flat.shape)
            flat = np.frombuffer(b"".join(texts), np.uint8)
        for suffix, array in {"": flat, **arrays}.items():
            np.save(os.path.join(path, _npy(name, suffix)), array, allow_pickle=False)


def _npy(name: str, suffix: str = "") -> str:
    return f"{quote(name, safe='')}{suffix and '.'}{suffix}.npy"


def _read_npy(path: str, name: str, kind: Sequence[Any]) -> Column:
    def load(suffix: str = "") -> np.ndarray:
        array: np.ndarray = np.load(os.path.join(path, _npy(name, suffix)), allow_pickle=False)
        return array

    dtype, _, ragged = kind
    flat = load()
    if dtype == _STRING:
        lengths, data = load("bytes"), flat.tobytes()
        ends = np.cumsum(lengths)
        texts = [data[e - n : e] for e, n in zip(ends, lengths.ravel(), strict=True)]
        flat = np.empty([len(texts)], object)
        flat[:] = texts
        flat = flat.reshape(lengths.shape)
    return Column(flat, [load(f"lengths{level}") for level in range(ragged)])


def _write_parquet(path: str, columns: Mapping[str, Column]) -> None:
    import pyarrow
    import pyarrow.parquet

    def array_of(column: Column) -> Any:
        flat = column.flat
        values = pyarrow.array(flat.ravel(), pyarrow.binary() if flat.dtype == object else None)
        for size in reversed(flat.shape[1:]):
            values = pyarrow.FixedSizeListArray.from_arrays(values, size)
        for lengths in reversed(column.lengths):
            offsets = pyarrow.array(np.cumsum([0, *lengths]))
            values = pyarrow.LargeListArray.from_arrays(offsets, values)
        return values

    arrays = {name: array_of(column) for name, column in columns.items()}
    pyarrow.parquet.write_table(pyarrow.table(arrays), path)


def _write_tfrecord(path: str, columns: Mapping[str, Column]) -> None:
    """Writes an Example for each row; a row of a ragged column has any number of values."""
    values = {name: _values_of_rows(name, column) for name, column in columns.items()}
    with tf.io.TFRecordWriter(path) as writer:
        for row in range(columns[ROW].rows):
            features = {name: feature_of(row) for name, feature_of in values.items()}
            example = tf.train.Example(features=tf.train.Features(feature=features))
            writer.write(example.SerializeToString())


def _values_of_rows(name: str, column: Column) -> Callable[[int], Any]:
    """A function (row) -> tf.train.Feature of its values."""
    flat, (dtype, _, ragged) = column.flat, column.kind
    if dtype in ("float64", "uint64", "complex64", "complex128") or ragged > 1:
        what = f"has {ragged} ragged dimensions" if ragged > 1 else f"is {dtype}"
        raise UsageError(
            f"the output {name!r} {what}, which a tf.train.Example does not hold: pass "
            'format="npy" or "parquet".'
        )
    if dtype == _STRING:
        make = lambda row: tf.train.Feature(bytes_list=tf.train.BytesList(value=row))  # noqa: E731
    elif flat.dtype.kind == "f":
        make = lambda row: tf.train.Feature(float_list=tf.train.FloatList(value=row))  # noqa: E731
    else:
        make = lambda row: tf.train.Feature(int64_list=tf.train.Int64List(value=row))  # noqa: E731
    flat = flat.astype(np.int64) if dtype == "bool" else flat
    if not ragged:
        return lambda row: make(flat[row : row + 1].ravel().tolist())
    ends = np.cumsum([0, *column.lengths[0]])
    return lambda row: make(flat[ends[row] : ends[row + 1]].ravel().tolist())


_FORMATS: Mapping[str, tuple[str, Callable[[str, Mapping[str, Column]], None]]] = {
    "npy": ("", _write_npy),
    "parquet": (".parquet", _write_parquet),
    "tfrecord": (".tfrecord", _write_tfrecord),
}
"""Format -> (ending of the name of a part, function that writes it)."""


def check_format(format: str) -> None:
    """Raises UsageError if parts cannot be written in this format."""
    if format not in _FORMATS:
        raise UsageError(f"unknown format {format!r}: expected {', '.join(map(repr, _FORMATS))}.")
    if format == "parquet" and importlib.util.find_spec("pyarrow") is None:
        raise UsageError('format="parquet" needs pyarrow: pip install "tfmw[parquet]".')


def write_part(directory: str, name: str, format: str, columns: Mapping[str, Column]) -> str:
    """Writes a part as a whole; returns its file name."""
    ending, write = _FORMATS[format]
    path = os.path.join(directory, name + ending)
    with directories.atomic_directory(path) as temporary:
        write(temporary, columns)
    return name + ending


# ---- index -------------------------------------------------------------------------------------


def read_index(directory: str) -> dict[str, Any] | None:
    """The index of a directory, or None."""
    path = os.path.join(directory, INDEX)
    if not os.path.exists(path):
        return None
    with open(path, encoding="utf-8") as file:
        index: dict[str, Any] = json.load(file)
    return index


def write_index(directory: str, index: Mapping[str, Any]) -> None:
    """Replaces the index of a directory."""
    with (
        directories.atomic_directory(os.path.join(directory, INDEX)) as temporary,
        open(temporary, "w", encoding="utf-8") as file,
    ):
        json.dump(index, file)


def read_predictions(directory: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """Reads the predictions that `tfmw.predict(..., output_dir=...)` has written.

    Args:
        directory: the `output_dir`, of format "npy".

    Yields:
        For some consecutive rows of the dataset, in its order, {name: array [rows, ...]}, or a
        `tf.RaggedTensor`. Strings are bytes objects. "row" has the numbers of the rows, and
        "predictions" the output of a model that has one without a name.

    Raises:
        UsageError: there are no predictions, or they are not complete or of another format.
    """
    directory = os.path.abspath(disk.without_scheme(os.fspath(directory)))
    index = read_index(directory)
    if index is None or not index["complete"]:
        found = "has no index" if index is None else f"is not complete: it has {index['rows']} rows"
        raise UsageError(
            f"{directory!r} {found}. Expected the output_dir of a tfmw.predict that has ended; run "
            "the same script again, and it continues."
        )
    if index["format"] != "npy":
        raise UsageError(
            f'{directory!r} has format {index["format"]!r}, and this function reads "npy": read '
            'it with another library, and sort by the column "row".'
        )
    groups: dict[int, list[str]] = {}
    for part in index["parts"]:
        groups.setdefault(part["group"], []).append(os.path.join(directory, part["name"]))
    for paths in groups.values():
        order = np.argsort(np.concatenate([_read_npy(p, ROW, ["", [], 0]).flat for p in paths]))
        yield {
            name: _in_order([_read_npy(path, name, kind) for path in paths], order)
            for name, kind in index["columns"].items()
        }


def _in_order(parts: list[Column], order: np.ndarray) -> Any:
    flat = np.concatenate([part.flat for part in parts])
    if not parts[0].lengths:
        return flat[order]
    lengths = [np.concatenate(level) for level in zip(*(p.lengths for p in parts), strict=True)]
    return tf.gather(tf.RaggedTensor.from_nested_row_lengths(flat, lengths), order)
