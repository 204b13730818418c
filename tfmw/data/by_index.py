"""Sources with an index: rows of Python sources, pipelines by indices of examples, zips of them.

`shuffle`, `repeat`, `take`, `skip` and a cache in memory do not look at elements. So their order is
that of a pipeline of indices, and only a worker's own examples are ever copied or read, a batch of
them at once.

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

from tfmw.compat import datasets, rebuilding
from tfmw.data.batches import ENDLESS, input_of, steps_in, without_autograph
from tfmw.data.values import INFINITE
from tfmw.errors import UsageError


@dataclasses.dataclass(frozen=True)
class Rows:
    """A source that gives the rows of many indices."""

    read: Callable[[Sequence[int]], Any]  # -> structure of arrays [number of indices, ...]
    spec: Any  # structure of tf.TensorSpec, of one row
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
    rows = Rows(read, _spec([read([i]) for i in sorted(some)]), in_threads)

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
        first = arrays[0].dtype
        return tf.TensorSpec(sizes, tf.string if first.kind in "OSU" else tf.as_dtype(first))

    try:
        return tf.nest.map_structure(leaf, *batches)
    except (TypeError, ValueError) as error:
        raise UsageError(f"rows of a source have different structures: {error}") from error


@dataclasses.dataclass(frozen=True)
class Indexed:
    """A pipeline of single examples over arrays, or over `Rows`."""

    indices: tf.data.Dataset  # int64 [] of each example, in the pipeline's order
    source: tf.data.Dataset  # the examples in the order of their index

    @classmethod
    def of(cls, dataset: tf.data.Dataset) -> Indexed | None:
        """None where the pipeline does anything else, or has sparse or ragged examples."""
        node, passed = peeled(
            dataset, lambda n: isinstance(n, rebuilding.MOVES) or datasets.is_memory_cache(n)
        )
        # A cache of arrays, which are in memory, changes nothing.
        chain = [each for each in passed if not datasets.is_memory_cache(each)]
        cached = itertools.dropwhile(lambda n: not datasets.is_memory_cache(n), passed)
        if any(isinstance(each, datasets.Shuffle) for each in cached):
            return None  # every pass has the order of the first one
        if rows_under(node) is not None:
            if len(chain) < len(passed):
                return None  # reading again is what the cache saves
        elif datasets.sliced_tensors(node) is None:
            return None
        indices = tf.data.Dataset.range(int(node.cardinality()))
        for move in reversed(chain):
            indices = rebuilding.rebuilt(move, indices)
        return cls(indices, node)

    @property
    def rows(self) -> Rows | None:
        """The source's rows; None of arrays."""
        return rows_under(self.source)

    def examples(self, indices: tf.Tensor) -> Any:
        """int64 [k] -> the batch of these examples: structure of tensors [k, ...]."""
        rows = self.rows
        return element_at(self.source, indices) if rows is None else rows.examples(indices)


def peeled(
    node: tf.data.Dataset, passes: Callable[[tf.data.Dataset], bool]
) -> tuple[tf.data.Dataset, list[tf.data.Dataset]]:
    """A pipeline without the nodes at its end that `passes`, and without zips that can be `joined`.

    Returns:
        (the remaining pipeline, the removed nodes, the last one first).
    """
    removed = []
    while passes(node := joined(node) or node):
        removed.append(node)
        node = input_of(node)
    return node, removed


def joined(node: tf.data.Dataset) -> tf.data.Dataset | None:
    """A zip with its maps above it; None for others, and if that changes nothing."""
    if not isinstance(node, datasets.Zip):
        return None
    nodes, inputs = [node], []  # of each node the numbers of its inputs
    for each in nodes:
        below: list[tf.data.Dataset] = []
        if isinstance(each, datasets.Zip):
            below = datasets.dataset_inputs(each)
        elif isinstance(each, (*datasets.Map, *datasets.Same)) and datasets.is_pure(each):
            below = [input_of(each)]
        inputs.append(range(len(nodes), len(nodes) + len(below)))
        nodes.extend(below)
    specs = [spec for each in nodes for spec in tf.nest.flatten(each.element_spec)]
    if not all(type(spec) is tf.TensorSpec for spec in specs):
        return None
    leaves, todo = [], [0]
    while todo:  # in the order of the element's components
        number = todo.pop()
        todo += reversed(inputs[number])
        leaves += [] if inputs[number] else [number]
    maps = [
        nodes[k] for k, below in enumerate(inputs) if below and isinstance(nodes[k], datasets.Map)
    ]

    def element(elements: dict[int, Any]) -> Any:
        """The zip's, of those of the leaves."""
        values = dict(elements)
        for number in reversed(range(len(nodes))):
            each, below = nodes[number], [values[i] for i in inputs[number]]
            if isinstance(each, datasets.Zip):
                values[number] = datasets.as_zipped(each, below)
            elif below:
                (values[number],) = below
                if isinstance(each, datasets.Map):
                    values[number] = datasets.mapped(each, below[0])
        return values[0]

    slices = [datasets.sliced_tensors(nodes[number]) for number in leaves]
    length = steps_in(node)
    by_index = length not in (None, INFINITE) and all(has_index(nodes[k]) for k in leaves)
    if by_index and not maps and None not in slices:
        tensors = [tensor[:length] for of_leaf in slices for tensor in of_leaf or ()]
        structure = tf.nest.pack_sequence_as(node.element_spec, tensors)
        return tf.data.Dataset.from_tensor_slices(structure)
    if not by_index and not maps:
        return None

    def function(*parts: Any) -> Any:
        if by_index:
            return element({number: element_at(nodes[number], parts[0]) for number in leaves})
        return element(dict(zip(leaves, parts, strict=True)))

    source: tf.data.Dataset = tf.data.Dataset.zip(tuple(nodes[number] for number in leaves))
    source = tf.data.Dataset.range(length) if by_index else source
    parallel = any(getattr(each, "_num_parallel_calls", None) is not None for each in maps)
    calls: dict[str, Any] = {"num_parallel_calls": tf.data.AUTOTUNE, "deterministic": True}
    return source.map(without_autograph(function), **(calls if parallel else {}))


def has_index(leaf: tf.data.Dataset) -> bool:
    """Whether `element_at` has the elements of a source."""
    known = datasets.sliced_tensors(leaf), datasets.repeated_tensors(leaf)
    return isinstance(leaf, datasets.Range) or any(tensors is not None for tensors in known)


def element_at(leaf: tf.data.Dataset, index: tf.Tensor) -> Any:
    """The element of a source at an index, int64 []; of arrays also those at indices [k]."""
    if isinstance(leaf, datasets.Range):
        start, _, step, kind = datasets.range_arguments(leaf)
        return tf.cast(start + index * step, kind)
    tensors = datasets.repeated_tensors(leaf)
    if tensors is None:
        tensors = [tf.gather(tensor, index) for tensor in datasets.sliced_tensors(leaf) or ()]
    return tf.nest.pack_sequence_as(leaf.element_spec, tensors)
