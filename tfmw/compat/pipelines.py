"""tf.data pipelines, parsed once: the kinds, arguments and inputs of their datasets.

pipeline = Pipeline.of(dataset)
pipeline.kind, pipeline.size, pipeline.input.kind       # "batch", 64, "map"
pipeline.length                                         # elements; INFINITE; None if unknown
dataset = pipeline.on(shuffle.on(source, seeds=[7, 1])) # built again over another source
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.data.experimental.ops import prefetching_ops, shuffle_ops
from tensorflow.python.data.ops import dataset_ops, from_tensor_slices_op, from_tensors_op

from tfmw.compat import datasets
from tfmw.compat.file_readers import file_reader
from tfmw.compat.graph import inputs_first

INFINITE = -1
"""The length of an infinite pipeline."""

# sources that repeat for ever have a length of 2**63, or of its quotient by a batch size
ENDLESS = 1 << 48

SAME = ("prefetch", "options")
"""Kinds with the elements of their input, in the same order."""

SELECTIONS = ("shuffle", "repeat", "take", "skip")

MOVES = (*SELECTIONS, *SAME)
"""Kinds that do not read the content of elements."""

REBUILDABLE = ("batch", "map", *MOVES)

# Sources and transformations without a dataset inside a function, and without random numbers;
# others by the names of their classes.
_PLAIN = (*REBUILDABLE, "cache", "concatenate", "padded_batch", "range", "shard", "zip")
_ALSO_PLAIN = {
    "_TensorSliceDataset",
    "_TensorDataset",
    "_FilterDataset",
    "_CacheDataset",
    "_TakeWhileDataset",
    "_UnbatchDataset",
    "_WindowDataset",
    "_RaggedTensorDataset",
}


class Pipeline:
    """A dataset of tf.data and the datasets that it transforms.

    Attributes:
        dataset: the last dataset, which yields the elements of the pipeline.
        inputs: the pipelines that it transforms.
        kind: its transformation, such as "batch"; the name of its class if tfmw has no name for it.
        reader: the files that it reads; None if it does not concatenate the records of files.
        is_plain: whether it has no random numbers except a shuffle's, and no functions except those
            of maps and of a `FileReader`.
        may_reorder: whether the graph of the pipeline must be read: it may shuffle, have an order
            of its own on each machine, or write a file.
    """

    def __init__(self, dataset: tf.data.Dataset, inputs: list[Pipeline]):
        self.dataset, self.inputs = dataset, inputs
        self.kind = datasets.kind_of(dataset)
        plain = self.kind in _PLAIN or self.kind in _ALSO_PLAIN
        self.reader = None if plain else file_reader(dataset)
        self.is_plain = plain or self.reader is not None
        self.may_reorder: bool = (
            self.kind == "shuffle"
            or not self.is_plain
            or getattr(dataset, "_deterministic", None) == "false"  # a parallel map or batch
            or (self.kind == "cache" and not self.is_memory_cache)
            or (self.reader is not None and not self.reader.has_one_order)
            or any(each.may_reorder for each in inputs)
        )

    @classmethod
    def of(cls, dataset: tf.data.Dataset) -> Pipeline:
        """Parses a dataset: the only walk over it. Parts that are used twice are one object."""
        inputs: dict[tf.data.Dataset, list[tf.data.Dataset]] = {}

        def inputs_of(node: tf.data.Dataset) -> list[tf.data.Dataset]:
            # A `TextLineDataset` reads names of files from a dataset, but does not list it as an
            # input.
            inputs[node] = [_in_parts(each) for each in getattr(node, "_impl", node)._inputs()]
            return inputs[node]

        parsed: dict[tf.data.Dataset, Pipeline] = {}
        for node in inputs_first([_in_parts(dataset)], inputs_of):
            parsed[node] = cls(node, [parsed[each] for each in inputs[node]])
        return parsed[node]

    @property
    def input(self) -> Pipeline:
        """The only pipeline that this one transforms."""
        (below,) = self.inputs
        return below

    @functools.cached_property
    def nodes(self) -> list[Pipeline]:
        """All pipelines: each before its inputs, in their order."""
        found, todo = [], [self]
        while todo:
            found.append(todo.pop())
            todo.extend(reversed(found[-1].inputs))
        return found

    def beneath(self, kinds: Sequence[str]) -> Pipeline:
        """The first pipeline, from the end, that is none of these kinds."""
        node = self
        while node.kind in kinds:
            node = node.input
        return node

    # ------------------------------------------------------------ arguments

    @property
    def size(self) -> int:
        """The batch size of a `batch` or `padded_batch`."""
        return int(tf.get_static_value(self.dataset._batch_size))

    @property
    def drop_remainder(self) -> bool:
        """Whether a `batch` or `padded_batch` drops a smaller last batch."""
        return bool(tf.get_static_value(self.dataset._drop_remainder))

    @property
    def count(self) -> int:
        """The argument of a `take`, `skip` or `repeat`; -1 for all elements."""
        count = self.dataset._count
        return -1 if count is None else int(tf.get_static_value(count))

    @property
    def buffer_size(self) -> int:
        """The buffer size of a `shuffle`."""
        return int(tf.get_static_value(self.dataset._buffer_size))

    @property
    def seeds(self) -> list[int] | None:
        """The two seeds of a `shuffle`; 0 and 0 if it has none; None if they are not constants."""
        seeds = [tf.get_static_value(s) for s in (self.dataset._seed, self.dataset._seed2)]
        return None if any(s is None for s in seeds) else [int(s) for s in seeds]

    @property
    def reshuffles(self) -> bool:
        """Whether this is a `shuffle` that has a new order in each pass."""
        return self.kind == "shuffle" and self.dataset._reshuffle_each_iteration is not False

    @property
    def shards(self) -> tuple[int, int]:
        """(number of shards, index) of a `shard`."""
        return int(tf.get_static_value(self.dataset._num_shards)), int(
            tf.get_static_value(self.dataset._index)
        )

    @property
    def range(self) -> tuple[int, int, int, tf.DType]:
        """(start, stop, step, type) of a `range`."""
        ends = self.dataset._start, self.dataset._stop, self.dataset._step
        return *(int(tf.get_static_value(t)) for t in ends), self.dataset.element_spec.dtype

    @property
    def sliced_tensors(self) -> list[tf.Tensor] | None:
        """The dense tensors [n, ...] of `from_tensor_slices`; None for any other dataset."""
        if type(self.dataset) is not from_tensor_slices_op._TensorSliceDataset:
            return None
        specs = tf.nest.flatten(self.dataset.element_spec)
        dense = all(type(spec) is tf.TensorSpec for spec in specs)
        return _eager(self.dataset._tensors) if dense else None

    @property
    def repeated_tensors(self) -> list[tf.Tensor] | None:
        """The dense tensors of `from_tensors(...).repeat()`; None for any other dataset."""
        if self.kind != "repeat" or self.count >= 0:
            return None
        source = self.dataset._input_dataset
        known = type(source) is from_tensors_op._TensorDataset
        return _eager(source._tensors) if known else None

    @property
    def is_memory_cache(self) -> bool:
        """Whether this is a `cache` of elements in memory rather than in a file."""
        return self.kind == "cache" and tf.get_static_value(self.dataset._filename) == b""

    @functools.cached_property
    def is_pure(self) -> bool:
        """Whether results are independent of earlier elements; see `datasets.is_pure`."""
        return datasets.is_pure(self.dataset)

    @property
    def is_parallel(self) -> bool:
        """Whether a `map` runs in several threads."""
        return getattr(self.dataset, "_num_parallel_calls", None) is not None

    # ------------------------------------------------------------ facts on the whole pipeline

    @functools.cached_property
    def length(self) -> int | None:
        """Number of elements; INFINITE for endless pipelines; None if unknown."""
        cardinality = int(self.dataset.cardinality())
        if cardinality == tf.data.INFINITE_CARDINALITY or cardinality > ENDLESS:
            return None if self._ends_with_choices() else INFINITE
        return None if cardinality < 0 else cardinality

    def _ends_with_choices(self) -> bool:
        """Whether a pipeline that tf.data calls infinite ends with its choices of datasets."""
        node = self
        while not (node.kind == "repeat" and node.count < 0):
            if node.kind == "choose":
                return node.inputs[0].length != INFINITE
            if len(node.inputs) != 1:
                return False
            node = node.input
        return False

    @functools.cached_property
    def spec(self) -> Any:
        """Structure of tf.TypeSpec for an element of the model; None for absent inputs."""
        return tf.nest.map_structure(
            lambda spec: None if isinstance(spec, datasets.NoneTensorSpec) else spec,
            self.dataset.element_spec,
        )

    @property
    def static_rows(self) -> int | None:
        """The leading dimension of an element's first tensor, if its spec has one."""
        first = next(spec for spec in tf.nest.flatten(self.spec) if spec is not None)
        size: int | None = first.shape[0]
        return size

    @property
    def batch_size(self) -> int | None:
        """Size of all batches but the last, if the pipeline has a constant one."""
        node = self.beneath(MOVES)
        return node.size if node.kind == "batch" else self.static_rows

    @property
    def is_tunable(self) -> bool:
        """Whether tf.data can tune the pipeline while it runs, such as by more threads for maps."""
        return any(n.kind == "map" or not n.is_plain or n.reader is not None for n in self.nodes)

    @property
    def reads_a_service(self) -> bool:
        """Whether elements come from the tf.data service."""
        return any(node.kind.startswith("_DataServiceDataset") for node in self.nodes)

    @property
    def may_begin_again(self) -> bool:
        """Whether the pipeline may restart a shuffle, or start it after its first element.

        The order then depends on how far a pipeline has read ahead.
        """
        todo = [(self, False)]
        while todo:
            node, again = todo.pop()
            again |= node.kind in ("repeat", "concatenate") or not node.is_plain
            if again and node.kind == "shuffle":
                return True
            again &= node.kind != "cache"  # a cache reads its input once
            if not node.inputs and not node.is_plain:
                return True  # only its graph shows its content
            todo.extend((each, again) for each in node.inputs)
        return False

    @property
    def random_selection(self) -> str | None:
        """The transformation that selects elements at random in each process, or None.

        Random values of a `map` are no selection. Functions inside of a `flat_map` are not read.
        """
        for node in self.nodes:
            for wrapper in () if node.kind == "map" else node.dataset._functions():
                bodies = datasets.function_bodies(wrapper)
                name = type(node.dataset).__name__
                if "FlatMap" in name or "Interleave" in name:
                    del bodies[1:]
                for op in itertools.chain(*bodies):
                    if "seed2" in op.attr and not (op.attr["seed"].i or op.attr["seed2"].i):
                        return name.strip("_").removesuffix("Dataset")
        return None

    @property
    def may_be_read_twice(self) -> bool:
        """Whether another pass has no effect: no Python functions, variables, random numbers."""
        for node in self.nodes:
            is_known = node.inputs or isinstance(node.dataset, dataset_ops.DatasetSource)
            if node.kind == "shuffle" or not is_known:
                return False
        changing = ("PyFunc", "Shuffle", "Random", "Assign", "Generator", "Cache", "Multinomial")
        bodies = (body for _, bodies, _ in self.functions() for body in bodies)
        return not any(part in op.op for body in bodies for op in body for part in changing)

    @property
    def bytes_of_arrays(self) -> int:
        """Bytes of the arrays of the pipeline that its graph contains."""
        tensors = [tensor for _, _, tensor in self.constants()]
        for node in self.nodes:
            for wrapper in node.dataset._functions():
                tensors += wrapper.function.captured_inputs
        known = (t for t in tensors if _is_data(t) and hasattr(t, "numpy"))
        return sum(t.shape.num_elements() * t.dtype.size for t in known)

    def constants(self) -> Iterator[tuple[str, str, Any]]:
        """Yields (transformation, argument, eager tensor) for the constants of all nodes.

        Excludes seeds and buffer sizes, which do not determine elements, and the files of caches.
        """
        for node in self.nodes:
            name = type(node.dataset).__name__.strip("_").removesuffix("V2")
            name = name.removesuffix("Dataset")
            for argument, value in vars(node.dataset).items():
                if argument in _NOT_DATA or name in ("Cache", "Snapshot", "Save"):
                    continue
                for leaf in value if isinstance(value, list) else [value]:
                    if isinstance(leaf, tf.Tensor) and _is_data(leaf):
                        yield name, argument.strip("_"), leaf

    def functions(self) -> Iterator[tuple[bool, list[Any], list[Any]]]:
        """Yields (is a filter's, NodeDefs, captured eager tensors) for every function."""
        for node in self.nodes:
            for wrapper in node.dataset._functions():
                captured = wrapper.function.captured_inputs
                data = [t for t in captured if _is_data(t) and hasattr(t, "numpy")]
                filters = "Filter" in type(node.dataset).__name__
                yield filters, datasets.function_bodies(wrapper), data

    # ------------------------------------------------------------ other pipelines

    def on(self, source: tf.data.Dataset, seeds: list[int] | None = None) -> tf.data.Dataset:
        """Applies the transformation to another `source`, in a deterministic order.

        Args:
            source: the dataset that replaces `input`.
            seeds: pair of seeds of a shuffle; by default its own.
        """
        node = self.dataset
        parallel: dict[str, Any] = {}
        if (calls := getattr(node, "_num_parallel_calls", None)) is not None:
            calls = int(tf.get_static_value(calls))
            parallel = {"num_parallel_calls": calls, "deterministic": True}
        match self.kind:
            case "map":
                return source.map(node._map_func._func, **parallel)
            case "batch":
                return source.batch(node._batch_size, node._drop_remainder, **parallel)
            case "padded_batch":
                padding = node._padded_shapes, node._padding_values
                return source.padded_batch(node._batch_size, *padding, node._drop_remainder)
            case "shuffle":
                return self._shuffled(source, seeds)
            case "repeat" | "take" | "skip":
                return getattr(source, self.kind)(node._count)
            case "prefetch":
                return source.prefetch(int(tf.get_static_value(node._buffer_size)))
            case "options":
                return source.with_options(node.options())
        raise TypeError(f"cannot rebuild {type(node).__name__}")

    def _shuffled(self, source: tf.data.Dataset, seeds: list[int] | None) -> tf.data.Dataset:
        node = self.dataset
        pair = (node._seed, node._seed2) if seeds is None else seeds
        small = datasets.small_shuffle(pair) if self.reshuffles else None
        shuffle = datasets.shuffled(
            *(source, node._buffer_size, pair, node._reshuffle_each_iteration),
            generator=None if small is None else datasets.generator_of(small),
        )
        shuffle._tfmw_original, shuffle._tfmw_small = self.original, small
        return shuffle

    @property
    def original(self) -> tf.data.Dataset:
        """The user's shuffle behind one that `on` has built."""
        return getattr(self.dataset, "_tfmw_original", self.dataset)

    def zipped(self, parts: Sequence[Any]) -> Any:
        """Datasets, or elements, in the structure of a `zip`."""
        return tf.nest.pack_sequence_as(self.dataset._datasets, parts)

    def mapped(self, element: Any) -> Any:
        """The result of a `map` for an element of dense tensors, within another function."""
        results = self.dataset._map_func.function(*tf.nest.flatten(element))
        return tf.nest.pack_sequence_as(self.dataset.element_spec, tf.nest.flatten(results))


