"""Sources with an index: rows of Python sources, pipelines by indices of examples, zips of them.

`shuffle`, `repeat`, `take`, `skip` and a cache in memory do not read the content of elements. So
their order is that of a pipeline of indices. A worker copies or reads only its own examples, a
batch of them at once.

`zip` and `map` do not move elements. So a pipeline of them over arrays is a function of an index:
workers select indices in place of elements, and a shuffle above is a shuffle of indices. Over other
sources it is a zip of the sources, below all maps.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfmw.compat.pipelines import ENDLESS, INFINITE, MOVES, SAME, Pipeline
from tfmw.data.batches import IN_PARALLEL, without_autograph
from tfmw.errors import UsageError


@dataclasses.dataclass(frozen=True)
class Rows:
    """A source that returns the rows of many indices at once."""

    read: Callable[[Sequence[int]], Any]  # indices -> structure of arrays [number of indices, ...]
    spec: Any  # structure of tf.TensorSpec for one row
    in_threads: bool = False  # whether several threads may call `read`

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
        """Options of `map` for a function that reads rows."""
        calls = tf.data.AUTOTUNE if self.in_threads else None
        return {"num_parallel_calls": calls, "deterministic": True if self.in_threads else None}


def from_index(source: Any, *, in_threads: bool = False) -> tf.data.Dataset:
    """Creates a dataset of the rows of a source with an index.

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
    return dataset_of(_reader(source, first), length, in_threads)


