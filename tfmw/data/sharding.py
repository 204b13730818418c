"""A global dataset -> this worker's shard of it.

    sharding = Sharding(workers=2, rank=0)
    shard = shard_dataset(dataset, sharding, Order(seed=7))
    for element in shard.dataset:
        parts, counts, total = step_of(element, sharding)  # this worker's parts of a global batch

Every example goes to exactly one replica, each global batch is the union of the replicas' parts,
and all workers make the same number of steps. Example j of a global batch goes to replica j mod R
(R replicas, `Sharding.replicas`), so the k-th global batch is the same for any number of workers. A
replica without an example gets a copy of a real one, which does not count.

There are five ways to shard, the cheapest first:

* `_by_index`: for arrays and `from_index`, where nothing is mapped before `batch`. The pipeline
  has indices in place of examples, and a worker copies or reads its own examples only.
* `_below_maps`: for a pipeline that ends in `batch`, with only maps, shuffles, repeats, takes and
  skips between its source and the batch. A map does not change the positions of elements, so
  examples are selected below the maps: each worker maps only its own examples. A worker computes
  the size of every global batch from the source's cardinality. If that is unknown (files, filters,
  generators), the workers add up their examples at each step.
* `_by_slices`: for all other pipelines, and arrays. Every worker runs the whole pipeline and keeps
  its rows of each global batch; `step_of` selects those of small batches within the step.
* `_by_batches`: if batches are not to be split. Batch j goes to replica j mod R, and R batches make
  a step, whose examples the workers add up.
* `shard_function`: for a callable that takes a `tf.distribute.InputContext` and returns the
  pipeline of that worker, batched per replica. Workers may have different amounts of data. `tfds`
  returns such a callable, with which each worker opens only its own files.

All but the last need the same order of elements on all workers: see `order.py`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfmw.data.batches import (
    deterministic,
    element_of,
    empty_batch,
    examples_of,
    filled,
    first_rows,
    global_batch_size,
    input_of,
    map_tensors,
    rows_from,
    rows_of,
    spec_of,
    static_batch_size,
    steps_in,
    without_autograph,
    without_optionals,
)
from tfmw.data.by_index import Indexed
from tfmw.data.order import ordered, reshuffles_of
from tfmw.data.reshuffles import Repetition, Reshuffles
from tfmw.data.rows import rows_under
from tfmw.data.seek import seek
from tfmw.data.values import INFINITE, Order, Shard, Sharding, ShardSizes
from tfmw.data.zips import joined
from tfmw.errors import UsageError
from tfmw.keras_compat import datasets, rebuilding


def shard_dataset(
    dataset: tf.data.Dataset,
    sharding: Sharding,
    order: Order,
    skip: int = 0,
    read_ahead: bool = True,
    split: bool = True,
) -> Shard:
    """The shard of a dataset that is batched by the global batch size.

    Args:
        dataset: elements are batches: structures of tensors with one leading dimension.
        sharding: how global batches are divided.
        order: the source of the seeds of shuffles.
        skip: number of global batches to skip at the beginning.
        read_ahead: whether a batch may be read before it is asked for.
        split: whether batches are divided between replicas.

    Raises:
        UsageError: the dataset is not batched, or workers have different datasets.
    """
    _refuse_own_elements(dataset, sharding)
    dataset = without_optionals(dataset)
    if split or sharding.replicas == 1:
        shard = _divided(dataset, sharding, order, skip, read_ahead)
    else:
        whole, reshuffles = _from(dataset, order, skip)
        shard = _by_batches(whole, sharding, global_batch_size(dataset))
        shard = dataclasses.replace(shard, reshuffles=reshuffles)
    if shard.reshuffles:
        shard.reshuffles.ahead = rebuilding.may_begin_again(dataset)
        shard.reshuffles.repetition = _repetition(dataset)
    return shard


def at_most_once(
    dataset: tf.data.Dataset,
) -> Callable[[tf.distribute.InputContext], tf.data.Dataset]:
    """A dataset of tf.data's service, with the promise of the service in place of tfmw's.

        served = files.apply(distribute("parallel_epochs", "grpc://...", job_name="train"))
        tfmw.fit(model, tfmw.data.at_most_once(served), epochs=5)

    Each worker trains on batches that the service gives to it. A lost worker of the service takes
    its elements with it, a resumed run begins a new pass, and the order differs in each run.

    Args:
        dataset: batched by the batch size of one replica; with a `job_name`, so that workers share
            its elements.

    Returns:
        A dataset function, for `fit` and `evaluate`.
    """

    def read(context: tf.distribute.InputContext) -> tf.data.Dataset:
        return dataset

    read._tfmw_at_most_once = True  # type: ignore[attr-defined]
    return read


def _refuse_own_elements(dataset: tf.data.Dataset, sharding: Sharding) -> None:
    """Raises if the workers' copies of a pipeline would have different elements."""
    if datasets.reads_a_service(dataset):
        raise UsageError(
            "the dataset comes from tf.data's service, which promises each example at most once, "
            "in no order, and cannot go back to a position: a resumed run would differ. Pass the "
            "dataset before distribute(), which tfmw divides; or accept the weaker promise by "
            "tfmw.data.at_most_once(dataset), batched by the batch size of one replica."
        )
    if sharding.workers > 1 and (kind := rebuilding.selects_at_random(dataset)) is not None:
        raise UsageError(
            f"the {kind} of the dataset chooses elements by random numbers without a seed: each "
            "worker would have others, and lose examples or read them twice. Choose by "
            "tf.random.stateless_uniform of a value of the element; in place of "
            "to_tf_dataset(shuffle=True) pass tfmw.data.from_index(dataset).shuffle(10_000)."
        )


