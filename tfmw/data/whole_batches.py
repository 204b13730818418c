"""Shards of batches that are read whole: parts of their rows, whole ones, a user's function's.

See `sharding`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfmw.compat import datasets, rebuilding
from tfmw.data.batches import (
    beneath,
    configured,
    element_of,
    examples_of,
    filled,
    global_batch_size,
    input_of,
    parts_of,
    rows_of,
    spec_of,
    static_batch_size,
    steps_in,
    without_autograph,
    without_optionals,
    zeros,
)
from tfmw.data.comparison import refuse_own_elements
from tfmw.data.order import reshuffles_of
from tfmw.data.seek import seek
from tfmw.data.values import INFINITE, Order, Shard, Sharding, ShardSizes
from tfmw.errors import UsageError


def of_one_replica(dataset: tf.data.Dataset, read_ahead: bool = True) -> Shard:
    """The shard of the only replica."""
    batches = divided_by_steps(dataset)
    tuned = rebuilding.is_tunable(dataset)
    even = ShardSizes(uneven=False, empty=False)
    return Shard(
        configured(batches, in_order=False, tuned=tuned, read_ahead=read_ahead),
        steps_in(dataset),
        even,
        even,
        spec_of(dataset),
        global_batch_size(dataset),
    )


def by_slices(dataset: tf.data.Dataset, sharding: Sharding, read_ahead: bool) -> Shard:
    """Every worker runs the whole pipeline and keeps its rows of each global batch."""
    spec = spec_of(dataset)
    _refuse_scalars(spec)
    zipped = _refuse_uneven_zip(dataset, sharding)
    batch_size = global_batch_size(dataset)
    if not zipped:
        _refuse_other_rows(spec, batch_size)
    small = not zipped and is_small(spec, batch_size)
    if small:
        steps = divided_by_steps(dataset)
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
    tuned = not small or rebuilding.is_tunable(dataset)
    steps = configured(steps, tuned=tuned, read_ahead=read_ahead)
    return Shard(steps, steps_in(dataset), sizes, sizes, spec, batch_size)


# Bytes of a global batch whose copy takes less than a millisecond.
_SMALL = 1 << 20


def divided_by_steps(dataset: tf.data.Dataset) -> tf.data.Dataset:
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
        return *parts_of(batch, sharding), total


def is_small(spec: Any, batch_size: int | None) -> bool:
    """Whether a copy of a global batch takes no time that counts."""
    return _bytes(spec, batch_size) <= _SMALL


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


def _refuse_uneven_zip(dataset: tf.data.Dataset, sharding: Sharding) -> bool:
    """Whether batches are zipped, of parts with different numbers of examples.

    Raises before the first step if `_rows_checked` would fail in a later one.
    """
    above = beneath(dataset, rebuilding.MOVES)
    node = beneath(above, (*rebuilding.MOVES, *datasets.Map))
    if not isinstance(node, datasets.Zip):
        return False
    inputs = datasets.dataset_inputs(node)
    sizes = [global_batch_size(part) for part in inputs]
    if len(set(sizes)) == 1 and None not in sizes:
        return False
    if None in sizes or above is not node:  # a map may leave parts out
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
    size, drop_remainder = datasets.batch_arguments(dataset)
    count = steps_in(input_of(dataset))
    if count is None or count == INFINITE:
        return None
    return size if drop_remainder else count % size or size


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
        refuse_own_elements(dataset, Sharding())
    reshuffles = reshuffles_of(dataset)
    own = Order(index_dir=index_dir)  # other workers may have other pipelines
    rest = seek(without_optionals(dataset), skip * sharding.local_replicas, reshuffles, own)
    return dataclasses.replace(_of_function(rest, sharding), reshuffles=reshuffles)


def _of_function(dataset: tf.data.Dataset, sharding: Sharding) -> Shard:
    local_replicas = sharding.local_replicas
    if sharding.replicas == 1:
        return of_one_replica(dataset)
    spec, element = spec_of(dataset), element_of(dataset)
    if local_replicas == 1:
        steps = dataset.map(without_autograph(lambda *b: counted((element(b),))))
    else:
        batches = dataset.map(without_autograph(lambda *b: (element(b), examples_of(element(b)))))
        steps = _taken_together(batches, spec, local_replicas)
    return with_unknown_totals(steps, spec, sharding, None)


def counted(parts: tuple[Any, ...]) -> tuple[tuple[Any, ...], tf.Tensor]:
    """(parts, int64 [L] how many examples each has)."""
    return parts, tf.stack([examples_of(part) for part in parts])


def by_batches(
    dataset: tf.data.Dataset, sharding: Sharding, size: int | None, read_ahead: bool
) -> Shard:
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
        steps = _taken_together(batches, spec, local)
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
    given = [leaf is not None for leaf in tf.nest.flatten(spec)]  # a window takes no None

    def leaves(batch: Any) -> tuple[Any, ...]:
        return tuple(leaf for leaf in tf.nest.flatten(batch) if leaf is not None)

    def whole(leaves: Any) -> Any:
        left = iter(leaves)
        return tf.nest.pack_sequence_as(spec, [next(left) if has else None for has in given])

    others = tf.data.Dataset.from_tensors((leaves(zeros(spec, 0)), np.int64(0))).repeat(local)

    def together(*window: Any) -> Any:
        # A window is a dataset of each tensor; the last one may be short.
        elements = tf.data.Dataset.zip(window).concatenate(others)
        taken = (elements.skip(d).take(1).get_single_element() for d in range(local))
        parts, counts = zip(*taken, strict=True)
        return tuple(map(whole, parts)), tf.stack(counts)

    flat = batches.map(without_autograph(lambda batch, count: (leaves(batch), count)))
    return flat.window(local).map(without_autograph(together))


def _labels(batch: Any) -> Any:
    """The part of a batch with one row for each example: its labels, if it has any."""
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
    """A shard whose totals the replicas add up step by step.

    Args:
        steps: elements (parts, counts).
        whole: whether a replica without an example needs a whole batch.
        read_ahead: whether a batch may be read before it is asked for.
    """
    local = sharding.local_replicas
    empty: Any = tuple(zeros(spec, 0) for _ in range(local)), np.zeros([local], np.int64)
    endless = steps.concatenate(tf.data.Dataset.from_tensors(empty).repeat())
    dataset = filled(endless, spec, whole).map(without_autograph(lambda p, c: (p, c, np.int64(-1))))
    sizes = ShardSizes(uneven=True, empty=True)
    dataset = configured(dataset, read_ahead=read_ahead)
    return Shard(dataset, None, sizes, sizes, spec, size, size_known=False)
