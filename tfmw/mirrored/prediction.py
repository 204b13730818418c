"""Predictions of all replicas, in the dataset's order, on every worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfmw.errors import UsageError
from tfmw.mirrored.collectives.connection import ring_of
from tfmw.mirrored.replicas import Replicas, new_function
from tfmw.mirrored.tensors import batch_rows, carrier_of, or_one_example
from tfmw.runtime.progress import report_alive

Rows = list[list[int]]  # examples of each step and local replica


def prediction_step(model: keras.Model, replicas: Replicas) -> Callable[[Any], Any]:
    """A function: batches of this process's replicas -> (outputs, rows) on each replica."""

    def on_replica(parts: Any) -> Any:
        batch = parts[replicas.local_index()]
        rows = batch_rows(batch)
        if replicas.count > 1:
            batch = or_one_example(batch, rows > 0)
        outputs = model.predict_step(batch)
        if replicas.count > 1:
            outputs = tf.nest.map_structure(lambda t: t[:rows], outputs)
        return outputs, rows

    return lambda parts: replicas.strategy.run(on_replica, args=(parts,))


def predict(
    step: Callable[[Any], Any],
    replicas: Replicas,
    iterator: Any,
    max_steps: int | None,
    after_step: Callable[[int], None],
) -> Any:
    """Predictions for every example of a pass; see `SyncDriver.predict`.

    Args:
        step: a `prediction_step`, traced or not.
    """
    outputs: list[list[Any]] = []  # per step and local replica: flat outputs
    rows: Rows = []
    structure: Any = None
    while max_steps is None or len(rows) < max_steps:
        try:
            parts, total = next(iterator)
        except StopIteration:
            break
        if int(total) < 0 and not any(int(batch_rows(p)) for p in parts):
            break
        structure, counts = step(parts)
        flat = [
            replicas.local_results(t) for t in tf.nest.flatten(structure, expand_composites=False)
        ]
        outputs += [[leaf[local] for leaf in flat] for local in range(replicas.local)]
        rows.append([int(n) for n in replicas.local_results(counts)])
        report_alive()
        after_step(len(rows))
    return _assembled(replicas, outputs, rows, structure)


def _assembled(replicas: Replicas, outputs: list[list[Any]], rows: Rows, structure: Any) -> Any:
    """All replicas' predictions in the dataset's order, in the structure of the outputs."""
    group = replicas.group
    if structure is None and group.size == 1:
        raise UsageError("the dataset is empty: expected at least one batch to predict.")
    all_rows = group.from_all(rows)
    number = max(group.from_all(len(outputs[0]) if outputs else 0))
    leaves = []
    for leaf in range(number):
        local = [part[leaf] for part in outputs]
        if any(isinstance(t, (tf.RaggedTensor, tf.SparseTensor)) for t in local):
            if replicas.count > 1:
                raise UsageError(
                    "predictions that are ragged or sparse cannot be combined over several "
                    "replicas: make the model's output dense."
                )
            leaves.append(tf.concat(local, axis=0))
            continue
        array = np.concatenate([np.asarray(t) for t in local]) if local else np.zeros([0])
        leaves.append(_in_order(_gathered(replicas, array, all_rows), all_rows, replicas.local))
    if structure is None:
        return leaves[0] if len(leaves) == 1 else leaves
    return tf.nest.pack_sequence_as(structure, leaves)


def _in_order(workers: list[np.ndarray], all_rows: list[Rows], local: int) -> np.ndarray:
    """The examples of all workers in the order of the dataset.

    Example j of a batch belongs to replica j mod R.

    Args:
        workers: each worker's examples, in its own order.
        all_rows: by worker.
        local: replicas of each worker.
    """
    taken = [0] * len(workers)
    batches = []
    for step in range(max(len(rows) for rows in all_rows)):
        parts = []
        for worker, rows in enumerate(all_rows):
            for count in rows[step] if step < len(rows) else [0] * local:
                start = taken[worker]
                parts.append(workers[worker][start : start + count])
                taken[worker] = start + count
        batch = np.empty((sum(map(len, parts)), *parts[0].shape[1:]), parts[0].dtype)
        if _interleaved([len(p) for p in parts]):
            for replica, part in enumerate(parts):
                batch[replica :: len(parts)] = part
        else:  # with dataset functions: the examples of one replica after those of another
            batch = np.concatenate(parts)
        batches.append(batch)
    return np.concatenate(batches)


def _interleaved(lengths: list[int]) -> bool:
    total = sum(lengths)
    return lengths == [len(range(r, total, len(lengths))) for r in range(len(lengths))]


def _gathered(replicas: Replicas, local: np.ndarray, all_rows: list[Rows]) -> list[np.ndarray]:
    """Every worker's array, on every worker."""
    group = replicas.group
    if group.size == 1:
        return [local]
    sizes = [sum(map(sum, rows)) for rows in all_rows]
    # A worker without examples takes shape and dtype from another worker.
    shapes = group.from_all([list(local.shape[1:]), local.dtype.name])
    shape, name = shapes[int(np.argmax(sizes))]
    dtype = tf.as_dtype(name)
    if dtype == tf.string or name == "object":
        raise UsageError(
            "predictions are strings, which cannot be sent between workers: predict their "
            "indices and look them up afterwards."
        )
    if not len(local):
        local = np.zeros([0, *shape], dtype.as_numpy_dtype)
    ring = ring_of(replicas.strategy)
    if ring is not None:
        (flat,) = ring.gather([local])
        return np.split(flat, np.cumsum(sizes)[:-1])
    padded = np.zeros([max(sizes), *shape], carrier_of(dtype).as_numpy_dtype)
    padded[: len(local)] = local
    blocks = np.split(_gathered_by_tensorflow(replicas, padded), group.size * replicas.local)
    return [
        block[:size].astype(dtype.as_numpy_dtype)
        for block, size in zip(blocks[:: replicas.local], sizes, strict=True)
    ]


def _gathered_by_tensorflow(replicas: Replicas, array: np.ndarray) -> np.ndarray:
    """The arrays of all replicas, of one shape, joined along the first axis."""

    def gather(value: tf.Tensor) -> tf.Tensor:
        return replicas.strategy.gather(
            replicas.strategy.run(lambda v: tf.identity(v), args=(value,)), axis=0
        )

    joined: np.ndarray = new_function(gather)(tf.constant(array)).numpy()
    return joined