_NOT_DATA = {
    "_variant_tensor_attr",
    "_seed",
    "_seed2",
    "_buffer_size",
    "_num_parallel_calls",
    "_num_parallel_reads",
    "_cycle_length",
    "_block_length",
}


def _is_data(tensor: tf.Tensor) -> bool:
    return tensor.dtype not in (tf.variant, tf.resource)


def _eager(tensors: list[tf.Tensor]) -> list[tf.Tensor] | None:
    return list(tensors) if all(hasattr(tensor, "numpy") for tensor in tensors) else None


def _in_parts(node: tf.data.Dataset) -> tf.data.Dataset:
    """Splits a `shuffle_and_repeat` into `shuffle` and `repeat`; returns other nodes unchanged.

    Outside of its iterators nothing records the position of a `shuffle_and_repeat` in its orders.
    """
    if not isinstance(node, shuffle_ops._ShuffleAndRepeatDataset):
        return node
    if not hasattr(node, "_tfmw_parts"):
        shuffle = datasets.shuffled(
            *(node._input_dataset, node._buffer_size, (node._seed, node._seed2)),
            reshuffle_each_iteration=True,
        )
        node._tfmw_parts = shuffle.repeat(node._count)
    parts: tf.data.Dataset = node._tfmw_parts
    return parts


def without_devices(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """A pipeline whose elements stay on the CPU, without its final copy to another device."""
    node = Pipeline.of(dataset).beneath(SAME).dataset
    copies = isinstance(node, prefetching_ops._CopyToDeviceDataset)
    return without_devices(node._input_dataset) if copies else dataset
