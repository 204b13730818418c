"""Predictions of all replicas, in the dataset's order, on every worker."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfmw.data import first_rows, gather_rows, map_tensors, step_of
from tfmw.data.batches import rows_of
from tfmw.errors import UsageError
from tfmw.mirrored.collectives.connection import ring_of
from tfmw.mirrored.replicas import Replicas, new_function
from tfmw.mirrored.tensors import carrier_of
from tfmw.runtime.progress import report_alive

Rows = list[list[Any]]  # examples of each step and local replica


def prediction_step(
    model: keras.Model, replicas: Replicas, split: bool = True
) -> Callable[..., Any]:
    """A function (*element of a `data.Shard`) -> (outputs, rows) on each replica."""

    def on_replica(parts: Any, counts: Any) -> Any:
        local = replicas.local_index()
        rows = counts[local]
        outputs = model.predict_step(parts[local])
        if replicas.count > 1 and split:
            outputs = first_rows(outputs, rows)
        elif not split:  # a batch's outputs may have other numbers of rows than its inputs
            outputs = map_tensors(lambda t: first_rows(t, rows_of(t) * tf.sign(rows)), outputs)
            rows = tf.stack([rows_of(t) for t in tf.nest.flatten(outputs)])
        return outputs, rows

    return lambda *element: replicas.run(on_replica, step_of(element, replicas.sharding)[:2])


class Predictions:
    """The predictions of a pass, collected step by step.

    Args:
        step: a `prediction_step`, traced or not.
        iterator: over the dataset of a `data.Shard`.
        lost_peer_named: a context in which errors name a lost task.
        split: whether replicas have parts of batches; if not, they have whole ones in turn.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        replicas: Replicas,
        iterator: Any,
        lost_peer_named: Callable[[], contextlib.AbstractContextManager[None]],
        split: bool = True,
    ):
        self._step = step
        self._lost_peer_named = lost_peer_named
        self._replicas = replicas
        self._iterator = iterator
        self._split = split
        self._outputs: list[list[Any]] = []  # per step and local replica: flat outputs
        self._rows: Rows = []
        self._structure: Any = None

    def extend(self, max_steps: int) -> int:
        """Predicts up to `max_steps` global batches; returns how many there were.

        No collective: workers with parts of other lengths call it more often than others.
        """
        for steps_done in range(max_steps):
            if not self._one_step():
                return steps_done
        return max_steps

    def _one_step(self) -> bool:
        """Predicts a global batch; returns whether there was one."""
        replicas = self._replicas
        element = next(self._iterator, None)
        if element is None:
            return False
        if len(element) == 3 and int(element[2]) < 0 and not any(element[1].numpy()):
            return False
        self._structure, counts = self._step(*element)
        flat = [
            replicas.local_results(t)
            for t in tf.nest.flatten(self._structure, expand_composites=False)
        ]
        self._outputs += [[leaf[local] for leaf in flat] for local in range(replicas.local)]
        self._rows.append([n.numpy().tolist() for n in replicas.local_results(counts)])
        report_alive()
        return True

    @property
    def steps(self) -> int:
        """Global batches that this worker has predicted so far."""
        return len(self._rows)

    def assembled(self, begin: int = 0) -> Any:
        """Predictions of all replicas in the dataset's order, in the structure of the outputs.

        A collective: all workers enter it.

        Args:
            begin: the step, of this worker's, to begin with.
        """
        group, replicas = self._replicas.group, self._replicas
        all_rows = group.from_all(self._rows[begin:])
        if not any(all_rows):
            raise UsageError("the dataset is empty: expected at least one batch to predict.")
        outputs = self._outputs[begin * replicas.local :]
        with self._lost_peer_named():
            leaves = [
                _in_order(
                    replicas,
                    [part[leaf] for part in outputs],
                    _order(all_rows, replicas.local, None if self._split else leaf),
                )
                for leaf in range(max(group.from_all(len(outputs[0]) if outputs else 0)))
            ]
        if self._structure is None:
            return leaves[0] if len(leaves) == 1 else leaves
        return tf.nest.pack_sequence_as(self._structure, leaves)


def _order(all_rows: list[Rows], local: int, leaf: int | None) -> np.ndarray:
    """The place of each example in the predictions of all workers, one worker after the other.

    Example j of a batch belongs to replica j mod R.

    Args:
        all_rows: by worker.
        local: replicas of each worker.
        leaf: of the outputs, if replicas have whole batches in turn, with rows for each of them.

    Returns:
        int64 [examples], in the order of the dataset.
    """
    if leaf is not None:
        all_rows = [[[n[leaf] for n in step] for step in rows] for rows in all_rows]
    starts = np.cumsum([0, *(sum(map(sum, rows)) for rows in all_rows)])
    taken = list(starts[:-1])
    batches: list[np.ndarray] = [np.zeros([0], np.int64)]
    for step in range(max(len(rows) for rows in all_rows)):
        parts = []
        for worker, rows in enumerate(all_rows):
            for count in rows[step] if step < len(rows) else [0] * local:
                parts.append(np.arange(taken[worker], taken[worker] + count))
                taken[worker] += count
        batch = np.concatenate(parts)
        if leaf is None and _interleaved([len(p) for p in parts]):
            for replica, part in enumerate(parts):
                batch[replica :: len(parts)] = part
        # else with dataset functions: the examples of one replica after those of another
        batches.append(batch)
    return np.concatenate(batches)


