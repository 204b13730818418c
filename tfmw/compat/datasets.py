"""The inputs, functions and seeds of datasets, which are private attributes of tf.data."""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
import threading
import weakref
from collections.abc import Iterator, Mapping
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
from tensorflow.python.data.experimental.ops import iterator_model_ops
from tensorflow.python.data.ops import (
    batch_op,
    cache_op,
    concatenate_op,
    dataset_ops,
    directed_interleave_op,
    flat_map_op,
    interleave_op,
    map_op,
    padded_batch_op,
    prefetch_op,
    range_op,
    readers,
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

from tfmw.compat.objects import overridden, overridden_here

_DROPPED_S = 1.0  # time in which Python drops a tensor, once its finalizers are called
_iterators = itertools.count()

train_validation_split = array_slicing.train_validation_split
make_class_weight_map = _tf_dataset_adapter.make_class_weight_map_fn


data_adapter = get_data_adapter
"""Keras's adapter for arrays, PyDataset and generators: `.get_tf_dataset()` and hooks."""


def end_in_background(iterator: Any) -> None:
    """Lets a thread end an iterator, once Python has no reference to it.

    tf.data's tuning may miss the request to end, and ends up to a minute later. Python would wait
    for it with the interpreter's lock.
    """
    name = f"tfmw-iterator-{next(_iterators)}"
    tf.raw_ops.Stage(values=[iterator._iterator_resource], shared_name=name)
    clear = functools.partial(tf.raw_ops.StageClear, dtypes=[tf.resource], shared_name=name)

    def later() -> None:
        thread = threading.Timer(_DROPPED_S, clear)
        thread.daemon = True
        thread.start()

    weakref.finalize(iterator._iterator_resource, later).atexit = False


def batches_of_slices(adapter: Any) -> tf.data.Dataset | None:
    """The batches of an adapter of arrays that does not shuffle, as slices and `batch`.

    That is quicker to build than the adapter's own pipeline. Its form shows that a batch can be
    divided before it is created. Returns None for adapters of anything but dense arrays.
    """
    if type(adapter) is not array_data_adapter.ArrayDataAdapter or adapter._shuffle:
        return None
    arrays = _arrays_of(adapter)
    if not all(isinstance(a, np.ndarray | tf.Tensor) for a in tf.nest.flatten(arrays)):
        return None
    return tf.data.Dataset.from_tensor_slices(arrays).batch(adapter._batch_size)


def _arrays_of(adapter: Any) -> Any:
    """The arrays of an adapter in the form that its own pipeline slices."""
    arrays = array_slicing.convert_to_sliceable(adapter._inputs, target_backend="tensorflow")
    return keras.tree.lists_to_tuples(arrays)


def shuffled_rows(adapter: Any) -> dict[str, Any] | None:
    """Returns the arrays that an adapter shuffles; None for other adapters.

    Returns:
        "rows", a function: int64 [k] -> the batch of these rows, their "count", the "size" of a
        batch, and whether rows stay "within_batches"; the arguments of `ShuffledArrays`.
    """
    if type(adapter) is not array_data_adapter.ArrayDataAdapter or not adapter._shuffle:
        return None
    wrapper = array_slicing.TensorflowSparseWrapper
    with tf.device("cpu:0"):
        arrays = keras.tree.map_structure(
            lambda a: tf.convert_to_tensor(a) if isinstance(a, np.ndarray) else a,
            _arrays_of(adapter),
        )

    def rows(indices: tf.Tensor) -> Any:
        def of_one(leaf: Any) -> Any:
            if isinstance(leaf, wrapper):
                return array_slicing.slice_tensorflow_sparse_wrapper(leaf, indices)
            return tf.gather(leaf, indices) if tf.is_tensor(leaf) else None

        return keras.tree.traverse(of_one, arrays)

    within = adapter._shuffle == "batch"
    size = adapter._batch_size
    return {"rows": rows, "count": adapter._num_samples, "size": size, "within_batches": within}


def seeded_order(adapter: Any) -> tf.Tensor:
    """int64 [rows]: the order of an adapter of arrays under a global seed, the same in each pass.

    Keras's pipeline zips batches of indices with the arrays, whose content does not matter.
    """
    rows: np.ndarray = np.zeros([adapter._num_samples], bool)
    options = {"batch_size": adapter._batch_size, "shuffle": adapter._shuffle}
    node = array_data_adapter.ArrayDataAdapter(rows, **options).get_tf_dataset()
    while kind_of(node) != "zip":
        node = node._input_dataset
    with tf.device("cpu:0"):
        return tf.concat(list(node._datasets[0]), axis=0)


def signature_of(adapter: Any) -> Any:
    """Structure of tf.TypeSpec for a batch of Grain, after `get_tf_dataset` was called."""
    return adapter._output_tf_signature


def has_own_readers(adapter: Any) -> bool:
    """Whether Keras reads ahead for an adapter, in threads or processes, during an epoch."""
    return getattr(adapter, "enqueuer", None) is not None


def is_dataset(x: Any) -> bool:
    """Whether `x` is a `tf.data.Dataset`."""
    return isinstance(x, tf.data.Dataset)


NoneTensorSpec = none_tensor.NoneTensorSpec
"""The spec of None in a dataset."""

KINDS: dict[Any, str] = {
    batch_op._BatchDataset: "batch",
    batch_op._ParallelBatchDataset: "batch",
    cache_op.CacheDataset: "cache",
    concatenate_op._ConcatenateDataset: "concatenate",
    dataset_ops._OptionsDataset: "options",
    directed_interleave_op._DirectedInterleaveDataset: "choose",
    flat_map_op._FlatMapDataset: "flat_map",
    interleave_op._InterleaveDataset: "interleave",
    interleave_op._ParallelInterleaveDataset: "interleave",
    map_op._MapDataset: "map",
    map_op._ParallelMapDataset: "map",
    padded_batch_op._PaddedBatchDataset: "padded_batch",
    prefetch_op._PrefetchDataset: "prefetch",
    range_op._RangeDataset: "range",
    readers.ParallelInterleaveDataset: "interleave",  # of TensorFlow 1
    repeat_op._RepeatDataset: "repeat",
    shard_op._ShardDataset: "shard",
    shuffle_op._ShuffleDataset: "shuffle",
    skip_op._SkipDataset: "skip",
    take_op._TakeDataset: "take",
    zip_op._ZipDataset: "zip",
}
"""Names of the transformations that tfmw knows."""


def kind_of(dataset: tf.data.Dataset) -> str:
    """The transformation of a dataset, such as "batch"; the name of its class for other ones."""
    kinds = (KINDS.get(each) for each in type(dataset).__mro__)
    return next((kind for kind in kinds if kind), type(dataset).__name__)


def map_graph_nodes(node: tf.data.Dataset) -> list[Any]:
    """NodeDefs of the function of a map or similar node, and of every function that it calls."""
    return list(itertools.chain(*function_bodies(node._map_func)))


def function_bodies(wrapper: Any) -> list[Any]:
    """The NodeDefs of a node's function; then those of each function that it calls."""
    graph_def = wrapper.function.graph.as_graph_def()
    return [graph_def.node, *(function.node_def for function in graph_def.library.function)]


def is_pure(node: tf.data.Dataset) -> bool:
    """Whether a node's result for an element does not depend on the elements before it.

    With a seeded random op it does depend on them: in one process its sequence continues from
    element to element. Random ops without a seed differ in every run anyway. Python functions
    cannot be inspected, and are treated as pure.
    """
    if kind_of(node) != "map":
        return True
    for operation in map_graph_nodes(node):
        if operation.op.startswith("Assign"):
            return False
        if "seed" in operation.attr and "Random" in operation.op:
            if operation.attr["seed"].i or operation.attr["seed2"].i:
                return False
    return True


def shuffled(
    source: tf.data.Dataset,
    buffer_size: Any,
    seeds: Any,
    reshuffle_each_iteration: bool,
    generator: tf.Tensor | None = None,
) -> tf.data.Dataset:
    """`source.shuffle` with a pair of seeds and a generator, which it has no arguments for."""
    pair = tuple(tf.convert_to_tensor(s, tf.int64) for s in seeds)
    functions: list[tuple[Any, str, Any]] = [(data_random_seed, "get_seed", lambda seed: pair)]
    if generator is not None:
        functions.append((gen_dataset_ops, "dummy_seed_generator", lambda: generator))
    with overridden_here(functions):
        return source.shuffle(buffer_size, reshuffle_each_iteration=reshuffle_each_iteration)


def small_shuffle(seeds: Any, reshuffle_each_iteration: bool = True) -> tf.data.Dataset:
    """A shuffle of one element, used for its generator of seeds."""
    return shuffled(tf.data.Dataset.range(1), 1, seeds, reshuffle_each_iteration)


def generator_of(small: tf.data.Dataset) -> tf.Tensor:
    """The handle of the generator of a `small_shuffle`, which must outlive its users."""
    (node,) = (
        n for n in dataset_graph(small).node if n.attr["dtype"].type == tf.resource.as_datatype_enum
    )
    graph = tf.compat.v1.GraphDef(node=[node])

    @tf.function(autograph=False)
    def handle() -> tf.Tensor:
        return tf.graph_util.import_graph_def(graph, return_elements=[f"{node.name}:0"])[0]

    return handle.get_concrete_function()()  # TensorFlow warns of functions called once each


# stages that do no work of their own
_PASSIVE = frozenset({"Root", "Prefetch", "Model", "Options", "FiniteTake"})


def dataset_graph(dataset: tf.data.Dataset, for_other_process: bool = False) -> Any:
    """The GraphDef of a dataset, whose library has the functions that it uses.

    Raises:
        tf.errors.OpError: `for_other_process` is true, and the dataset uses state of this process,
            such as a variable.
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

    Python functions, variables and tables stay valid in the process that created the GraphDef.
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
    """The generator from which traced ops draw seeds; each `tf.random.set_seed` replaces it."""
    return getattr(_context.context(), "_rng", None)  # exists after the first set_seed


def seed_state() -> Mapping[str, Any]:
    """The global seeds of TensorFlow and Keras, and the position in TensorFlow's sequence."""
    sequence = source_of_seeds()
    return {
        "tensorflow": (global_seed(), sequence and sequence.getstate()),
        # The seed of `keras.utils.set_random_seed`; the oldest Keras keeps none.
        "keras": global_state.get_global_attribute("global_random_seed"),
    }


def set_seed_state(state: Mapping[str, Any], anew: bool = True) -> None:
    """Sets a result of `seed_state`. Python's and NumPy's generators change, too.

    Args:
        anew: whether equal seeds are set again, which makes traces with random ops invalid.
    """
    (seed, sequence), (own, _) = state["tensorflow"], seed_state()["tensorflow"]
    if anew or (seed, state["keras"]) != (own, seed_state()["keras"]):
        if state["keras"] is not None:
            keras.utils.set_random_seed(state["keras"])
        if seed is not None:
            tf.random.set_seed(seed)
    if seed is not None:
        source_of_seeds().setstate(sequence)


def slowest_stage(iterator: Any) -> tuple[str, float] | None:
    """The slowest stage of a pipeline; None if an iterator has no model of stages yet.

    Returns:
        (name of tf.data's op without version, such as "Map"; seconds of the stage per element of
        the dataset, divided by the number of its threads).
    """
    try:
        model = iterator_model_ops.get_model_proto(iterator)
    except (tf.errors.OpError, AttributeError, TypeError, ValueError):
        return None  # autotuning is off, or the iterator has several devices
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