def _divided(
    dataset: tf.data.Dataset, sharding: Sharding, order: Order, skip: int, read_ahead: bool
) -> Shard:
    if sharding.replicas == 1 and not _reads_rows(dataset):
        whole, reshuffles = _from(dataset, order, skip)
        return dataclasses.replace(_whole(whole, read_ahead), reshuffles=reshuffles)
    below_maps = _below_maps(dataset, sharding, order, skip)
    if below_maps is not None:
        return below_maps
    whole, reshuffles = _from(dataset, order, skip)
    shard = _by_slices(whole, sharding, read_ahead)
    return dataclasses.replace(shard, reshuffles=reshuffles)


def _reads_rows(dataset: tf.data.Dataset) -> bool:
    """Whether the rows of a batch can be read in one call, see `rows.py`."""
    whole = _Batched.of(dataset)
    indexed = None if whole is None else Indexed.of(whole.source)
    return indexed is not None and indexed.rows is not None


def _from(
    dataset: tf.data.Dataset, order: Order, position: int
) -> tuple[tf.data.Dataset, Reshuffles]:
    """The `ordered` pipeline from some element on."""
    whole, reshuffles = ordered(dataset, order)
    return seek(whole, position, reshuffles, order), reshuffles


def _repetition(dataset: tf.data.Dataset) -> Repetition | None:
    """The upper `repeat` of a pipeline; None if there is none, or if its length is unknown."""
    per_step, node = 1, dataset
    above = (*datasets.Map, *datasets.Batch, *datasets.Prefetch, *datasets.OptionsNode)
    while isinstance(node, above):
        if isinstance(node, datasets.Batch):
            arguments = datasets.batch_arguments(node)
            if arguments is None:
                return None
            per_step *= arguments[0]
        node = input_of(node)
    if not isinstance(node, datasets.Repeat):
        return None
    length = steps_in(input_of(node))
    return None if length in (None, INFINITE, 0) else Repetition(length, per_step)


