"""A global dataset -> this worker's share of it. The only module that knows about sharding.

    share = Shard.of(dataset, Sharding(workers=2, rank=0), Order(seed=7))
    for batches, total in share.dataset: ...     # this worker's part of each global batch

Every example goes to exactly one replica, each global batch is the union of the replicas' parts,
and all workers make the same number of steps. Example j of a global batch goes to replica j mod R
(R replicas, `Sharding.replicas`), so the k-th global batch is the same for any number of workers.

How a dataset is cut, cheapest way first:

* `pushed`: a pipeline that ends in `batch`, with nothing but maps, shuffles, repeats, takes and
  skips before it down to some source. A map does not change which element is where, so the cut is
  made below the maps: each worker maps only its own examples. A worker knows the size of every
  global batch from the source's cardinality; where that is unknown (files, filters, generators)
  the workers add up their examples at each step.
* `sliced`: anything else, and arrays. Every worker runs the pipeline and keeps its rows of each
  global batch.
* `of_function`: a callable that takes a `tf.distribute.InputContext` and returns the pipeline of
  that worker, batched per replica. Workers may have different amounts of data. `tfds` makes such a
  callable of a TFDS data set, by which each worker opens its own files only.

All workers must see the same order, so all take the seeds of the chief's shuffles, drawn for those
that have none (`ordered`), and parallel transformations are made deterministic.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfmw import keras_compat
from tfmw.errors import UsageError

INFINITE = -1

# What tfmw maps over batches has no Python control flow to convert; converting takes about 0.1 s a
# function, for which a run that is started again would wait.
_as_it_is = tf.autograph.experimental.do_not_convert


@dataclasses.dataclass(frozen=True)
class Sharding:
    """How a global batch is divided.

    Attributes:
        workers: processes that train.
        rank: this process, from 0.
        local_replicas: replicas (devices) of each process.
    """

    workers: int = 1
    rank: int = 0
    local_replicas: int = 1

    @property
    def replicas(self) -> int:
        return self.workers * self.local_replicas

    @property
    def first_replica(self) -> int:
        """The number of this process's first replica."""
        return self.rank * self.local_replicas

    def is_local(self, position: Any) -> Any:
        """Whether an example at `position` (int or integer tensor) is this worker's."""
        replica = position % self.replicas
        return (replica >= self.first_replica) & (
            replica < self.first_replica + self.local_replicas
        )

    def local_rows(self, total: int) -> int:
        """How many of `total` examples are this worker's."""
        return sum(
            len(range(r, total, self.replicas))
            for r in range(self.first_replica, self.first_replica + self.local_replicas)
        )


@dataclasses.dataclass(frozen=True)
class Order:
    """Where the order of examples comes from: seeds that every worker has alike.

    Attributes:
        seed: for shuffles that have none.
        agree: takes this worker's value of something, returns the chief's.
    """

    seed: int = 0
    agree: Callable[[Any], Any] = lambda local: local


@dataclasses.dataclass(frozen=True)
class ShardSizes:
    """What is known of the shares of a step: may they differ in size, may one be empty?"""

    uneven: bool
    empty: bool

    @classmethod
    def of(cls, total: int, sharding: Sharding) -> ShardSizes:
        return cls(total % sharding.replicas != 0, total < sharding.replicas)


