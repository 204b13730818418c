"""Shards of batches that every worker makes whole, and keeps its rows of; see `sharding`."""

from __future__ import annotations

import functools
import math
from typing import Any

import keras
import tensorflow as tf

from tfmw.data.batches import (
    deterministic,
    element_of,
    examples_of,
    global_batch_size,
    input_of,
    map_tensors,
    rows_from,
    rows_of,
    spec_of,
    static_batch_size,
    steps_in,
    untuned,
    without_autograph,
)
from tfmw.data.values import INFINITE, Shard, Sharding, ShardSizes
from tfmw.errors import UsageError
from tfmw.keras_compat import datasets, rebuilding


def of_one_replica(dataset: tf.data.Dataset, read_ahead: bool = True) -> Shard:
    """The shard of the only replica."""
    batches = divided_by_steps(dataset)
    batches = batches if rebuilding.is_tunable(dataset) else untuned(batches)
    even = ShardSizes(uneven=False, empty=False)
    return Shard(
        batches.prefetch(tf.data.AUTOTUNE) if read_ahead else batches,
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
    steps = deterministic(steps, read_ahead, tuned=not small or rebuilding.is_tunable(dataset))
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
        parts = tuple(
            map_tensors(functools.partial(rows_from, start=replica, step=sharding.replicas), batch)
            for replica in sharding.local
        )
    return parts, sharding.counts(total), total


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
    passed = (*rebuilding.SELECTIONS, *datasets.Map, *datasets.Prefetch, *datasets.OptionsNode)
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