def _in_order(replicas: Replicas, pieces: list[Any], order: np.ndarray) -> Any:
    """One array of the pieces of all steps and replicas; see `_order`.

    Ragged and sparse pieces make a tensor of that kind. Dense ones whose shapes change from step
    to step make a ragged one, as in Keras.
    """
    local_kinds = sorted({_kind(piece) for piece in pieces})
    kinds = {kind for each in replicas.group.from_all(local_kinds) for kind in each}
    if "SparseTensor" in kinds:
        return gather_rows(_all_sparse(replicas, pieces), tf.constant(order, tf.int64))
    if len(kinds) > 1 or "RaggedTensor" in kinds:
        return tf.gather(_all_ragged(replicas, pieces), order)
    array = np.concatenate([np.asarray(t) for t in pieces]) if pieces else np.zeros([0])
    return _all_rows(replicas, array)[order]


def _kind(piece: Any) -> str:
    """The type of a piece and its dimensions but the first: pieces of one kind make an array."""
    if isinstance(piece, (tf.RaggedTensor, tf.SparseTensor)):
        return type(piece).__name__
    return str(tuple(piece.shape[1:]))


def _all_ragged(replicas: Replicas, pieces: list[Any]) -> tf.RaggedTensor:
    """The rows of all workers' pieces, ragged or dense, one worker's after the other's."""
    # Keras keeps inner dimensions that never change uniform; here all but the last are ragged.
    ragged = [
        piece
        if isinstance(piece, tf.RaggedTensor)
        else tf.RaggedTensor.from_tensor(piece, ragged_rank=max(1, piece.shape.rank - 2))
        for piece in pieces
    ]
    values: np.ndarray = np.zeros([0])
    lengths: list[np.ndarray] = []
    if ragged:
        joined = tf.concat(ragged, axis=0)
        values = joined.flat_values.numpy()
        lengths = [each.numpy() for each in joined.nested_row_lengths()]
    for _ in range(max(replicas.group.from_all(len(lengths))) - len(lengths)):
        lengths.append(np.zeros([0], np.int64))  # of a worker without pieces
    return tf.RaggedTensor.from_nested_row_lengths(
        _all_rows(replicas, values), [_all_rows(replicas, each) for each in lengths]
    )


def _all_sparse(replicas: Replicas, pieces: list[tf.SparseTensor]) -> tf.SparseTensor:
    """The rows of all workers' pieces, one worker's after the other's."""
    group = replicas.group
    values: np.ndarray = np.zeros([0])
    indices: np.ndarray = np.zeros([0, 0], np.int64)
    shape: list[int] = []
    if pieces:
        joined = tf.sparse.concat(0, pieces, expand_nonconcat_dims=True)
        values, indices = joined.values.numpy(), joined.indices.numpy()
        shape = joined.dense_shape.numpy().tolist()
    all_shapes = group.from_all(shape)  # [] of a worker without pieces
    shapes = [each for each in all_shapes if each]
    earlier = sum(each[0] for each in all_shapes[: group.rank] if each)
    indices = indices + np.eye(1, indices.shape[1], dtype=np.int64) * earlier
    return tf.SparseTensor(
        _all_rows(replicas, indices),
        _all_rows(replicas, values),
        [sum(each[0] for each in shapes), *np.max(shapes, axis=0)[1:].tolist()],
    )


def _all_rows(replicas: Replicas, local: np.ndarray) -> np.ndarray:
    """The rows of all workers' arrays, one worker's after the other's."""
    return np.concatenate(_gathered(replicas, local))


def _interleaved(lengths: list[int]) -> bool:
    total = sum(lengths)
    return lengths == [len(range(r, total, len(lengths))) for r in range(len(lengths))]


def _gathered(replicas: Replicas, local: np.ndarray) -> list[np.ndarray]:
    """Every worker's array, on every worker."""
    group = replicas.group
    if group.size == 1:
        return [local]
    # A worker without examples takes shape and dtype from another worker.
    described = group.from_all([len(local), list(local.shape[1:]), local.dtype.name])
    sizes = [size for size, _, _ in described]
    _, shape, name = described[int(np.argmax(sizes))]
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
