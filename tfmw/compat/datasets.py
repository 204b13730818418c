"""The inputs, functions and seeds of datasets, which are private attributes of tf.data."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.trainers.data_adapters import (
    array_data_adapter,
    array_slicing,
    get_data_adapter,
)
from keras.src.trainers.data_adapters import tf_dataset_adapter as _tf_dataset_adapter
from tensorflow.python.data.experimental.ops import (
    iterator_model_ops,
    prefetching_ops,
    shuffle_ops,
)
from tensorflow.python.data.ops import (
    batch_op,
    cache_op,
    concatenate_op,
    dataset_ops,
    directed_interleave_op,
    from_tensor_slices_op,
    from_tensors_op,
    map_op,
    padded_batch_op,
    prefetch_op,
    range_op,
    repeat_op,
    shard_op,
    shuffle_op,
    skip_op,
    take_op,
    zip_op,
)
from tensorflow.python.data.util import random_seed as data_random_seed
from tensorflow.python.eager import context as _context
from tensorflow.python.framework import config as _tf_config
from tensorflow.python.framework import none_tensor
from tensorflow.python.ops import gen_dataset_ops, gen_experimental_dataset_ops

from tfmw.compat.objects import overridden

train_validation_split = array_slicing.train_validation_split
make_class_weight_map = _tf_dataset_adapter.make_class_weight_map_fn


data_adapter = get_data_adapter
"""Keras's adapter for arrays, PyDataset and generators: `.get_tf_dataset()` and hooks."""


def batches_of_slices(adapter: Any) -> tf.data.Dataset | None:
    """The batches of an adapter of arrays that does not shuffle, as slices and `batch`.

    That is quicker to build than the adapter's own pipeline, and by its form tfmw knows that a
    batch can be divided without being made. None for adapters of anything but dense arrays.
    """
    if type(adapter) is not array_data_adapter.ArrayDataAdapter or adapter._shuffle:
        return None
    arrays = array_slicing.convert_to_sliceable(adapter._inputs, target_backend="tensorflow")
    arrays = keras.tree.lists_to_tuples(arrays)
    if not all(isinstance(a, np.ndarray | tf.Tensor) for a in tf.nest.flatten(arrays)):
        return None
    return tf.data.Dataset.from_tensor_slices(arrays).batch(adapter._batch_size)


def signature_of(adapter: Any) -> Any:
    """Structure of tf.TypeSpec, of a batch of Grain's, once `get_tf_dataset` has been called."""
    return adapter._output_tf_signature


def has_own_readers(adapter: Any) -> bool:
    """Whether threads or processes of Keras's read ahead for an adapter, while an epoch lasts."""
    return getattr(adapter, "enqueuer", None) is not None


def is_dataset(x: Any) -> bool:
    """Whether `x` is a `tf.data.Dataset`."""
    return isinstance(x, tf.data.Dataset)


NoneTensorSpec = none_tensor.NoneTensorSpec
"""The spec of None in a dataset."""

Batch = (batch_op._BatchDataset, batch_op._ParallelBatchDataset)

PaddedBatch = (padded_batch_op._PaddedBatchDataset,)

Map = (map_op._MapDataset, map_op._ParallelMapDataset)

Shuffle = (shuffle_op._ShuffleDataset,)

Repeat = (repeat_op._RepeatDataset,)

Take = (take_op._TakeDataset,)

Skip = (skip_op._SkipDataset,)

Prefetch = (prefetch_op._PrefetchDataset,)

Zip = (zip_op._ZipDataset,)

Concatenate = (concatenate_op._ConcatenateDataset,)

Range = (range_op._RangeDataset,)

ShardNode = (shard_op._ShardDataset,)

OptionsNode = (dataset_ops._OptionsDataset,)

Cache = (cache_op.CacheDataset,)

Same = (*Prefetch, *OptionsNode)
"""Nodes with the elements of their input, in the same order."""


