"""Predictions of all replicas, in the dataset's order, on every worker."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfmw.compat.replica_steps import replica_step
from tfmw.data import first_rows, gather_rows, map_tensors, step_of
from tfmw.data.batches import rows_of
from tfmw.data.prediction_files import ROW
from tfmw.errors import UsageError
from tfmw.observe.progress import report_alive
from tfmw.train.mirrored.replicas import Replicas
from tfmw.train.mirrored.step_loops import step_loop
from tfmw.train.mirrored.sync_driver import SyncDriver

Rows = list[list[Any]]  # indices of the examples of each step and local replica


def prediction_step(
    model: keras.Model, replicas: Replicas, split: bool = True, keys: Sequence[str] = ()
) -> Callable[..., Any]:
    """Creates a function (*element of a `data.Shard`) -> (outputs, rows) on each replica.

    Args:
        split: whether replicas have shards of batches, rather than whole ones.
        keys: names of features; with some, outputs are (the model's, {name: feature}).
    """

    def on_replica(parts: Any, counts: Any) -> Any:
        local = replicas.local_index()
        rows = counts[local]
        with replica_step():
            outputs = model.predict_step(parts[local])
        if keys:
            outputs = outputs, features_of(parts[local], keys)
        if replicas.count > 1 and split:
            outputs = first_rows(outputs, rows)
        elif not split:  # a batch's outputs may have other numbers of rows than its inputs
            outputs = map_tensors(lambda t: first_rows(t, rows_of(t) * tf.sign(rows)), outputs)
            rows = tf.stack([rows_of(t) for t in tf.nest.flatten(outputs)])
        return outputs, rows

    return lambda *element: replicas.run(on_replica, step_of(element, replicas.sharding)[:2])


def features_of(batch: Any, keys: Sequence[str]) -> dict[str, Any]:
    """The features of a batch, or their specs, by name: members of x, or of y.

    Raises:
        UsageError: there is no feature of a name.
    """
    x, y, _ = keras.utils.unpack_x_y_sample_weight(batch)
    features = {k: v for part in (y, x) if isinstance(part, Mapping) for k, v in part.items()}
    if unknown := [key for key in keys if key not in features]:
        raise UsageError(
            f"received keys={list(keys)}, and the dataset has no feature {unknown[0]!r}: expected "
            f"names in the dict that x or y is; it has {sorted(features) or 'no dict'}."
        )
    return {key: features[key] for key in keys}


def prediction_loop(
    step: Any, replicas: Replicas, iterator: Any
) -> Callable[[Any, tf.Tensor], Any] | None:
    """Creates a function, to be traced, of several prediction steps.

    Args:
        step: a traced `prediction_step`.
        iterator: iterator over the dataset of a `data.Shard`.

    Returns:
        A function (iterator, int64 [] most steps) -> (steps done, int64 []; the model's outputs of
        all steps, concatenated; rows of each step). None if outputs cannot be concatenated: ragged
        and sparse outputs, inner dimensions that may change, several local replicas.
    """
    if replicas.local > 1:
        return None
    structure, rows = step.get_concrete_function(*iterator.element_spec).structured_outputs
    leaves = tf.nest.flatten(structure, expand_composites=False)
    if not rows.shape.is_fully_defined() or not all(map(_is_joined, leaves)):
        return None
    kinds = [(leaf.dtype, [None, *leaf.shape[1:]]) for leaf in leaves]
    kinds.append((rows.dtype, rows.shape.as_list()))

    def one_step(*element: Any) -> Any:
        flat = tf.nest.flatten(step(*element), expand_composites=False)
        found = tf.constant(1, tf.int64)
        if len(element) == 3:  # a step without examples, of which other workers have some
            found = tf.cast((element[2] >= 0) | tf.reduce_any(element[1] > 0), tf.int64)
        return found, [replicas.first_result(t) for t in flat]

    def loop(iterator: Any, max_steps: tf.Tensor) -> Any:
        steps_done, _, _, arrays = step_loop(one_step, iterator, max_steps, kinds)
        outputs = tf.nest.pack_sequence_as(structure, [a.concat() for a in arrays[:-1]])
        return steps_done, outputs, arrays[-1].stack()[:steps_done]

    return loop


def _is_joined(output: Any) -> bool:
    """Whether outputs of several steps can be concatenated."""
    return (
        isinstance(output, tf.Tensor | tf.TensorSpec)
        and bool(output.shape.rank)
        and output.shape[1:].is_fully_defined()
    )


class Predictions:
    """The predictions of a pass over the dataset of a `data.Shard`, collected call by call.

    Args:
        driver: driver in whose context the model is placed.
        iterator: iterator over that dataset.
        keys: see `prediction_step`.
    """

    def __init__(self, driver: SyncDriver, iterator: Any, keys: Sequence[str] = ()):
        self._driver = driver
        self._replicas = driver.replicas
        self._iterator = iterator
        self._keys = keys
        # Per call: rows, and flat outputs of each local replica in each step or of all steps.
        self._calls: list[tuple[Rows, list[list[Any]]]] = []
        self._structure: Any = None
        steps: Any = prediction_step(driver.model, driver.replicas, driver.splits, keys), None
        if not driver.model.run_eagerly:
            key = ("predict", driver.splits, *keys, repr(iterator.element_spec))
            steps = driver.traces.get(key, lambda: self._traced(steps[0]))
        self._step, self._loop = steps

    def _traced(self, step: Callable[..., Any]) -> Any:
        """(traced step, traced loop of several steps if there is one)."""
        traced = self._driver.traces.function(step, reduce_retracing=True)
        loop = prediction_loop(traced, self._replicas, self._iterator)
        return traced, loop and self._driver.traces.function(loop, reduce_retracing=True)

    def extend(self, max_steps: int) -> int:
        """Predicts up to `max_steps` global batches; returns the number of batches.

        This is no collective: workers may call it a different number of times.
        """
        rows: Rows = []
        outputs: list[list[Any]] = []
        self._calls.append((rows, outputs))
        done = self._extend(max_steps, rows, outputs)
        own = np.array(rows)
        own = own[..., 0] if own.ndim == 3 else own  # of the first output
        self._driver.examples += int(own.sum()) * self._replicas.group.size  # about as many
        return done

    def _extend(self, max_steps: int, rows: Rows, outputs: list[list[Any]]) -> int:
        if self._loop is not None:
            limit = tf.constant(max_steps, tf.int64)
            done, self._structure, counts = self._loop(self._iterator, limit)
            outputs.append(tf.nest.flatten(self._structure, expand_composites=False))
            rows += [[of_step] for of_step in counts.numpy().tolist()]
            report_alive()
            return int(done)
        local_results = self._replicas.local_results
        for _ in range(max_steps):
            element = next(self._iterator, None)
            if element is None:
                break
            if len(element) == 3 and int(element[2]) < 0 and not any(element[1].numpy()):
                break
            self._structure, counts = self._step(*element)
            leaves = tf.nest.flatten(self._structure, expand_composites=False)
            outputs += map(list, zip(*map(local_results, leaves), strict=True))
            rows.append([n.numpy().tolist() for n in local_results(counts)])
            report_alive()
        return len(rows)

    def taken(self) -> tuple[list[list[Any]], np.ndarray]:
        """Returns the predictions of this process's replicas so far, and forgets them.

        Returns:
            (the pieces of each output, the number of rows of each piece, int64 [steps, local] or
            [steps, local, outputs]).
        """
        calls, self._calls = self._calls, []
        return _pieces(calls)

    def names(self) -> dict[str, bool]:
        """Name of each output, and whether its inner dimensions may change from step to step.

        Call it after `extend` has predicted a batch.
        """
        count = len(tf.nest.flatten(self._structure, expand_composites=False))
        numbers = tf.nest.pack_sequence_as(self._structure, list(range(count)))
        names = [""] * count
        for path, number in keras.tree.flatten_with_path(numbers):
            within = path[1:] if self._keys else path  # with keys the structure is a pair
            names[number] = ".".join(map(str, within)) or "predictions"
        if repeated := [name for name, n in Counter([ROW, *names]).items() if n > 1]:
            raise UsageError(
                f"two of the files would be called {repeated[0]!r}: an output of the model or a "
                'feature in keys= has the name of another, or "row".'
            )
        return dict(zip(names, self._varying(count), strict=True))

    def _varying(self, count: int) -> list[bool]:
        if self._driver.model.run_eagerly:
            return [False] * count
        traced = self._step.get_concrete_function(*self._iterator.element_spec)
        leaves = tf.nest.flatten(traced.structured_outputs[0], expand_composites=False)
        shapes = [self._replicas.first_result(leaf).shape for leaf in leaves]
        return [shape.rank != 1 and not shape[1:].is_fully_defined() for shape in shapes]

    def assembled(self, of_last_call: bool = False) -> Any:
        """Predictions of all replicas in the dataset's order, in the structure of the outputs.

        A collective: all workers enter it.

        Args:
            of_last_call: whether to return only those of the last `extend`.
        """
        replicas = self._replicas
        calls = self._calls[-1:] if of_last_call else self._calls
        pieces, own = _pieces(calls)
        described = replicas.group.from_all([len(own), len(pieces)])
        steps, widths = map(list, zip(*described, strict=True))
        if not any(steps):
            raise UsageError("the dataset is empty: expected at least one batch to predict.")
        with replicas.step_errors(self._driver.splits):
            all_rows = np.split(_all_rows(replicas, own), np.cumsum(steps)[:-1])
            leaves = [
                _in_order(
                    replicas,
                    pieces[leaf] if pieces else [],
                    order_of(all_rows, replicas.local, None if self._driver.splits else leaf),
                )
                for leaf in range(max(widths))
            ]
        if self._structure is None:
            return leaves[0] if len(leaves) == 1 else leaves
        return tf.nest.pack_sequence_as(self._structure, leaves)


def _pieces(calls: list[tuple[Rows, list[list[Any]]]]) -> tuple[list[list[Any]], np.ndarray]:
    """(pieces of each output, numbers of rows) of several calls; see `Predictions.taken`."""
    outputs = [part for _, parts in calls for part in parts]
    own = np.array([of_step for rows, _ in calls for of_step in rows], np.int64)
    return list(map(list, zip(*outputs, strict=True))), own


def gathered_rows(replicas: Replicas, own: np.ndarray) -> list[np.ndarray]:
    """All workers' numbers of rows of each step; see `Predictions.taken`."""
    steps = replicas.group.from_all(len(own))
    return np.split(_all_rows(replicas, own), np.cumsum(steps)[:-1])


def order_of(all_rows: list[np.ndarray], local: int, leaf: int | None) -> np.ndarray:
    """Position of each example in the concatenated predictions of all workers.

    Example j of a batch belongs to replica j mod R.

    Args:
        all_rows: per worker, int64 [steps, local] or [steps, local, leaves].
        local: number of replicas of each worker.
        leaf: index of the output, if replicas have whole batches in turn, with rows for each
            output.

    Returns:
        int64 [examples], in the order of the dataset.
    """
    if leaf is not None:
        all_rows = [rows[..., leaf] for rows in all_rows]
    steps, replicas = max(map(len, all_rows)), len(all_rows) * local
    by_worker: np.ndarray = np.zeros([len(all_rows), steps, local], np.int64)
    for worker, rows in enumerate(all_rows):
        by_worker[worker, : len(rows)] = rows
    # A piece has the rows of a step and replica. This is its start in the predictions of all
    # workers.
    begins = np.cumsum(by_worker).reshape(by_worker.shape) - by_worker
    begins, counts = (
        np.moveaxis(each, 0, 1).reshape([steps, replicas]) for each in (begins, by_worker)
    )
    totals = counts.sum(axis=1)
    dealt: np.ndarray = np.zeros([steps], bool)
    if leaf is None:
        dealt = (counts == -(-(totals[:, None] - np.arange(replicas)) // replicas)).all(axis=1)
    # With dataset functions and whole batches, the examples of one replica follow another's.
    step, place = _within(totals)
    piece, row = _within(counts.ravel())
    return np.where(
        dealt[step],
        begins[step, place % replicas] + place // replicas,
        begins.ravel()[piece] + row,
    )


def _within(lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(index of its group, position in the group) for each row of consecutive groups."""
    group: np.ndarray = np.repeat(np.arange(len(lengths)), lengths)
    return group, np.arange(len(group)) - (np.cumsum(lengths) - lengths)[group]


def _in_order(replicas: Replicas, pieces: list[Any], order: np.ndarray) -> Any:
    """Concatenates the pieces of all steps and replicas into one array; see `order_of`.

    Ragged and sparse pieces result in a tensor of that kind. Dense pieces whose shapes change from
    step to step result in a ragged one, as in Keras.
    """
    local_kinds = sorted({_kind(piece) for piece in pieces})[-2:]  # names of types come last
    kinds = {kind for each in replicas.group.from_all(local_kinds) for kind in each}
    if "SparseTensor" in kinds:
        return gather_rows(_all_sparse(replicas, pieces), tf.constant(order, tf.int64))
    if len(kinds) > 1 or "RaggedTensor" in kinds:
        return tf.gather(_all_ragged(replicas, pieces), order)
    array = np.concatenate([np.asarray(t) for t in pieces]) if pieces else np.zeros([0])
    return _all_rows(replicas, array)[order]


def _kind(piece: Any) -> str:
    """Type of a piece and its inner dimensions; pieces of one kind can be concatenated."""
    if isinstance(piece, (tf.RaggedTensor, tf.SparseTensor)):
        return type(piece).__name__
    return str(tuple(piece.shape[1:]))


def _all_ragged(replicas: Replicas, pieces: list[Any]) -> tf.RaggedTensor:
    """The rows of all workers' pieces, ragged or dense, concatenated by worker."""
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
        lengths.append(np.zeros([0], np.int64))  # for a worker without pieces
    return tf.RaggedTensor.from_nested_row_lengths(
        _all_rows(replicas, values), [_all_rows(replicas, each) for each in lengths]
    )


def _all_sparse(replicas: Replicas, pieces: list[tf.SparseTensor]) -> tf.SparseTensor:
    """The rows of all workers' pieces, concatenated by worker."""
    group = replicas.group
    values: np.ndarray = np.zeros([0])
    indices: np.ndarray = np.zeros([0, 0], np.int64)
    shape: list[int] = []
    if pieces:
        joined = tf.sparse.concat(0, pieces, expand_nonconcat_dims=True)
        values, indices = joined.values.numpy(), joined.indices.numpy()
        shape = joined.dense_shape.numpy().tolist()
    all_shapes = group.from_all(shape)  # a worker without pieces has []
    shapes = [each for each in all_shapes if each]
    earlier = sum(each[0] for each in all_shapes[: group.rank] if each)
    indices = indices + np.eye(1, indices.shape[1], dtype=np.int64) * earlier
    return tf.SparseTensor(
        _all_rows(replicas, indices),
        _all_rows(replicas, values),
        [sum(each[0] for each in shapes), *np.max(shapes, axis=0)[1:].tolist()],
    )


def _all_rows(replicas: Replicas, local: np.ndarray) -> np.ndarray:
    """The rows of all workers' arrays, concatenated by worker."""
    group = replicas.group
    if group.size == 1:
        return local
    # A worker without examples takes shape and dtype from another worker.
    described = group.from_all([len(local), list(local.shape[1:]), local.dtype.name])
    sizes = [size for size, _, _ in described]
    _, shape, name = described[int(np.argmax(sizes))]
    if name == "object":
        return _all_strings(replicas, local, shape)
    dtype = tf.as_dtype(name)
    numpy_dtype, transport = dtype.as_numpy_dtype, replicas.transport
    # in bytes; a worker's shard belongs to its first replica
    lengths = [0] * replicas.count
    numbers = [transport.part_number(rank) for rank in range(0, replicas.count, replicas.local)]
    for number, size in zip(numbers, sizes, strict=True):
        lengths[number] = size * math.prod(shape) * dtype.size
    cuts = np.cumsum([0, *lengths]).tolist()
    empty: np.ndarray = np.zeros([0], np.uint8)
    own = np.ascontiguousarray(local).reshape(-1).view(np.uint8) if len(local) else empty
    gathered: np.ndarray = np.empty([cuts[-1]], np.uint8)
    if len(gathered):
        transport.gather_between_steps([own] + [empty] * (replicas.local - 1), cuts, gathered)
    in_order: np.ndarray = np.concatenate([gathered[cuts[n] : cuts[n + 1]] for n in numbers])
    return in_order.view(numpy_dtype).reshape([sum(sizes), *shape])


def _all_strings(replicas: Replicas, local: np.ndarray, shape: list[int]) -> np.ndarray:
    """The rows of all workers' arrays [rows, *shape] of bytes; see `_all_rows`."""
    own = local.ravel().tolist() if len(local) else []
    lengths: np.ndarray = np.reshape([len(text) for text in own], [-1, *shape]).astype(np.int64)
    lengths = _all_rows(replicas, lengths)
    joined = _all_rows(replicas, np.frombuffer(b"".join(own), np.uint8)).tobytes()
    ends = np.cumsum(lengths)
    texts = [joined[end - n : end] for end, n in zip(ends, lengths.ravel(), strict=True)]
    return np.array(texts, object).reshape(lengths.shape)
