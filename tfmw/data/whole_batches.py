"""Shards of batches that are read whole: some of their rows, whole ones, or a user's function's.

`sharding` describes the ways to shard.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfmw.compat import datasets
from tfmw.compat.pipelines import INFINITE, MOVES, Pipeline
from tfmw.data.batches import (
    IN_PARALLEL,
    configured,
    examples_of,
    filled,
    kept_trace,
    map_elements,
    parts_of,
    rows_of,
    tensors_of,
    with_nones,
    without_autograph,
    without_optionals,
    zeros,
)
from tfmw.data.comparison import refuse_own_elements
from tfmw.data.order import reshuffles_of
from tfmw.data.seek import seek
from tfmw.data.values import Shard, Sharding, ShardSizes, SharedOrder
from tfmw.errors import UsageError


def of_one_replica(pipeline: Pipeline, read_ahead: bool = True) -> Shard:
    """The shard of the only replica."""
    batches = divided_by_steps(pipeline.dataset)
    even = ShardSizes(uneven=False, empty=False)
    tuned = pipeline.is_tunable
    return Shard(
        configured(batches, in_order=False, tuned=tuned, read_ahead=read_ahead),
        pipeline.length,
        even,
        even,
        pipeline.spec,
        pipeline.batch_size,
    )


def by_slices(pipeline: Pipeline, sharding: Sharding, read_ahead: bool) -> Shard:
    """Selects this worker's rows of each global batch; every worker runs the whole pipeline."""
    spec = pipeline.spec
    _refuse_scalars(spec)
    zipped = _refuse_uneven_zip(pipeline, sharding)
    if not zipped:
        _refuse_other_rows(spec, pipeline.batch_size)
    small = not zipped and is_small(spec, pipeline.batch_size)
    if small:
        steps = divided_by_steps(pipeline.dataset)
    else:
        steps = map_elements(
            pipeline.dataset,
            kept_trace(_slices, sharding, zipped),
            **(IN_PARALLEL if read_ahead else {}),
        )
    rows = pipeline.static_rows
    sizes = ShardSizes(True, True) if rows is None else ShardSizes.of(rows, sharding)
    tuned = not small or pipeline.is_tunable
    steps = configured(steps, tuned=tuned, read_ahead=read_ahead)
    return Shard(steps, pipeline.length, sizes, sizes, spec, pipeline.batch_size)


# Bytes of a global batch that take less than a millisecond to copy.
_SMALL = 1 << 20