@dataclasses.dataclass
class Shard:
    """One worker's share of a dataset.

    Attributes:
        dataset: elements (batches, total): a tuple of one batch for each local replica, and
            int64 [], the number of examples of this step over all replicas (-1: not known here,
            the replicas add them up; then the dataset goes on for ever with empty batches, and
            has ended once a step's sum is 0).
        steps: global batches in one pass; INFINITE; None where it shows only while reading.
        full: evenness of every step but the last one.
        last: evenness of the last step of a pass.
        element_spec: of one batch, as the model gets it.
        batch_size: of the global batch, where it is known.
        size_known: whether the dataset says the number of examples of each step.
        on_epoch_begin, on_epoch_end: to be called around each epoch that is read.
        leave_epoch_out: to be called for an epoch that nobody reads, because an earlier run did.
    """

    dataset: tf.data.Dataset
    steps: int | None
    full: ShardSizes
    last: ShardSizes
    element_spec: Any
    batch_size: int | None = None
    size_known: bool = True
    on_epoch_begin: Callable[[], None] = lambda: None
    on_epoch_end: Callable[[], None] = lambda: None
    leave_epoch_out: Callable[[], None] = lambda: None

    @classmethod
    def of(cls, dataset: tf.data.Dataset, sharding: Sharding, order: Order, skip: int = 0) -> Shard:
        """The share of a dataset that is batched by the global batch size.

        Args:
            dataset: elements are batches: structures of tensors with one leading dimension.
            split: how batches are divided.
            order: where shuffles take their seeds from.
            skip: global batches to leave out at the beginning.

        Raises:
            UsageError: the dataset is not batched, or workers have different datasets.
        """
        if sharding.replicas == 1:
            return _whole(ordered(dataset, order).skip(skip))
        pushed = _pushed(dataset, sharding, order, skip)
        return pushed or _sliced(ordered(dataset, order).skip(skip), sharding)