def dataset_input(node: tf.data.Dataset) -> tf.data.Dataset | None:
    """The one dataset that `node` transforms; None for sources and for several inputs."""
    inputs = dataset_inputs(node)
    return inputs[0] if len(inputs) == 1 else None


def dataset_inputs(node: tf.data.Dataset) -> list[tf.data.Dataset]:
    """The datasets that `node` transforms."""
    # A `TextLineDataset` reads names of files from a dataset, and does not list it.
    return [in_parts(each) for each in getattr(node, "_impl", node)._inputs()]


def without_devices(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """The elements on the CPU, of a pipeline that ends in copying them to another device."""
    node = dataset
    while isinstance(node, Same):
        (node,) = dataset_inputs(node)
    copies = isinstance(node, prefetching_ops._CopyToDeviceDataset)
    return without_devices(node._input_dataset) if copies else dataset


def in_parts(node: tf.data.Dataset) -> tf.data.Dataset:
    """The `shuffle` and `repeat` that a `shuffle_and_repeat` joins; other nodes as they are.

    Nothing outside of its iterators has the place of a `shuffle_and_repeat` in its orders.
    """
    if not isinstance(node, shuffle_ops._ShuffleAndRepeatDataset):
        return node
    if not hasattr(node, "_tfmw_parts"):
        shuffle = shuffled(
            *(node._input_dataset, node._buffer_size, (node._seed, node._seed2)),
            reshuffle_each_iteration=True,
        )
        node._tfmw_parts = shuffle.repeat(node._count)
    parts: tf.data.Dataset = node._tfmw_parts
    return parts


def chosen_by(node: tf.data.Dataset) -> tf.data.Dataset | None:
    """The choices of a `choose_from_datasets` or `sample_from_datasets`; None of other nodes."""
    known = isinstance(node, directed_interleave_op._DirectedInterleaveDataset)
    return node._selector_input if known else None


def every_node(dataset: tf.data.Dataset) -> Iterator[tf.data.Dataset]:
    """Yields all datasets of a pipeline: each before those that it transforms, in their order."""
    todo = [dataset]
    while todo:
        node = todo.pop()
        yield node
        todo.extend(reversed(dataset_inputs(node)))


def sliced_tensors(node: tf.data.Dataset) -> list[tf.Tensor] | None:
    """The dense tensors [n, ...] that `from_tensor_slices` cuts; None for any other dataset."""
    if type(node) is not from_tensor_slices_op._TensorSliceDataset:
        return None
    dense = all(type(s) is tf.TensorSpec for s in tf.nest.flatten(node.element_spec))
    tensors: list[tf.Tensor] = node._tensors
    eager = all(hasattr(tensor, "numpy") for tensor in tensors)
    return list(tensors) if dense and eager else None


def repeated_tensors(node: tf.data.Dataset) -> list[tf.Tensor] | None:
    """The dense tensors of `from_tensors(...).repeat()`; None for any other dataset."""
    if not isinstance(node, Repeat) or count_of(node) >= 0:
        return None
    (source,) = node._inputs()
    if type(source) is not from_tensors_op._TensorDataset:
        return None
    tensors: list[tf.Tensor] = source._tensors
    return list(tensors) if all(hasattr(tensor, "numpy") for tensor in tensors) else None


def is_memory_cache(node: tf.data.Dataset) -> bool:
    """Whether `node` caches elements in memory, and not in a file."""
    return isinstance(node, Cache) and tf.get_static_value(node._filename) == b""


def batch_arguments(node: tf.data.Dataset) -> tuple[int, bool]:
    """(batch size, drop_remainder) of a batch node."""
    size, drop = map(tf.get_static_value, (node._batch_size, node._drop_remainder))
    return int(size), bool(drop)


def count_of(node: tf.data.Dataset) -> int:
    """The argument of a Take, Skip or Repeat node; -1 for everything."""
    return -1 if node._count is None else int(tf.get_static_value(node._count))


def buffer_size_of(shuffle: tf.data.Dataset) -> int:
    """The buffer size of a shuffle."""
    return int(tf.get_static_value(shuffle._buffer_size))


def shard_arguments(node: tf.data.Dataset) -> tuple[int, int]:
    """(number of shards, index) of a `shard` node."""
    return int(tf.get_static_value(node._num_shards)), int(tf.get_static_value(node._index))


def range_arguments(node: tf.data.Dataset) -> tuple[int, int, int, tf.DType]:
    """(start, stop, step, type) of a `range` node."""
    values = (int(tf.get_static_value(t)) for t in (node._start, node._stop, node._step))
    return *values, node.element_spec.dtype


def zipped(node: tf.data.Dataset, parts: Sequence[tf.data.Dataset]) -> tf.data.Dataset:
    """The zip of other datasets, in the structure of `node`."""
    return tf.data.Dataset.zip(tf.nest.pack_sequence_as(node._datasets, parts))


def as_zipped(node: tf.data.Dataset, elements: Sequence[Any]) -> Any:
    """The element of a zip, of those of its inputs."""
    return tf.nest.pack_sequence_as(node._datasets, elements)


def mapped(node: tf.data.Dataset, element: Any) -> Any:
    """The result of a map node for an element of dense tensors, within another function."""
    results = node._map_func.function(*tf.nest.flatten(element))
    return tf.nest.pack_sequence_as(node.element_spec, tf.nest.flatten(results))


def map_graph_nodes(node: tf.data.Dataset) -> list[Any]:
    """NodeDefs of the function of a map, and its like, and of every function that it calls."""
    return list(itertools.chain(*function_bodies(node._map_func)))


def function_bodies(wrapper: Any) -> list[Any]:
    """The NodeDefs of a node's function; then those of each function that it calls."""
    graph_def = wrapper.function.graph.as_graph_def()
    return [graph_def.node, *(function.node_def for function in graph_def.library.function)]


def is_pure(node: tf.data.Dataset) -> bool:
    """Whether a node's result for an element does not depend on the elements before it.

    With a seeded random op it does: in one process its sequence continues from element to element.
    Random ops without a seed differ in every run anyway. Python functions cannot be inspected, and
    are treated as pure.
    """
    if not isinstance(node, Map):
        return True
    for operation in map_graph_nodes(node):
        if operation.op.startswith("Assign"):
            return False
        if "seed" in operation.attr and "Random" in operation.op:
            if operation.attr["seed"].i or operation.attr["seed2"].i:
                return False
    return True


def shuffle_seeds(node: tf.data.Dataset) -> list[int] | None:
    """The two seeds of a shuffle, 0 and 0 if it has none; None if they are not constants."""
    seeds = [tf.get_static_value(node._seed), tf.get_static_value(node._seed2)]
    return None if any(s is None for s in seeds) else [int(s) for s in seeds]


def shuffled(
    source: tf.data.Dataset,
    buffer_size: Any,
    seeds: Any,
    reshuffle_each_iteration: bool,
    generator: tf.Tensor | None = None,
) -> tf.data.Dataset:
    """`source.shuffle`, which itself has no arguments for a pair of seeds and a generator."""
    pair = tuple(tf.convert_to_tensor(s, tf.int64) for s in seeds)
    overrides: list[tuple[Any, str, Any]] = [(data_random_seed, "get_seed", lambda seed: pair)]
    if generator is not None:
        overrides.append((gen_dataset_ops, "dummy_seed_generator", lambda: generator))
    with overridden(overrides):
        return source.shuffle(buffer_size, reshuffle_each_iteration=reshuffle_each_iteration)


def small_shuffle(seeds: Any, reshuffle_each_iteration: bool = True) -> tf.data.Dataset:
    """A shuffle of one element, for its generator of seeds."""
    return shuffled(tf.data.Dataset.range(1), 1, seeds, reshuffle_each_iteration)


def generator_of(small: tf.data.Dataset) -> tf.Tensor:
    """The handle of the generator of a `small_shuffle`, which must outlive what uses it."""
    (node,) = (
        n for n in dataset_graph(small).node if n.attr["dtype"].type == tf.resource.as_datatype_enum
    )
    graph = tf.compat.v1.GraphDef(node=[node])

    @tf.function(autograph=False)
    def handle() -> tf.Tensor:
        return tf.graph_util.import_graph_def(graph, return_elements=[f"{node.name}:0"])[0]

    return handle()


def reshuffles(node: tf.data.Dataset) -> bool:
    """Whether a shuffle has a new order in each pass."""
    return node._reshuffle_each_iteration is not False


def original(node: tf.data.Dataset) -> tf.data.Dataset:
    """The user's shuffle, of one that is `rebuilt`."""
    return getattr(node, "_tfmw_original", node)


def small(node: tf.data.Dataset) -> tf.data.Dataset | None:
    """A shuffle of one element with the generator of a `rebuilt` shuffle; None of others."""
    found: tf.data.Dataset | None = getattr(node, "_tfmw_small", None)
    return found


def reads_a_service(dataset: tf.data.Dataset) -> bool:
    """Whether elements come from tf.data's service."""
    return any(type(n).__name__.startswith("_DataServiceDataset") for n in every_node(dataset))


def dataset_constants(dataset: tf.data.Dataset) -> Iterator[tuple[str, str, Any]]:
    """Yields (transformation, argument, eager tensor) for the constants of a pipeline's nodes.

    Excludes seeds and buffer sizes, which do not determine the elements, and the files of caches.
    """
    todo = [dataset]
    while todo:
        node = todo.pop()
        kind = type(node).__name__.strip("_").removesuffix("V2").removesuffix("Dataset")
        for name, value in vars(node).items():
            if name in _NOT_DATA or kind in ("Cache", "Snapshot", "Save"):
                continue
            for leaf in value if isinstance(value, list) else [value]:
                if isinstance(leaf, tf.Tensor) and leaf.dtype not in (tf.variant, tf.resource):
                    yield kind, name.strip("_"), leaf
        todo.extend(reversed(node._inputs()))


def dataset_functions(dataset: tf.data.Dataset) -> Iterator[tuple[list[Any], list[Any]]]:
    """Yields (NodeDefs, captured eager tensors) for every function of a pipeline's nodes."""
    for node in every_node(dataset):
        for wrapper in node._functions():
            captured = [
                tensor
                for tensor in wrapper.function.captured_inputs
                if tensor.dtype not in (tf.variant, tf.resource) and hasattr(tensor, "numpy")
            ]
            yield function_bodies(wrapper), captured


_PASSIVE = frozenset({"Root", "Prefetch", "Model", "Options", "FiniteTake"})  # stages

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


def dataset_graph(dataset: tf.data.Dataset, for_other_process: bool = False) -> Any:
    """The GraphDef of a dataset, with the functions that it uses in its library.

    Raises:
        tf.errors.OpError: `for_other_process`, and it uses state of this one, such as a variable.
    """
    policy = tf.data.experimental.ExternalStatePolicy
    serialized = dataset._as_serialized_graph(
        external_state_policy=policy.FAIL if for_other_process else policy.IGNORE
    )
    return tf.compat.v1.GraphDef.FromString(serialized.numpy())


def python_ops(graph: Any) -> set[str]:
    """The ops of a GraphDef that run Python functions of the process that made it."""
    bodies = (graph.node, *(function.node_def for function in graph.library.function))
    ops = {node.op for body in bodies for node in body}
    return {op for op in ops if op.endswith(("PyFunc", "PyFuncStateless"))}


def dataset_from_graph(graph_def: Any, element_spec: Any) -> tf.data.Dataset:
    """The dataset of an edited GraphDef.

    In the process that created it, Python functions, variables and tables that it uses stay valid.
    """
    variant = gen_experimental_dataset_ops.dataset_from_graph(graph_def.SerializeToString())
    return tf.data.experimental.from_variant(variant, element_spec)


def is_deterministic() -> bool:
    """Whether TensorFlow's operations must be deterministic (`enable_op_determinism`)."""
    return bool(_tf_config.is_op_determinism_enabled())


def global_seed() -> int | None:
    """The seed of the last `tf.random.set_seed`."""
    return _context.global_seed()


@contextlib.contextmanager
def substituted_global_seed(seed: int | None) -> Iterator[None]:
    """Sets the global seed within this context; afterwards the sequence of seeds continues.

    `tf.random.set_seed` would restart the sequence, and functions traced before it would count as
    traced with other seeds (`source_of_seeds`).
    """
    context = _context.context()
    with overridden([(context, "_seed", None), (context, "_rng", None)]):
        tf.random.set_seed(seed)
        yield


def source_of_seeds() -> Any:
    """The generator from which traced ops draw seeds; replaced by each `tf.random.set_seed`."""
    return getattr(_context.context(), "_rng", None)  # exists after the first set_seed


def seed_state() -> Mapping[str, Any]:
    """The global seeds of TensorFlow and Keras, and how far TensorFlow's sequence has advanced."""
    sequence = source_of_seeds()
    return {
        "tensorflow": (global_seed(), sequence and sequence.getstate()),
        # Of `keras.utils.set_random_seed`; the oldest Keras keeps none.
        "keras": global_state.get_global_attribute("global_random_seed"),
    }


def set_seed_state(state: Mapping[str, Any]) -> None:
    """Sets a result of `seed_state`. Python's and NumPy's generators change, too."""
    if state["keras"] is not None:
        keras.utils.set_random_seed(state["keras"])
    seed, sequence = state["tensorflow"]
    if seed is not None:
        tf.random.set_seed(seed)
        source_of_seeds().setstate(sequence)


def slowest_stage(iterator: Any) -> tuple[str, float] | None:
    """The stage of a pipeline that takes longest; None if an iterator has no model of stages yet.

    Returns:
        (name of tf.data's op without version, such as "Map"; seconds of the stage per element of
        the dataset, divided by the number of its threads).
    """
    try:
        model = iterator_model_ops.get_model_proto(iterator)
    except (tf.errors.OpError, AttributeError, TypeError, ValueError):
        return None  # autotuning is off, or an iterator over several devices
    elements = max(
        (node.num_elements for node in model.nodes.values() if node.name == "Root"), default=0
    )
    if not elements:
        return None
    found: dict[str, float] = {}
    for node in model.nodes.values():
        name = re.sub(r"(V\d+)?(\(.*)?$", "", node.name)
        threads = [p.state_value for p in node.parameters if p.name == "parallelism"]
        if name not in _PASSIVE:
            seconds = node.processing_time / 1e9 / elements / max([1.0, *threads])
            found[name] = max(found.get(name, 0.0), seconds)
    return max(found.items(), key=lambda pair: pair[1], default=None)


PRIVATE_NAMES: list[tuple[Any, str]] = [
    (cache_op, "CacheDataset"),
    (from_tensor_slices_op, "_TensorSliceDataset"),
    (from_tensors_op, "_TensorDataset"),
    (prefetching_ops, "_CopyToDeviceDataset"),
    (shuffle_ops, "_ShuffleAndRepeatDataset"),
    (gen_dataset_ops, "dummy_seed_generator"),
    (dataset_ops.DatasetV2, "_inputs"),
    (dataset_ops.DatasetV2, "_functions"),
    (global_state, "get_global_attribute"),
    (_tf_config, "is_op_determinism_enabled"),
    (iterator_model_ops, "get_model_proto"),
]