def divided_by_steps(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Elements for `step_of`. No map: iterators take 4 to 20 ms to instantiate its function."""
    return tf.data.Dataset.zip(((dataset,),))


def step_of(element: tuple[Any, ...], sharding: Sharding) -> tuple[Any, Any, Any]:
    """(parts, counts, total) of an element of `Shard.dataset`."""
    if len(element) == 3:
        return element
    ((batch,),) = element
    if sharding.replicas == 1:
        total = examples_of(batch)
        return (batch,), total[None], total
    with tf.device("cpu:0"):  # the device of the batch
        return _slices(sharding, False, batch)


def _slices(sharding: Sharding, zipped: bool, batch: Any) -> tuple[Any, Any, Any]:
    """A global batch -> (parts, counts, total)."""
    total = examples_of(batch)
    check = _rows_checked(batch, total, sharding.replicas if zipped else None)
    with tf.control_dependencies(check):
        return *parts_of(batch, sharding), total


def is_small(spec: Any, batch_size: int | None) -> bool:
    """Whether the time to copy a global batch is negligible."""
    return _bytes(spec, batch_size) <= _SMALL


def _bytes(spec: Any, batch_size: int | None) -> float:
    """Bytes of a batch; infinite if unknown."""
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
            only_scalars = all(s is None or s.shape.rank == 0 for s in tf.nest.flatten(spec))
            raise UsageError(
                f"the dataset is not batched: its elements are {spec}; end it in "
                ".batch(global_batch_size)."
                + ("" if only_scalars else _SCALAR_IN_A_BATCH.format(_name(path)))
            )


_SCALAR_IN_A_BATCH = (
    " If they are batches that have a scalar in {}, pass split_batch=False: each replica then "
    "takes a whole batch."
)
WHOLE_BATCHES = (
    "If that is no mistake, pass split_batch=False: each replica then takes a whole batch."
)


def _name(path: tuple[Any, ...]) -> str:
    """Name of a tensor's place in a batch."""
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
    """Ops that fail if a component has another number of rows than the first; see `_other_rows`.

    Args:
        zipped: the number of replicas, if components may have different numbers of rows, as zipped
            labelled and unlabelled examples have. Replicas must divide each number, so that one
            weight is right for all components.
    """
    checks = []
    named = [(_name(path), t) for path, t in keras.tree.flatten_with_path(batch) if t is not None]
    for name, tensor in named[1:]:
        rows = rows_of(tensor)
        known = tf.get_static_value(rows)
        if known is not None and known == tf.get_static_value(total):
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


def _refuse_uneven_zip(pipeline: Pipeline, sharding: Sharding) -> bool:
    """Whether batches are zipped from parts with different numbers of examples.

    Raises before the first step if `_rows_checked` would fail in a later one.
    """
    above = pipeline.beneath(MOVES)
    node = above.beneath(("map", *MOVES))
    if node.kind != "zip":
        return False
    sizes = [part.batch_size for part in node.inputs]
    if len(set(sizes)) == 1 and None not in sizes:
        return False
    if None in sizes or above is not node:  # a map may omit parts
        return True
    lengths = [part.length for part in node.inputs]
    steps = min((length for length in lengths if length not in (None, INFINITE)), default=None)
    for part, size, length in zip(node.inputs, sizes, lengths, strict=True):
        # zip ends with the shortest part: the last batch of a longer part is not read
        last = _last_batch(part) if length == steps else None
        for rows in (size, last):
            if rows is not None and rows % sharding.replicas:
                raise UsageError(
                    f"the dataset is zipped from batches of {sizes} examples, and "
                    f"{sharding.replicas} replicas cannot divide {rows} evenly: batch each part by "
                    "a multiple of the number of replicas, with drop_remainder=True."
                )
    return True


def _last_batch(part: Pipeline) -> int | None:
    """The size of the last batch; None if unknown."""
    count = part.input.length if part.kind == "batch" else None
    if count is None or count == INFINITE:
        return None
    return part.size if part.drop_remainder else count % part.size or part.size


# ---------------------------------------------------------------- not split


def shard_function(
    dataset_fn: Callable[[tf.distribute.InputContext], tf.data.Dataset],
    sharding: Sharding,
    skip: int = 0,
    index_dir: str | None = None,
) -> Shard:
    """The shard that a user's function of an `InputContext` returns.

    Args:
        dataset_fn: returns this worker's pipeline, batched by the batch size of one replica.
        sharding: the division that the `InputContext` describes.
        skip: number of steps to skip at the beginning.
        index_dir: see `SharedOrder`.

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
    if is_at_most_once(dataset_fn):
        skip = 0  # the service has no positions
    else:
        refuse_own_elements(Pipeline.of(dataset), Sharding())
    pipeline = Pipeline.of(without_optionals(dataset))
    reshuffles = reshuffles_of(pipeline)
    own = SharedOrder(index_dir=index_dir)  # other workers may have other pipelines
    if skip:
        pipeline = Pipeline.of(seek(pipeline, skip * sharding.local_replicas, reshuffles, own))
    shard = _of_function(pipeline, sharding)
    shard.reshuffles = reshuffles
    return shard


def is_at_most_once(x: Any) -> bool:
    """Whether data is the result of `at_most_once`."""
    return bool(getattr(x, "_tfmw_at_most_once", False))


def _of_function(pipeline: Pipeline, sharding: Sharding) -> Shard:
    if sharding.replicas == 1:
        return of_one_replica(pipeline)
    batches = map_elements(pipeline.dataset, lambda batch: (batch, examples_of(batch)))
    steps = _taken_together(batches, pipeline.spec, sharding.local_replicas)
    return with_unknown_totals(steps, pipeline.spec, sharding, None)


def by_batches(pipeline: Pipeline, sharding: Sharding, size: int | None, read_ahead: bool) -> Shard:
    """Gives whole batches to replicas, R of them in a step."""
    count, spec = pipeline.length, pipeline.spec
    remainder = 0 if count in (None, INFINITE) else count % sharding.replicas
    # A worker without a batch in the last step gets a copy of the last one, which does not count.
    more = 0 < remainder <= sharding.local.start
    last_batch = -1 if count is None else count - 1

    def is_read(j: tf.Tensor, _: Any) -> tf.Tensor:
        own = sharding.is_local(j)
        return own | tf.equal(j, last_batch) if more else own

    def with_count(j: tf.Tensor, batch: Any) -> Any:
        return batch, tf.where(sharding.is_local(j), examples_of(_labels(batch)), 0)

    batches = pipeline.dataset.enumerate().filter(without_autograph(is_read))
    batches = batches.map(without_autograph(with_count))
    steps = _taken_together(batches, spec, sharding.local_replicas)
    shard = with_unknown_totals(steps, spec, sharding, size, whole=True, read_ahead=read_ahead)
    if count is None:
        return shard
    full = ShardSizes(uneven=True, empty=False)
    last = ShardSizes(uneven=True, empty=remainder > 0)
    steps_of_pass = INFINITE if count == INFINITE else -(-count // sharding.replicas)
    return dataclasses.replace(shard, steps=steps_of_pass, full=full, last=last)


def _taken_together(batches: tf.data.Dataset, spec: Any, local: int) -> tf.data.Dataset:
    """Elements (parts, counts) of `local` elements (batch, count); the last may have empty batches.

    The pipeline is read once: each reading of a shuffle has an order of its own.
    """
    if local == 1:
        return batches.map(without_autograph(lambda batch, count: ((batch,), count[None])))
    empty = tuple(tensors_of(zeros(spec, 0))), np.int64(0)  # a window cannot contain None
    others = tf.data.Dataset.from_tensors(empty).repeat(local)

    def together(*window: Any) -> Any:
        # A window has a dataset for each tensor; the last one may be short.
        elements = tf.data.Dataset.zip(window).concatenate(others)
        taken = (elements.skip(d).take(1).get_single_element() for d in range(local))
        parts, counts = zip(*taken, strict=True)
        return tuple(with_nones(spec, part) for part in parts), tf.stack(counts)

    flat = batches.map(without_autograph(lambda batch, count: (tuple(tensors_of(batch)), count)))
    return flat.window(local).map(without_autograph(together))


def _labels(batch: Any) -> Any:
    """The component of a batch with one row for each example: its labels, if it has any."""
    _, y, _ = keras.utils.unpack_x_y_sample_weight(batch)
    return batch if not tf.nest.flatten(y) or y is None else y


def with_unknown_totals(
    steps: tf.data.Dataset,
    spec: Any,
    sharding: Sharding,
    size: int | None,
    whole: bool = False,
    read_ahead: bool = True,
) -> Shard:
    """A shard whose replicas add up the total of each step.

    Args:
        steps: elements (parts, counts).
        whole: whether a replica without an example needs a whole batch.
        read_ahead: whether a batch may be read before it is requested.
    """
    local = sharding.local_replicas
    empty: Any = tuple(zeros(spec, 0) for _ in range(local)), np.zeros([local], np.int64)
    endless = steps.concatenate(tf.data.Dataset.from_tensors(empty).repeat())
    dataset = filled(endless, spec, whole).map(without_autograph(lambda p, c: (p, c, np.int64(-1))))
    sizes = ShardSizes(uneven=True, empty=True)
    dataset = configured(dataset, read_ahead=read_ahead)
    return Shard(dataset, None, sizes, sizes, spec, size, size_known=False)