def shard(dataset: tf.data.Dataset, input_context: tf.distribute.InputContext) -> tf.data.Dataset:
    """This worker's share of a dataset batched by the global batch size.

    For use inside a function of an `InputContext`, where part of a pipeline is global:

        def dataset_fn(context):
            return tfmw.data.shard(global_dataset(), context).map(augment)

    Args:
        dataset: elements are batches: structures of tensors with leading dimension [global batch].
        input_context: as tf.distribute gives it to dataset functions.

    Returns:
        A dataset of batches [about global batch / number of replicas]; all examples of all workers
        are those of `dataset`, each once. Unseeded shuffles are given a fixed seed.
    """
    workers = input_context.num_input_pipelines
    local = max(1, input_context.num_replicas_in_sync // workers)
    sharding = Sharding(workers, input_context.input_pipeline_id, local)
    share = Shard.of(dataset, sharding, Order())
    batches = share.dataset.flat_map(_as_it_is(lambda parts, total: _from_tuple(parts)))
    if share.size_known:
        return batches.filter(_as_it_is(lambda *b: examples_of(b) > 0))
    return batches.take_while(_as_it_is(lambda *b: examples_of(b) > 0))


def _from_tuple(parts: tuple[Any, ...]) -> tf.data.Dataset:
    out = tf.data.Dataset.from_tensors(parts[0])
    for part in parts[1:]:
        out = out.concatenate(tf.data.Dataset.from_tensors(part))
    return out


# ---------------------------------------------------------------- ways to cut


def _whole(dataset: tf.data.Dataset) -> Shard:
    steps = _steps(dataset)
    even = ShardSizes(False, False)
    return Shard(
        dataset.map(
            _as_it_is(lambda *b: ((_element(b),), tf.cast(examples_of(_element(b)), tf.int64)))
        ).prefetch(tf.data.AUTOTUNE),
        steps,
        even,
        even,
        dataset.element_spec,
        _global_batch_size(dataset),
    )


def _pushed(dataset: tf.data.Dataset, sharding: Sharding, order: Order, skip: int) -> Shard | None:
    """The cut below the maps of a pipeline that ends in `batch`; None where it is not one."""
    node = dataset
    while isinstance(node, (*keras_compat.Prefetch, *keras_compat.OptionsNode)):
        node = _input_of(node)
    if not isinstance(node, keras_compat.Batch):
        return None
    arguments = keras_compat.batch_arguments(node)
    if arguments is None:
        return None
    size, drop_remainder = arguments
    spec = node.element_spec
    elements = _input_of(node)
    source, selections, maps = _peel(elements)
    if any(isinstance(s, tf.RaggedTensorSpec) for s in tf.nest.flatten(source.element_spec)):
        # Maps forget that an element is a row of a ragged tensor, and it would be batched as dense.
        return None
    if not maps and _steps(elements) is None:
        # Nothing is saved below, and counting would cost a reduction at each step.
        return None
    for selection in reversed(selections):
        source = keras_compat.rebuilt(selection, source)
    # Whole batches are left out, so that the others keep their positions.
    source = ordered(source, order).skip(skip * size)
    count = _steps(source)
    mine = _positions(source, size, sharding)
    for function in reversed(maps):
        mine = keras_compat.rebuilt(function, mine)
    rows = sharding.local_rows(size)
    batches = mine.batch(rows) if rows else tf.data.Dataset.from_tensors(_empty(spec)).take(0)
    if drop_remainder and rows:
        batches = mine.batch(rows, drop_remainder=count is None or count == INFINITE)
    full = ShardSizes.of(size, sharding)
    if count is None:
        if drop_remainder:
            # Whether the last batch is full shows only over all workers.
            return None
        return _counting(_split_locally(batches, sharding), spec, sharding, size)
    if count == INFINITE:
        totals = tf.data.Dataset.from_tensors(np.int64(size)).repeat()
        if not rows:
            batches = tf.data.Dataset.from_tensors(_empty(spec)).repeat()
        steps, last = INFINITE, full
    else:
        remainder = 0 if drop_remainder else count % size
        steps = count // size + (remainder > 0)
        totals = tf.data.Dataset.range(steps).map(
            _as_it_is(lambda k: tf.minimum(np.int64(size), np.int64(count) - k * np.int64(size)))
        )
        last = ShardSizes.of(remainder or size, sharding)
        missing = (
            steps - (count // size if rows else 0) - (1 if sharding.local_rows(remainder) else 0)
        )
        if missing > 0:
            batches = batches.take(steps - missing).concatenate(
                tf.data.Dataset.from_tensors(_empty(spec)).repeat(missing)
            )
    zipped = tf.data.Dataset.zip((_split_locally(batches, sharding), totals))
    return Shard(_ordered(zipped), steps, full, last, spec, size)


def _positions(source: tf.data.Dataset, size: int, sharding: Sharding) -> tf.data.Dataset:
    """The elements at this worker's positions of each global batch of `size`."""
    if size % sharding.replicas == 0 and sharding.local_replicas == 1:
        return source.shard(sharding.replicas, sharding.rank)
    mine = source.enumerate().filter(_as_it_is(lambda j, _: sharding.is_local(j % size)))
    return mine.map(_as_it_is(lambda _, element: element))


def _peel(
    elements: tf.data.Dataset,
) -> tuple[tf.data.Dataset, list[tf.data.Dataset], list[tf.data.Dataset]]:
    """Takes maps and selections off the end of a pipeline of single examples.

    Returns:
        (what lies below, the selections taken off, the maps taken off), the last one first. A
        selection does not look at elements and a map does not move them, so all selections may
        go before all maps.
    """
    selections: list[tf.data.Dataset] = []
    maps: list[tf.data.Dataset] = []
    done = (elements, 0, 0)
    node: tf.data.Dataset | None = elements
    while node is not None:
        if isinstance(node, keras_compat.Map) and _same_for_each_element(node):
            maps.append(node)
            below = _input_of(node)
            done = (below, len(selections), len(maps))
        elif isinstance(node, (*keras_compat.Prefetch, *keras_compat.OptionsNode)):
            below = _input_of(node)
        elif isinstance(
            node,
            (
                *keras_compat.Shuffle,
                *keras_compat.Repeat,
                *keras_compat.Take,
                *keras_compat.Skip,
            ),
        ):
            selections.append(node)
            below = _input_of(node)
        else:
            break
        node = below
    # Selections below the lowest map may stay where they are.
    source, number_of_selections, number_of_maps = done
    return source, selections[:number_of_selections], maps[:number_of_maps]


def _same_for_each_element(node: tf.data.Dataset) -> bool:
    """Whether a map gives an element the same result whatever elements it saw before.

    A seeded random op does not: one process would go on with its sequence from element to element.
    Unseeded ones are random anyway. Python functions are taken at their word.
    """
    for operation in keras_compat.map_graph_nodes(node):
        if operation.op.startswith("Assign"):
            return False
        if "seed" in operation.attr and "Random" in operation.op:
            if operation.attr["seed"].i or operation.attr["seed2"].i:
                return False
    return True


def _sliced(dataset: tf.data.Dataset, sharding: Sharding) -> Shard:
    """Every worker runs the whole pipeline and keeps its rows of each global batch."""
    spec = dataset.element_spec
    for leaf in tf.nest.flatten(spec, expand_composites=False):
        if isinstance(leaf, tf.SparseTensorSpec):
            raise UsageError(
                "sparse tensors in a dataset that is not a plain pipeline ending in batch() cannot "
                "be divided between replicas: end the dataset in batch(), or make them dense."
            )
        if leaf.shape.rank == 0:
            raise UsageError(
                f"the dataset is not batched: its elements are {spec}; end it in "
                ".batch(global_batch_size)."
            )

    def cut(*element: Any) -> Any:
        batch = _element(element)
        total = tf.cast(examples_of(batch), tf.int64)
        rows = tf.boolean_mask(tf.range(total), sharding.is_local(tf.range(total)))
        return tf.nest.map_structure(lambda t: tf.gather(t, rows), batch), total

    parts = dataset.map(_as_it_is(cut), num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
    pairs = parts.map(_as_it_is(lambda batch, total: (_local_parts(batch, sharding), total)))
    size = _static_batch_size(spec)
    if size is not None:
        full = last = ShardSizes.of(size, sharding)
    else:
        full = last = ShardSizes(True, True)
    batch_size = _global_batch_size(dataset)
    return Shard(_ordered(pairs), _steps(dataset), full, last, spec, batch_size)


def of_function(
    dataset_fn: Callable[[tf.distribute.InputContext], tf.data.Dataset],
    sharding: Sharding,
    skip: int = 0,
) -> Shard:
    """The share that a user's function of an `InputContext` returns.

    Args:
        dataset_fn: returns this worker's pipeline, batched by the batch size of one replica.
        skip: steps to leave out at the beginning.
    """
    context = tf.distribute.InputContext(
        num_input_pipelines=sharding.workers,
        input_pipeline_id=sharding.rank,
        num_replicas_in_sync=sharding.replicas,
    )
    dataset = dataset_fn(context)
    if not keras_compat.is_dataset(dataset):
        raise UsageError(
            f"the dataset function returned {type(dataset).__name__}: expected a tf.data.Dataset, "
            "this worker's pipeline, batched by the batch size of one replica."
        )
    dataset = dataset.skip(skip * sharding.local_replicas)
    if sharding.replicas == 1:
        return _whole(dataset)
    spec = dataset.element_spec
    if sharding.local_replicas == 1:
        return _counting(dataset.map(_as_it_is(lambda *b: (_element(b),))), spec, sharding, None)
    empty = tf.data.Dataset.from_tensors(_empty(spec)).repeat()
    streams = tuple(
        dataset.shard(sharding.local_replicas, d).concatenate(empty)
        for d in range(sharding.local_replicas)
    )
    zipped = tf.data.Dataset.zip(streams).take_while(
        _as_it_is(lambda *parts: tf.reduce_any([examples_of(p) > 0 for p in parts]))
    )
    return _counting(zipped.map(_as_it_is(lambda *parts: tuple(parts))), spec, sharding, None)


def _counting(parts: tf.data.Dataset, spec: Any, sharding: Sharding, size: int | None) -> Shard:
    """A share whose totals the replicas add up step by step."""
    nothing = tf.data.Dataset.from_tensors(
        tuple(_empty(spec) for _ in range(sharding.local_replicas))
    )
    endless = parts.concatenate(nothing.repeat())
    dataset = endless.map(_as_it_is(lambda *p: (tuple(p), np.int64(-1))))
    anything = ShardSizes(True, True)
    return Shard(_ordered(dataset), None, anything, anything, spec, size, size_known=False)


# ---------------------------------------------------------------- pieces


def ordered(dataset: tf.data.Dataset, order: Order) -> tf.data.Dataset:
    """The same pipeline with the same seeds on every worker, and every order made deterministic.

    A new dataset wherever something shuffles: its sequence of reshuffles begins at the first.

    Raises:
        UsageError: workers have different datasets.
    """
    if not keras_compat.may_shuffle_inside(dataset):
        return dataset
    chain = []
    node = dataset
    while isinstance(node, keras_compat.REBUILDABLE):
        chain.append(node)
        node = _input_of(node)
    # Below is what only its graph tells about; in-memory arrays stay out of that graph if possible.
    if keras_compat.may_shuffle_inside(node):
        node = _ordered_graph(node, order)
    shuffles = [n for n in reversed(chain) if isinstance(n, keras_compat.Shuffle)]
    seeds = iter(_agreed([keras_compat.shuffle_seeds(n) for n in shuffles], order))
    for transformation in reversed(chain):
        is_shuffle = isinstance(transformation, keras_compat.Shuffle)
        node = keras_compat.rebuilt(transformation, node, next(seeds) if is_shuffle else None)
    deterministic = tf.data.Options()
    deterministic.deterministic = True
    return node.with_options(deterministic)


def draws_late(dataset: tf.data.Dataset) -> bool:
    """Whether a pass may draw reshuffles only at its first element.

    A shuffle makes the iterator of what lies below it then, which may shuffle too.
    (Source: tensorflow/core/kernels/data/shuffle_dataset_op.cc.)
    """
    return keras_compat.shuffles_in(dataset) > 1


def _agreed(mine: list[list[int] | None], order: Order) -> list[list[int] | None]:
    """The chief's pairs of seeds, drawn where a shuffle has none."""
    drawn = [
        [order.seed, i + 1] if pair is not None and not any(pair) else pair
        for i, pair in enumerate(mine)
    ]
    seeds: list[list[int] | None] = order.agree(drawn)
    if len(seeds) != len(mine):
        raise UsageError(
            f"workers have different datasets: the chief's has {len(seeds)} shuffles, this "
            f"worker's has {len(mine)}. Build the same pipeline on every worker; tfmw divides it."
        )
    return seeds


def _ordered_graph(dataset: tf.data.Dataset, order: Order) -> tf.data.Dataset:
    """`ordered` for pipelines that shuffle inside of functions: interleaved, zipped, sampled.

    The pipeline's graph is edited, not its Python objects.
    """
    graph = keras_compat.dataset_graph(dataset)
    changed = False
    mine: list[list[int]] = []
    places = []
    bodies = [(graph.node, "")] + [(f.node_def, ":output:0") for f in graph.library.function]
    for nodes, suffix in bodies:
        by_name = {node.name: node for node in nodes}
        for node in nodes:
            if "deterministic" in node.attr and node.attr["deterministic"].s == b"false":
                node.attr["deterministic"].s = b"true"
                changed = True
            if node.op in _SEED_INPUTS:
                slots = _SEED_INPUTS[node.op]
                values = [_folded(node.input[i], by_name) for i in slots]
                known = [value for value in values if value is not None]
                if len(known) == len(slots):
                    mine.append(known)
                    places.append((nodes, suffix, node, slots))
            if node.op in _GENERATOR_INPUT:
                # The generator of reshuffles is this process's, shared with the dataset that was
                # read; one that does not exist yet is made anew.
                slot = _GENERATOR_INPUT[node.op]
                held = by_name.get(node.input[slot].split(":")[0])
                if held is not None and held.op == "Const":
                    held.Clear()
                    held.name = node.input[slot].split(":")[0]
                    held.op = "DummySeedGenerator"
                    changed = True
    seeds = _agreed(list(mine), order)
    for number, ((nodes, suffix, node, slots), pair) in enumerate(zip(places, seeds, strict=True)):
        changed = True
        if pair is None or pair == mine[number]:
            continue
        for slot, value in zip(slots, pair, strict=True):
            constant = nodes.add()
            constant.name = f"tfmw_seed_{number}_{slot}"
            constant.op = "Const"
            constant.attr["dtype"].type = tf.int64.as_datatype_enum
            constant.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(value, tf.int64, []))
            node.input[slot] = constant.name + suffix
    if not changed and not mine:
        return dataset
    out = keras_compat.dataset_from_graph(graph, dataset.element_spec)
    return out.with_options(dataset.options())


# Where the two seeds are among the inputs of a dataset op (tensorflow/core/ops/dataset_ops.cc).
_SEED_INPUTS = {
    "ShuffleDataset": (2, 3),
    "ShuffleDatasetV3": (2, 3),
    "ShuffleAndRepeatDataset": (2, 3),
    "ShuffleAndRepeatDatasetV2": (2, 3),
    "RandomDataset": (0, 1),
    "RandomDatasetV2": (0, 1),
}


# Where the generator of their reshuffles is.
_GENERATOR_INPUT = {"ShuffleDatasetV3": 4, "ShuffleAndRepeatDatasetV2": 5}


def _folded(name: str, by_name: dict[str, Any]) -> int | None:
    """The number that an input of a node is; None where it is not made of constants.

    Inside of a function, a seed under a global one is an expression: `where(seed == 0 and
    seed2 == 0, 2**31 - 1, seed2)` (tensorflow/python/data/util/random_seed.py).
    """
    node = by_name.get(name.split(":")[0])
    if node is None:
        return None
    if node.op == "Const":
        return int(tf.make_ndarray(node.attr["value"].tensor))
    fold = _FOLDS.get(node.op)
    inputs = [_folded(i, by_name) for i in node.input if not i.startswith("^")]
    if fold is None or None in inputs:
        return None
    return int(fold(*inputs))


_FOLDS: dict[str, Callable[..., Any]] = {
    "Cast": lambda a: a,
    "Equal": lambda a, b: a == b,
    "Identity": lambda a: a,
    "LogicalAnd": lambda a, b: a and b,
    "Select": lambda c, a, b: a if c else b,
    "SelectV2": lambda c, a, b: a if c else b,
}


def _ordered(dataset: tf.data.Dataset) -> tf.data.Dataset:
    options = tf.data.Options()
    options.deterministic = True
    return dataset.with_options(options).prefetch(tf.data.AUTOTUNE)


def _input_of(node: tf.data.Dataset) -> tf.data.Dataset:
    below = keras_compat.dataset_input(node)
    assert below is not None, f"{type(node).__name__} transforms one dataset"
    return below


def _steps(dataset: tf.data.Dataset) -> int | None:
    cardinality = int(dataset.cardinality())
    if cardinality == tf.data.INFINITE_CARDINALITY:
        return INFINITE
    return None if cardinality < 0 else cardinality


def _element(arguments: tuple[Any, ...]) -> Any:
    """What map() passed as several arguments, as the one element that it was."""
    return arguments[0] if len(arguments) == 1 else arguments


def examples_of(batch: Any) -> tf.Tensor:
    """int64 [], the examples in a batch."""
    first = next(t for t in tf.nest.flatten(batch) if t is not None)
    if isinstance(first, tf.RaggedTensor):
        return first.nrows(out_type=tf.int64)
    if isinstance(first, tf.SparseTensor):
        return first.dense_shape[0]
    return tf.shape(first, out_type=tf.int64)[0]


def _split_locally(batches: tf.data.Dataset, sharding: Sharding) -> tf.data.Dataset:
    return batches.map(_as_it_is(lambda *b: _local_parts(_element(b), sharding)))


def _local_parts(batch: Any, sharding: Sharding) -> tuple[Any, ...]:
    """A worker's batch -> one batch for each of its replicas; example i goes to replica i mod L."""
    if sharding.local_replicas == 1:
        return (batch,)
    return tuple(
        tf.nest.map_structure(lambda t, d=d: _every(t, d, sharding.local_replicas), batch)
        for d in range(sharding.local_replicas)
    )


def _every(tensor: Any, start: int, step: int) -> Any:
    if isinstance(tensor, tf.RaggedTensor):
        return tf.gather(tensor, tf.range(start, tensor.nrows(), step))
    return tensor[start::step]


def _empty(spec: Any) -> Any:
    """A batch without examples."""

    def leaf(s: Any) -> Any:
        if isinstance(s, tf.RaggedTensorSpec):
            flat = tf.zeros([0, *[d or 0 for d in s.shape[s.ragged_rank + 1 :]]], s.dtype)
            splits: list[Any] = [np.zeros([1], np.int64)] * s.ragged_rank
            return tf.RaggedTensor.from_nested_row_splits(flat, splits)
        if isinstance(s, tf.SparseTensorSpec):
            return tf.SparseTensor(
                np.zeros([0, s.shape.rank], np.int64),
                tf.zeros([0], s.dtype),
                [0, *[d or 0 for d in s.shape[1:]]],
            )
        return tf.zeros([0, *[d or 0 for d in s.shape[1:]]], s.dtype)

    return tf.nest.map_structure(leaf, spec)


def _global_batch_size(dataset: tf.data.Dataset) -> int | None:
    """The size of all batches but the last, where a pipeline says it."""
    node: tf.data.Dataset | None = dataset
    while node is not None and isinstance(node, keras_compat.REBUILDABLE):
        if isinstance(node, keras_compat.Batch):
            arguments = keras_compat.batch_arguments(node)
            return None if arguments is None else arguments[0]
        if isinstance(node, keras_compat.Map):
            break
        node = keras_compat.dataset_input(node)
    return _static_batch_size(dataset.element_spec)


def _static_batch_size(spec: Any) -> int | None:
    first = tf.nest.flatten(spec)[0]
    size: int | None = first.shape[0]
    return size


# ---------------------------------------------------------------- what users pass to fit


@dataclasses.dataclass(frozen=True)
class Source:
    """The `x` of fit, evaluate or predict with what goes with it.

    `share` may be called once per pass: arrays that are shuffled get an order of their own for
    each epoch.
    """

    x: Any
    y: Any = None
    sample_weight: Any = None
    batch_size: int | None = None
    steps: int | None = None
    shuffle: Any = False
    class_weight: Any = None

    def __post_init__(self) -> None:
        if isinstance(self.x, tf.distribute.DistributedDataset):
            raise UsageError(
                "received a DistributedDataset: pass the tf.data.Dataset itself, batched by the "
                "global batch size; tfmw divides it."
            )
        if keras_compat.is_dataset(self.x) or self.is_function():
            for name in ("y", "sample_weight", "batch_size"):
                if getattr(self, name) is not None:
                    raise UsageError(
                        f"{name} was passed beside a dataset: expected the dataset's own elements "
                        "to hold it; remove the argument."
                    )

    def is_function(self) -> bool:
        """Whether `x` is a callable that takes an `InputContext`."""
        return (
            callable(self.x)
            and not keras_compat.is_dataset(self.x)
            and not isinstance(self.x, keras.utils.PyDataset)
            and not hasattr(self.x, "__array__")
        )

    def shard(self, sharding: Sharding, order: Order, skip: int = 0) -> Shard:
        """This worker's share.

        Args:
            order: where shuffles take their seeds from.
            skip: steps to leave out at the beginning.

        Raises:
            UsageError: an empty dataset, or one that cannot be divided.
        """
        if self.is_function():
            out = of_function(self.x, sharding, skip)
            if self.class_weight is not None:
                raise UsageError(
                    "class_weight goes with a dataset or arrays: a dataset function returns the "
                    "sample weights itself, as (x, y, sample_weight)."
                )
            return out
        hooks: dict[str, Any] = {}
        if keras_compat.is_dataset(self.x):
            dataset = self.x
            if self.class_weight is not None:
                # Weights depend on the label alone, so they may be looked up after the cut.
                weigh = keras_compat.make_class_weight_map(self.class_weight)
                out = Shard.of(dataset, sharding, order, skip)
                mapped = out.dataset.map(
                    _as_it_is(lambda parts, total: (tuple(weigh(*p) for p in parts), total))
                )
                spec = mapped.element_spec[0][0]
                out = dataclasses.replace(out, dataset=_ordered(mapped), element_spec=spec)
                _refuse_empty(out)
                return out
        else:
            dataset, hooks = self._read_by_keras(sharding, order)
        out = Shard.of(dataset, sharding, order, skip)
        _refuse_empty(out)
        return dataclasses.replace(out, **hooks)

    def _read_by_keras(
        self, sharding: Sharding, order: Order
    ) -> tuple[tf.data.Dataset, dict[str, Any]]:
        """Arrays, PyDataset, generators: Keras's own adapters make a dataset of global batches.

        Returns:
            (dataset, the hooks of the share).
        """
        options = {
            "batch_size": self.batch_size,
            "steps_per_epoch": self.steps,
            "shuffle": self.shuffle,
            "class_weight": self.class_weight,
        }
        x = self.x
        if isinstance(x, keras.utils.PyDataset):
            if self.shuffle and x.num_batches is not None:
                x = _Permuted(x, order.agree(order.seed))
                options["shuffle"] = False
        adapter = keras_compat.data_adapter(x, self.y, self.sample_weight, **options)
        # The permutation op of the array adapter takes its seed from the global one.
        mine = keras_compat.global_seed()
        seed = order.agree(mine)
        if sharding.replicas > 1 and seed is None:
            seed = order.agree(order.seed)
        if seed == mine:
            dataset = adapter.get_tf_dataset()
        else:
            tf.random.set_seed(seed)
            try:
                dataset = adapter.get_tf_dataset()
            finally:
                tf.random.set_seed(mine)
        hooks = {"on_epoch_begin": adapter.on_epoch_begin, "on_epoch_end": adapter.on_epoch_end}
        if isinstance(x, keras.utils.PyDataset):
            hooks["leave_epoch_out"] = functools.partial(_leave_epoch_out, x)
            if x.num_batches is not None:
                dataset = dataset.apply(tf.data.experimental.assert_cardinality(x.num_batches))
        return dataset, hooks

    @property
    def is_read_once(self) -> bool:
        """Whether Python code makes the batches: reading them a second time may change them."""
        return isinstance(self.x, keras.utils.PyDataset) or hasattr(self.x, "__next__")

    @property
    def reshuffled_by_keras(self) -> bool:
        """Whether each epoch needs a share of its own to get an order of its own."""
        is_array = not (
            keras_compat.is_dataset(self.x)
            or self.is_function()
            or isinstance(self.x, keras.utils.PyDataset)
            or hasattr(self.x, "__next__")
        )
        return bool(self.shuffle) and is_array and keras_compat.global_seed() is None


class _Permuted(keras.utils.PyDataset):
    """A PyDataset whose batches come in an order that every worker draws alike, anew each epoch."""

    def __init__(self, dataset: keras.utils.PyDataset, seed: int):
        super().__init__(
            workers=dataset.workers,
            use_multiprocessing=dataset.use_multiprocessing,
            max_queue_size=dataset.max_queue_size,
        )
        self._dataset = dataset
        self._random = np.random.default_rng(seed)
        self._order = self._random.permutation(len(self))

    @property
    def num_batches(self) -> int | None:
        number: int | None = self._dataset.num_batches
        return number

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        return self._dataset[int(self._order[index])]

    def on_epoch_begin(self) -> None:
        self._dataset.on_epoch_begin()

    def on_epoch_end(self) -> None:
        self._dataset.on_epoch_end()
        self._order = self._random.permutation(len(self))


def _leave_epoch_out(dataset: keras.utils.PyDataset) -> None:
    """The dataset's own part of an epoch: Keras's would begin to read, and keep what it read."""
    dataset.on_epoch_begin()
    dataset.on_epoch_end()


def _refuse_empty(share: Shard) -> None:
    if share.steps == 0:
        raise UsageError(
            "the dataset is empty: expected at least one batch; check its source, filters and "
            "take() or skip()."
        )


def steps_of(share: Shard, steps: int | None, what: str) -> int | None:
    """Steps of one epoch: what was asked for, else what the dataset has.

    Raises:
        UsageError: an infinite dataset, and no number of steps was given.
    """
    if steps is not None:
        return steps
    if share.steps == INFINITE:
        raise UsageError(
            f"the dataset is infinite and {what} was not given: pass {what}=..., or end the "
            "dataset with take()."
        )
    return share.steps