def dataset_of(
    read: Callable[[Sequence[int]], Any], length: int, in_threads: bool = False
) -> tf.data.Dataset:
    """Creates a dataset of rows that are read together; see `Rows` and `from_index`."""
    if not length:
        raise UsageError("a source has no rows: expected at least one.")
    some = {0, length // 2, length - 1} if length < ENDLESS else {0, 1}
    rows = Rows(read, _spec([read([i]) for i in sorted(some)]), in_threads)

    def row(index: tf.Tensor) -> Any:
        return tf.nest.map_structure(lambda t: t[0], rows.examples(index[None]))

    # limits a source that repeats for ever, so that sums of lengths do not overflow
    length = min(length, 1 << 60)
    dataset = tf.data.Dataset.range(length).map(without_autograph(row), **rows.parallel)
    dataset._tfmw_rows = rows
    return dataset


def rows_under(pipeline: Pipeline) -> Rows | None:
    """The rows that a result of `from_index` reads; None for other pipelines."""
    rows: Rows | None = getattr(pipeline.dataset, "_tfmw_rows", None)
    return rows


def _reader(source: Any, first: Any) -> Callable[[Sequence[int]], Any]:
    if isinstance(first, dict) and hasattr(source, "with_format"):  # a dataset of Hugging Face
        return _reader_of_hugging_face(source, first)
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
    """The spec of one row, from batches of one row; dimensions in which they differ are None."""

    def leaf(*values: Any) -> tf.TensorSpec:
        arrays = [_array(value) for value in values]
        shapes = {a.shape[1:] for a in arrays}
        if len({len(s) for s in shapes}) > 1:
            raise UsageError(f"rows of a source have different ranks: their shapes are {shapes}.")
        sizes = [d[0] if len(set(d)) == 1 else None for d in zip(*shapes, strict=True)]
        first = arrays[0].dtype
        return tf.TensorSpec(sizes, tf.string if first.kind in "OSU" else tf.as_dtype(first))

    try:
        return tf.nest.map_structure(leaf, *batches)
    except (TypeError, ValueError) as error:
        raise UsageError(f"rows of a source have different structures: {error}") from error


@dataclasses.dataclass(frozen=True)
class Indexed:
    """A pipeline of single examples over arrays, or over `Rows`."""

    indices: Pipeline  # int64 [] of each example, in the pipeline's order
    source: Pipeline  # the examples in the order of their index

    @classmethod
    def of(cls, pipeline: Pipeline) -> Indexed | None:
        """Separates indices from examples; None for pipelines that do anything else."""
        node, passed = peeled(pipeline, lambda n: n.kind in MOVES or n.is_memory_cache)
        # A cache of arrays, which are in memory, has no effect.
        chain = [each for each in passed if not each.is_memory_cache]
        cached = itertools.dropwhile(lambda n: not n.is_memory_cache, passed)
        if any(each.kind == "shuffle" for each in cached):
            return None  # every pass has the order of the first one
        if rows_under(node) is not None:
            if len(chain) < len(passed):
                return None  # the cache is there to avoid reading again
        elif node.sliced_tensors is None:
            return None
        indices = tf.data.Dataset.range(int(node.dataset.cardinality()))
        for move in reversed(chain):
            indices = move.on(indices)
        return cls(Pipeline.of(indices), node)

    @property
    def rows(self) -> Rows | None:
        """The source's rows; None for arrays."""
        return rows_under(self.source)

    def examples(self, indices: tf.Tensor) -> Any:
        """int64 [k] -> the batch of these examples: structure of tensors [k, ...]."""
        rows = self.rows
        return element_at(self.source, indices) if rows is None else rows.examples(indices)


def peeled(node: Pipeline, passes: Callable[[Pipeline], bool]) -> tuple[Pipeline, list[Pipeline]]:
    """Splits off the nodes at the end of a pipeline that `passes`, and `joined` zips.

    Returns:
        (the remaining pipeline, the removed nodes, the last one first).
    """
    removed = []
    while passes(node := joined(node) or node):
        removed.append(node)
        node = node.input
    return node, removed


def joined(pipeline: Pipeline) -> Pipeline | None:
    """A zip with its maps above it; None for others, and if that changes nothing."""
    if pipeline.kind != "zip":
        return None
    walked, todo = [], [pipeline]  # in the order of the element's components
    while todo:
        node = todo.pop()
        inner = node.kind == "zip" or (node.kind in ("map", *SAME) and node.is_pure)
        walked.append((node, inner))
        todo += reversed(node.inputs if inner else [])
    specs = [spec for node, _ in walked for spec in tf.nest.flatten(node.dataset.element_spec)]
    if not all(type(spec) is tf.TensorSpec for spec in specs):
        return None
    maps = [node for node, inner in walked if inner and node.kind == "map"]
    leaves = [node for node, inner in walked if not inner]

    def element(elements: Sequence[Any]) -> Any:
        """The zip's element, from those of the leaves."""
        left, values = list(elements), []
        for node, inner in reversed(walked):
            if not inner:
                values.append(left.pop())
            elif node.kind == "zip":
                values.append(node.zipped([values.pop() for _ in node.inputs]))
            elif node.kind == "map":
                values.append(node.mapped(values.pop()))
        return values[0]

    slices = [leaf.sliced_tensors for leaf in leaves]
    length = pipeline.length
    by_index = length not in (None, INFINITE) and all(map(has_index, leaves))
    if by_index and not maps and None not in slices:
        tensors = [tensor[:length] for of_leaf in slices for tensor in of_leaf or ()]
        structure = tf.nest.pack_sequence_as(pipeline.dataset.element_spec, tensors)
        return Pipeline.of(tf.data.Dataset.from_tensor_slices(structure))
    if not by_index and not maps:
        return None

    def function(*parts: Any) -> Any:
        return element([element_at(leaf, parts[0]) for leaf in leaves] if by_index else parts)

    source = tf.data.Dataset.zip(tuple(leaf.dataset for leaf in leaves))
    source = tf.data.Dataset.range(length) if by_index else source
    parallel = IN_PARALLEL if any(each.is_parallel for each in maps) else {}
    return Pipeline.of(source.map(without_autograph(function), **parallel))


def has_index(leaf: Pipeline) -> bool:
    """Whether `element_at` supports a source."""
    known = leaf.sliced_tensors, leaf.repeated_tensors
    return leaf.kind == "range" or any(tensors is not None for tensors in known)


def element_at(leaf: Pipeline, index: tf.Tensor) -> Any:
    """The element of a source at an index, int64 []; for arrays also those at indices [k]."""
    if leaf.kind == "range":
        start, _, step, kind = leaf.range
        return tf.cast(start + index * step, kind)
    tensors = leaf.repeated_tensors
    if tensors is None:
        tensors = [tf.gather(tensor, index) for tensor in leaf.sliced_tensors or ()]
    return tf.nest.pack_sequence_as(leaf.dataset.element_spec, tensors)