def shard(dataset: tf.data.Dataset, input_context: tf.distribute.InputContext) -> tf.data.Dataset:
    """This worker's shard of a dataset batched by the global batch size.

    For use inside a function of an `InputContext`, where part of a pipeline is global:

        def dataset_fn(context):
            return tfmw.data.shard(global_dataset(), context).map(augment)

    Args:
        dataset: elements are batches: structures of tensors with leading dimension [global batch].
        input_context: the argument of tf.distribute's dataset functions.

    Returns:
        A dataset of batches [about global batch / number of replicas]. The batches of all workers
        together contain each example of `dataset` once. Shuffles without a seed get a fixed one.
    """
    workers = input_context.num_input_pipelines
    local_replicas = max(1, input_context.num_replicas_in_sync // workers)
    sharding = Sharding(workers, input_context.input_pipeline_id, local_replicas)
    local = shard_dataset(dataset, sharding, Order())
    batches = local.dataset.flat_map(
        without_autograph(lambda *element: _one_by_one(*step_of(element, sharding)[:2]))
    )
    has_examples = without_autograph(lambda *b: examples_of(b) > 0)
    return batches.filter(has_examples) if local.size_known else batches.take_while(has_examples)


def _one_by_one(parts: tuple[Any, ...], counts: tf.Tensor) -> tf.data.Dataset:
    """A dataset of the examples that count of each part."""
    own = [first_rows(part, counts[d]) for d, part in enumerate(parts)]
    out = tf.data.Dataset.from_tensors(own[0])
    for part in own[1:]:
        out = out.concatenate(tf.data.Dataset.from_tensors(part))
    return out


def _whole(dataset: tf.data.Dataset, read_ahead: bool = True) -> Shard:
    """The shard of the only replica."""
    batches = _divided_by_steps(dataset)
    even = ShardSizes(uneven=False, empty=False)
    return Shard(
        batches.prefetch(tf.data.AUTOTUNE) if read_ahead else batches,
        steps_in(dataset),
        even,
        even,
        spec_of(dataset),
        global_batch_size(dataset),
    )


# ---------------------------------------------------------------- below the maps


@dataclasses.dataclass(frozen=True)
class _Batched:
    """The parts of a pipeline that ends in `batch`.

    Attributes:
        source: single examples before the maps.
        maps: map nodes to apply to them, the first one first.
        size: number of examples of a global batch.
        drop_remainder: whether a last batch that is not full is dropped.
        spec: of a batch.
    """

    source: tf.data.Dataset
    maps: list[tf.data.Dataset]
    size: int
    drop_remainder: bool
    spec: Any

    @classmethod
    def of(cls, dataset: tf.data.Dataset) -> _Batched | None:
        """The parts; None for other pipelines, and if sharding below the maps does not pay."""
        node = dataset
        while isinstance(node, (*datasets.Prefetch, *datasets.OptionsNode)):
            node = input_of(node)
        if not isinstance(node, datasets.Batch):
            return None
        arguments = datasets.batch_arguments(node)
        if arguments is None:
            return None
        elements = input_of(node)
        source, selections, maps = _peel(elements)
        leaves = tf.nest.flatten(source.element_spec)
        if any(isinstance(s, tf.RaggedTensorSpec) for s in leaves):
            # After a map, batch() would make rows of a ragged tensor dense.
            return None
        if not maps and steps_in(elements) is None:
            # Without maps nothing is saved, and unknown totals cost a reduction at each step.
            return None
        for selection in reversed(selections):
            source = rebuilding.rebuilt(selection, source)
        return cls(source, maps[::-1], *arguments, spec_of(node))


def _below_maps(
    dataset: tf.data.Dataset, sharding: Sharding, order: Order, skip: int
) -> Shard | None:
    """The shard of a pipeline that ends in `batch`; None for pipelines of `_by_slices`."""
    whole = _Batched.of(dataset)
    if whole is None:
        return None
    indexed = Indexed.of(whole.source)
    if not whole.maps and indexed is not None:
        return _by_index(whole, indexed, sharding, order, skip)
    size = whole.size
    if size < sharding.replicas:
        return None  # some replicas have no example in any batch: they take others'
    rows = None if indexed is None else indexed.rows
    source = whole.source if indexed is None or rows is None else indexed.indices
    # Whole batches are skipped, so that the other examples keep their positions.
    source, reshuffles = _from(source, order, skip * size)
    count = steps_in(source)
    if count is None and whole.drop_remainder:
        # Only the sum over all workers shows whether the last batch is full.
        return None
    known = count is not None and count != INFINITE and not whole.drop_remainder
    elements = _local_elements(source, size, sharding, count if known else None)
    own = sharding.local_rows(size)
    if rows is not None:
        elements = elements.batch(own).map(without_autograph(rows.examples), **rows.parallel)
        elements = elements.unbatch()
    for function in whole.maps:
        elements = rebuilding.rebuilt(function, elements)
    full = last = ShardSizes.of(size, sharding)
    batches = elements.batch(own, drop_remainder=count is not None and not known)
    if count is None:
        parts = batches.map(
            without_autograph(lambda *b: _alternating(element_of(batches)(b), sharding))
        )
        shard = _with_unknown_totals(parts, whole.spec, sharding, size)
        return dataclasses.replace(shard, reshuffles=reshuffles)
    if count == INFINITE:
        steps: int = INFINITE
        totals = tf.data.Dataset.from_tensors(np.int64(size)).repeat()
    else:
        remainder = 0 if whole.drop_remainder else count % size
        last = ShardSizes.of(remainder or size, sharding)
        steps = count // size + (remainder > 0)
        totals = tf.data.Dataset.range(steps).map(
            without_autograph(lambda k: tf.minimum(np.int64(size), count - k * size))
        )

    def divided(batch: Any, total: tf.Tensor) -> Any:
        parts, _ = _alternating(batch, sharding)
        return parts, sharding.counts(total), total

    zipped = tf.data.Dataset.zip((batches, totals)).map(without_autograph(divided))
    return Shard(deterministic(zipped), steps, full, last, whole.spec, size, reshuffles=reshuffles)


def _alternating(batch: Any, sharding: Sharding) -> tuple[tuple[Any, ...], tf.Tensor]:
    """A worker's batch -> (one for each local replica, int64 [L] how many examples each has).

    Example i goes to local replica i mod L; a replica without an example gets the first one.
    """
    replicas = sharding.local_replicas
    total = examples_of(batch)
    counts = tf.stack([(total - d + replicas - 1) // replicas for d in range(replicas)])
    if replicas == 1:
        return (batch,), counts
    parts = tuple(
        map_tensors(functools.partial(rows_from, start=d, step=replicas), batch)
        for d in range(replicas)
    )
    return parts, counts


def _by_index(
    whole: _Batched, indexed: Indexed, sharding: Sharding, order: Order, skip: int
) -> Shard:
    """The shard of a pipeline over arrays: a worker copies its own examples only."""
    size = whole.size
    indices, reshuffles = _from(indexed.indices, order, skip * size)
    count = steps_in(indices)
    batches = indices.batch(size, whole.drop_remainder)

    always_full = whole.drop_remainder or count == INFINITE

    def local_batch(indices: tf.Tensor) -> Any:
        total = tf.size(indices, out_type=tf.int64)
        parts = []
        for replica in sharding.local:
            own = rows_from(indices, replica, sharding.replicas)
            if always_full:
                own.set_shape([max(1, len(range(replica, size, sharding.replicas)))])
            parts.append(indexed.examples(own))
        return tuple(parts), sharding.counts(total), total

    last = full = ShardSizes.of(size, sharding)
    steps = steps_in(batches)
    assert count is not None and steps is not None  # noqa: PT018  (of arrays both are known)
    if count != INFINITE and not whole.drop_remainder:
        last = ShardSizes.of(count % size or size, sharding)
    parallel = {} if indexed.rows is None else indexed.rows.parallel
    dataset = deterministic(batches.map(without_autograph(local_batch), **parallel))
    return Shard(dataset, steps, full, last, whole.spec, size, reshuffles=reshuffles)


def _local_elements(
    source: tf.data.Dataset, size: int, sharding: Sharding, count: int | None
) -> tf.data.Dataset:
    """The elements at this worker's positions of each global batch of `size`.

    Args:
        count: number of elements, if known. A worker without an example in the last batch gets the
            last element.
    """
    last, remainder = divmod(count or 0, size)
    more = bool(remainder) and not sharding.local_rows(remainder)
    last = last * size + remainder - 1
    if size % sharding.replicas == 0 and sharding.local_replicas == 1 and not more:
        return source.shard(sharding.replicas, sharding.rank)

    def is_local(j: tf.Tensor, _: Any) -> tf.Tensor:
        own = sharding.is_local(j % size)
        return own | tf.equal(j, last) if more else own

    local = source.enumerate().filter(without_autograph(is_local))
    return local.map(without_autograph(lambda _, element: element))


_SELECTIONS = (
    *datasets.Shuffle,
    *datasets.Repeat,
    *datasets.Take,
    *datasets.Skip,
)


def _peel(
    elements: tf.data.Dataset,
) -> tuple[tf.data.Dataset, list[tf.data.Dataset], list[tf.data.Dataset]]:
    """Removes maps and selections from the end of a pipeline of single examples.

    Returns:
        (the remaining pipeline, the removed selections, the removed maps), the last ones first.
        Selections do not depend on the elements and maps do not move them, so all selections may
        run before all maps.
    """
    selections: list[tf.data.Dataset] = []
    maps: list[tf.data.Dataset] = []
    lowest_map = (elements, 0, 0)
    node = elements
    while True:
        if rows_under(node) is not None:
            break
        node = joined(node) or node
        if isinstance(node, datasets.Map) and datasets.is_pure(node):
            maps.append(node)
            lowest_map = (input_of(node), len(selections), len(maps))
        elif isinstance(node, _SELECTIONS):
            selections.append(node)
        elif not isinstance(node, (*datasets.Prefetch, *datasets.OptionsNode)):
            break
        node = input_of(node)
    # Selections below the lowest map need not be removed.
    source, number_of_selections, number_of_maps = lowest_map
    return source, selections[:number_of_selections], maps[:number_of_maps]


# ---------------------------------------------------------------- by slices


def _by_slices(dataset: tf.data.Dataset, sharding: Sharding, read_ahead: bool) -> Shard:
    """Every worker runs the whole pipeline and keeps its rows of each global batch."""
    spec = spec_of(dataset)
    _refuse_scalars(spec)
    zipped = _refuse_uneven_zip(dataset, sharding)
    batch_size = global_batch_size(dataset)
    if not zipped:
        _refuse_other_rows(spec, batch_size)
    if not zipped and _bytes(spec, batch_size) <= _DIVIDED_BY_STEPS:
        steps = _divided_by_steps(dataset)
    else:
        element = element_of(dataset)

        def divided(*arguments: Any) -> Any:
            return _slices(element(arguments), sharding, zipped)

        steps = dataset.map(
            without_autograph(divided),
            num_parallel_calls=tf.data.AUTOTUNE if read_ahead else None,
            deterministic=True if read_ahead else None,
        )
    size = static_batch_size(spec)
    sizes = ShardSizes(True, True) if size is None else ShardSizes.of(size, sharding)
    steps = deterministic(steps, read_ahead)
    return Shard(steps, steps_in(dataset), sizes, sizes, spec, batch_size)


# Bytes of a global batch up to which a step divides it, which takes less than a millisecond.
_DIVIDED_BY_STEPS = 1 << 20


def _divided_by_steps(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Elements for `step_of`. No map: each new iterator instantiates its function (4 to 20 ms)."""
    return tf.data.Dataset.zip(((dataset,),))


def step_of(element: tuple[Any, ...], sharding: Sharding) -> tuple[Any, Any, Any]:
    """(parts, counts, total) of an element of `Shard.dataset`."""
    if len(element) == 3:
        return element
    ((batch,),) = element
    if sharding.replicas == 1:
        total = examples_of(batch)
        return (batch,), total[None], total
    with tf.device("cpu:0"):  # where the batch is
        return _slices(batch, sharding)


def _slices(batch: Any, sharding: Sharding, zipped: bool = False) -> tuple[Any, Any, Any]:
    """A global batch -> (parts, counts, total)."""
    total = examples_of(batch)
    check = _rows_checked(batch, total, sharding.replicas if zipped else None)
    with tf.control_dependencies(check):
        parts = tuple(
            map_tensors(functools.partial(rows_from, start=replica, step=sharding.replicas), batch)
            for replica in sharding.local
        )
    return parts, sharding.counts(total), total


def _bytes(spec: Any, batch_size: int | None) -> float:
    """The bytes of a batch; infinite if unknown."""
    found = 0.0
    for leaf in tf.nest.flatten(spec):
        if leaf is None:
            continue
        if not isinstance(leaf, tf.TensorSpec) or batch_size is None or leaf.dtype == tf.string:
            return math.inf
        row = leaf.shape[1:].num_elements()
        found += math.inf if row is None else batch_size * row * leaf.dtype.size
    return found


def _refuse_scalars(spec: Any) -> None:
    for path, leaf in keras.tree.flatten_with_path(spec):
        if leaf is not None and leaf.shape.rank == 0:
            raise UsageError(
                f"the dataset is not batched: its elements are {spec}; end it in "
                ".batch(global_batch_size)."
                if all(s is None or s.shape.rank == 0 for s in tf.nest.flatten(spec))
                else f"{_name(path)} of a batch is a scalar, and replicas divide each batch by its "
                f"rows. {WHOLE_BATCHES}"
            )


WHOLE_BATCHES = (
    "If that is no mistake, pass split_batch=False: each replica then takes a whole batch."
)


def _name(path: tuple[Any, ...]) -> str:
    """The place of a tensor in a batch."""
    return "element" + "".join(f"[{key!r}]" for key in path)


def _other_rows(name: str, rows: Any, first: str, total: Any) -> str:
    return (
        f"a batch has {rows} rows in {name} and {total} in {first}, and replicas divide each batch "
        f"by its rows. {WHOLE_BATCHES}"
    )


def _refuse_other_rows(spec: Any, size: int | None) -> None:
    """Raises before the first step if components are known to have different numbers of rows."""
    first = None
    for path, leaf in keras.tree.flatten_with_path(spec):
        if leaf is None:
            continue
        rows = leaf.shape[0]
        first = first or _name(path)
        size = rows if size is None and first == _name(path) else size
        if None not in (rows, size) and rows != size:
            raise UsageError(_other_rows(_name(path), rows, first, size))


def _rows_checked(batch: Any, total: tf.Tensor, zipped: int | None) -> list[Any]:
    """Ops that fail if a component has other rows than the first one, as `_other_rows` says.

    Args:
        zipped: a number of replicas: each component may have as many rows as they can divide, as in
            labelled and unlabelled examples, zipped. One weight is right for both only then.
    """
    checks = []
    named = [(_name(path), t) for path, t in keras.tree.flatten_with_path(batch) if t is not None]
    for name, tensor in named[1:]:
        rows = rows_of(tensor)
        if tf.get_static_value(rows) is not None and tf.get_static_value(
            rows
        ) == tf.get_static_value(total):
            continue
        right = rows == total
        if zipped:
            right |= (rows % zipped == 0) & (total % zipped == 0)
            data = [_ZIPPED, rows, total, zipped]
        else:
            message = _other_rows(name, "{}", named[0][0], "{}")
            data = [tf.strings.format(message, (rows, total))]
        checks.append(tf.debugging.Assert(right, data))
    return checks


_ZIPPED = (
    "tensors of one batch have different numbers of examples, and the replicas cannot divide each "
    "evenly: batch each part by a multiple of the number of replicas, with drop_remainder=True. "
    "Received, expected at first, replicas:"
)


def _refuse_uneven_zip(dataset: tf.data.Dataset, sharding: Sharding) -> bool:
    """Whether batches are zipped, of parts with different numbers of examples.

    Raises before the first step if `_rows_checked` would fail in a later one.
    """
    node = dataset
    passed = (*_SELECTIONS, *datasets.Map, *datasets.Prefetch, *datasets.OptionsNode)
    mapped = False
    while isinstance(node, passed):
        mapped |= isinstance(node, datasets.Map)
        node = input_of(node)
    if not isinstance(node, datasets.Zip):
        return False
    inputs = datasets.dataset_inputs(node)
    sizes = [global_batch_size(part) for part in inputs]
    if len(set(sizes)) == 1 and None not in sizes:
        return False
    if None in sizes or mapped:  # a map may leave parts out
        return True
    lengths = [steps_in(part) for part in inputs]
    steps = min((length for length in lengths if length not in (None, INFINITE)), default=None)
    for part, size, length in zip(inputs, sizes, lengths, strict=True):
        # zip ends with the shortest part: the last batch of a longer part is not read.
        last = _last_batch(part) if length == steps else None
        for rows in (size, last):
            if rows is not None and rows % sharding.replicas:
                raise UsageError(
                    f"the dataset is zipped from batches of {sizes} examples, and "
                    f"{sharding.replicas} replicas cannot divide {rows} evenly: batch each part by "
                    "a multiple of the number of replicas, with drop_remainder=True."
                )
    return True


def _last_batch(dataset: tf.data.Dataset) -> int | None:
    """The size of the last batch; None if unknown."""
    if not isinstance(dataset, datasets.Batch):
        return None
    arguments = datasets.batch_arguments(dataset)
    count = steps_in(input_of(dataset))
    if arguments is None or count is None or count == INFINITE:
        return None
    size, drop_remainder = arguments
    return size if drop_remainder else count % size or size


# ---------------------------------------------------------------- by a function of the user's


def shard_function(
    dataset_fn: Callable[[tf.distribute.InputContext], tf.data.Dataset],
    sharding: Sharding,
    skip: int = 0,
    index_dir: str | None = None,
) -> Shard:
    """The shard that a user's function of an `InputContext` returns.

    Args:
        dataset_fn: returns this worker's pipeline, batched by the batch size of one replica.
        sharding: what the `InputContext` describes.
        skip: number of steps to skip at the beginning.
        index_dir: see `Order`.

    Raises:
        UsageError: the function returns something else.
    """
    context = tf.distribute.InputContext(
        num_input_pipelines=sharding.workers,
        input_pipeline_id=sharding.rank,
        num_replicas_in_sync=sharding.replicas,
    )
    dataset = dataset_fn(context)
    if not datasets.is_dataset(dataset):
        raise UsageError(
            f"the dataset function returned {type(dataset).__name__}: expected a tf.data.Dataset, "
            "this worker's pipeline, batched by the batch size of one replica."
        )
    if getattr(dataset_fn, "_tfmw_at_most_once", False):
        skip = 0  # the service has no position
    else:
        _refuse_own_elements(dataset, Sharding())
    reshuffles = reshuffles_of(dataset)
    own = Order(index_dir=index_dir)  # other workers may have other pipelines
    rest = seek(without_optionals(dataset), skip * sharding.local_replicas, reshuffles, own)
    return dataclasses.replace(_of_function(rest, sharding), reshuffles=reshuffles)


def _of_function(dataset: tf.data.Dataset, sharding: Sharding) -> Shard:
    local_replicas = sharding.local_replicas
    if sharding.replicas == 1:
        return _whole(dataset)
    spec = spec_of(dataset)
    if local_replicas == 1:
        element = element_of(dataset)
        return _with_unknown_totals(
            dataset.map(without_autograph(lambda *b: counted((element(b),)))), spec, sharding, None
        )
    empty = tf.data.Dataset.from_tensors(empty_batch(spec)).repeat()
    streams = tuple(
        dataset.shard(local_replicas, d).concatenate(empty) for d in range(local_replicas)
    )
    steps = tf.data.Dataset.zip(streams).map(without_autograph(lambda *parts: counted(parts)))
    some_examples = without_autograph(lambda _, counts: tf.reduce_any(counts > 0))
    return _with_unknown_totals(steps.take_while(some_examples), spec, sharding, None)


def counted(parts: tuple[Any, ...]) -> tuple[tuple[Any, ...], tf.Tensor]:
    """(parts, int64 [L] how many examples each has)."""
    return parts, tf.stack([examples_of(part) for part in parts])


# ---------------------------------------------------------------- by batches


def _by_batches(dataset: tf.data.Dataset, sharding: Sharding, size: int | None) -> Shard:
    """Each replica takes whole batches, R of which make a step."""
    local, count = sharding.local_replicas, steps_in(dataset)
    spec = spec_of(dataset)
    remainder = 0 if count in (None, INFINITE) else count % sharding.replicas
    # A worker without a batch in the last step gets the last one, which does not count.
    more = 0 < remainder <= sharding.local.start
    last_batch = -1 if count is None else count - 1

    def is_read(j: tf.Tensor, _: Any) -> tf.Tensor:
        own = sharding.is_local(j)
        return own | tf.equal(j, last_batch) if more else own

    def with_count(j: tf.Tensor, batch: Any) -> Any:
        return batch, tf.where(sharding.is_local(j), examples_of(_labels(batch)), 0)

    batches = dataset.enumerate().filter(without_autograph(is_read))
    batches = batches.map(without_autograph(with_count))
    if local == 1:
        steps = batches.map(without_autograph(lambda batch, count: ((batch,), count[None])))
    else:
        others = tf.data.Dataset.from_tensors((empty_batch(spec), np.int64(0))).repeat(local)

        def together(*window: Any) -> Any:
            # A window is a dataset of each tensor; the last one may be short.
            whole = tf.data.Dataset.zip(window).concatenate(others)
            parts, counts = zip(
                *(whole.skip(d).take(1).get_single_element() for d in range(local)), strict=True
            )
            return tuple(parts), tf.stack(counts)

        steps = batches.window(local).map(without_autograph(together))
    shard = _with_unknown_totals(steps, spec, sharding, size, whole=True)
    if count is None:
        return shard
    full = ShardSizes(uneven=True, empty=False)
    if count == INFINITE:
        return dataclasses.replace(shard, steps=INFINITE, full=full, last=full)
    last = ShardSizes(uneven=True, empty=remainder > 0)
    steps_of_pass = -(-count // sharding.replicas)
    return dataclasses.replace(shard, steps=steps_of_pass, full=full, last=last)


def _labels(batch: Any) -> Any:
    """The part of a batch with one row for each example: its labels, if it has any."""
    _, y, _ = keras.utils.unpack_x_y_sample_weight(batch)
    return batch if not tf.nest.flatten(y) or y is None else y


def _with_unknown_totals(
    steps: tf.data.Dataset, spec: Any, sharding: Sharding, size: int | None, whole: bool = False
) -> Shard:
    """A shard whose totals the replicas add up step by step.

    Args:
        steps: elements (parts, counts).
        whole: whether a replica without an example needs a whole batch.
    """
    local = sharding.local_replicas
    empty: Any = tuple(empty_batch(spec) for _ in range(local)), np.zeros([local], np.int64)
    endless = steps.concatenate(tf.data.Dataset.from_tensors(empty).repeat())
    dataset = filled(endless, spec, whole).map(without_autograph(lambda p, c: (p, c, np.int64(-1))))
    sizes = ShardSizes(uneven=True, empty=True)
    return Shard(deterministic(dataset), None, sizes, sizes, spec, size, size_known=False)
