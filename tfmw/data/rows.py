"""Rows of Python sources with an index: Grain, Hugging Face datasets, parquet, any `source[i]`.

    dataset = tfmw.data.from_index(source).shuffle(10_000).batch(64)

The pipeline holds indices: tfmw shuffles, divides and seeks them, and a worker reads its own rows
only, all rows of a batch in one call.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfmw.data.batches import ENDLESS, without_autograph
from tfmw.errors import UsageError


@dataclasses.dataclass(frozen=True)
class Rows:
    """A source that gives the rows of many indices.

    Attributes:
        read: indices -> structure of arrays [number of indices, ...].
        spec: structure of tf.TensorSpec, of one row.
        in_threads: whether several threads may call `read`.
    """

    read: Callable[[Sequence[int]], Any]
    spec: Any
    in_threads: bool = False

    def examples(self, indices: tf.Tensor) -> Any:
        """int64 [k] -> the batch of these rows: structure of tensors [k, ...]."""
        specs = tf.nest.flatten(self.spec)

        def arrays(numbers: np.ndarray) -> list[np.ndarray]:
            return [_array(leaf) for leaf in tf.nest.flatten(self.read(numbers.tolist()))]

        read = tf.numpy_function(arrays, [indices], [s.dtype for s in specs])
        shaped = [
            tf.ensure_shape(t, [*indices.shape, *s.shape]) for t, s in zip(read, specs, strict=True)
        ]
        return tf.nest.pack_sequence_as(self.spec, shaped)

    @property
    def parallel(self) -> dict[str, Any]:
        """The options of `map` for a function that reads."""
        calls = tf.data.AUTOTUNE if self.in_threads else None
        return {"num_parallel_calls": calls, "deterministic": True if self.in_threads else None}


def from_index(source: Any, *, in_threads: bool = False) -> tf.data.Dataset:
    """The rows of a source with an index, one by one.

        rows = tfmw.data.from_index(datasets.load_from_disk("reviews"))
        train = rows.map(lambda row: (row["pixels"], row["label"])).shuffle(10_000).batch(64)

    Workers divide the indices: each reads its own rows only, those of a batch together. A resumed
    run reads no row again.

    Args:
        source: has `len(source)` and `source[i]`, a structure of arrays, numbers or strings, the
            same on all workers: a list, a `datasets.Dataset`, a `grain.MapDataset` of single
            examples, a `tfds.data_source`. With `source.__getitems__(indices)`, which returns a
            list, rows are read together.
        in_threads: whether several threads may read at a time.

    Raises:
        UsageError: the source has no length, no rows, or rows that are no arrays.
    """
    try:
        length = len(source)
        first = source[0] if length else None
    except (TypeError, KeyError, AttributeError) as error:
        raise UsageError(
            f"received {type(source).__name__} as a source of rows: expected an object with "
            f"len(source) and source[i], an index from 0 ({error})."
        ) from error
    if not length:
        raise UsageError(f"{type(source).__name__} has no rows: expected at least one.")
    read = _reader(source, first)
    some = {0, length // 2, length - 1} if length < ENDLESS else {0, 1}
    return dataset_of(Rows(read, _spec([read([i]) for i in sorted(some)]), in_threads), length)


def dataset_of(rows: Rows, length: int) -> tf.data.Dataset:
    """The first `length` rows, one by one."""

    def row(index: tf.Tensor) -> Any:
        return tf.nest.map_structure(lambda t: t[0], rows.examples(index[None]))

    length = min(length, 1 << 60)  # of a source that repeats for ever: sums of it are no overflow
    dataset = tf.data.Dataset.range(length).map(without_autograph(row), **rows.parallel)
    dataset._tfmw_rows = rows
    return dataset


def rows_under(dataset: tf.data.Dataset) -> Rows | None:
    """The rows that a result of `from_index` reads; None for other datasets."""
    rows: Rows | None = getattr(dataset, "_tfmw_rows", None)
    return rows


def _reader(source: Any, first: Any) -> Callable[[Sequence[int]], Any]:
    if isinstance(first, dict) and hasattr(source, "with_format"):  # of Hugging Face
        return _reader_of_hugging_face(source, first)
    if hasattr(source, "columns_at"):
        return source.columns_at
    many = getattr(source, "__getitems__", None) or (lambda indices: [source[i] for i in indices])
    return lambda indices: _stacked(many(list(indices)))


def _reader_of_hugging_face(source: Any, first: dict[str, Any]) -> Callable[[Sequence[int]], Any]:
    # As arrays of NumPy, bytes would lose zeros at their end.
    binary = [name for name in first if getattr(source.features[name], "dtype", "") in _BINARY]
    alone = source.with_format(None).select_columns(binary) if binary else None
    if (getattr(source, "format", None) or {}).get("type") is None:
        source = source.with_format("numpy")

    def read(indices: Sequence[int]) -> Any:
        rows = dict(source[list(indices)])
        if alone is not None:
            rows.update((name, stacked(many)) for name, many in alone[list(indices)].items())
        return rows

    return read


_BINARY = ("binary", "large_binary")


def _stacked(rows: Sequence[Any]) -> Any:
    """A structure of arrays [number of rows, ...]."""
    rows = [keras.tree.lists_to_tuples(row) for row in rows]
    return tf.nest.map_structure(lambda *leaves: stacked(leaves), *rows)


def stacked(leaves: Sequence[Any]) -> np.ndarray:
    """Values of one shape -> [number of values, ...]."""
    return np.stack([_array(leaf) for leaf in leaves])


def _array(leaf: Any) -> np.ndarray:
    # NumPy's own type for bytes drops zeros at their end.
    kind = object if isinstance(leaf, bytes | str) else None
    array: np.ndarray = np.asarray(leaf, kind)
    if array.dtype.kind in "OU":
        flat = [x.encode() if isinstance(x, str) else x for x in array.reshape(-1).tolist()]
        if all(isinstance(x, bytes) for x in flat):
            texts: np.ndarray = np.empty(len(flat), object)
            texts[:] = flat
            return texts.reshape(array.shape)
        raise UsageError(
            f"a row holds {type(leaf).__name__}, or values of different sizes: expected arrays, "
            "numbers and strings, the same shape in each row; pad them, or leave the value out."
        )
    return array


def _spec(batches: Sequence[Any]) -> Any:
    """Of one row, from batches of one row; dimensions in which they differ are None."""

    def leaf(*values: Any) -> tf.TensorSpec:
        arrays = [_array(value) for value in values]
        shapes = {a.shape[1:] for a in arrays}
        if len({len(s) for s in shapes}) > 1:
            raise UsageError(f"rows of a source have different ranks: their shapes are {shapes}.")
        sizes = [d[0] if len(set(d)) == 1 else None for d in zip(*shapes, strict=True)]
        return tf.TensorSpec(sizes, _dtype(arrays[0]))

    try:
        return tf.nest.map_structure(leaf, *batches)
    except (TypeError, ValueError) as error:
        raise UsageError(f"rows of a source have different structures: {error}") from error


def _dtype(array: np.ndarray) -> tf.DType:
    return tf.string if array.dtype.kind in "OSU" else tf.as_dtype(array.dtype)
