"""Steps of a user-written loop: one batch per call, on all replicas.

    batches = BatchDriver(model, strategy)
    logs = batches.step("train", (x, y, None))      # the same batch on every task

A step is one traced function. At its end metrics, moving averages and seeds are equal on all
replicas. So between two calls the model is an ordinary one, which a loop may read, save and change.
Before each step tasks sum a few numbers, whose size is always the same: the kind and shape of the
batch, samples of its values and of one variable. The sums show differences between tasks before a
task waits in a collective that others do not enter, and before any weight changes.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfmw import data
from tfmw.compat import placement
from tfmw.compat.memory import view_of
from tfmw.data.batches import rows_from, rows_of
from tfmw.errors import UsageError
from tfmw.observe.progress import report_alive, report_progress
from tfmw.train.mirrored.replicas import new_function
from tfmw.train.mirrored.sync_driver import StepKind, SyncDriver
from tfmw.train.mirrored.synchronization import EachStep

_training_steps = itertools.count(1)  # number of steps of all models of a loop

_SAMPLES = 16  # values of a batch, and of a variable, that tasks compare in a step
_TOLERANCE = 1e-5  # relative variance, as processors of hosts may round differently
_PIECES = 4  # bytes of a checksum


class BatchDriver:
    """Steps of one model, with a batch per call.

    Args:
        model: a compiled and built model.
        strategy: a synchronous strategy.
    """

    def __init__(self, model: keras.Model, strategy: tf.distribute.Strategy):
        self._model = model
        self._strategy = strategy
        self._driver = SyncDriver(model, EachStep(strategy))
        self._sharding = self._driver.replicas.sharding
        self._sums = new_function(self._sum_over_tasks)
        self._functions: dict[tuple[StepKind, str], Any] = {}  # traced for these batches
        self._steps = 0
        self._variables = placement.all_variables(model)

    def step(self, kind: str, batch: Any) -> dict[str, Any]:
        """Trains or evaluates on one batch, the same on all tasks; returns its logs.

        A collective: all tasks must call it.

        Args:
            kind: "train" or "test".
            batch: (x, y, sample weights), structures of arrays [examples, ...].
        """
        total = _examples(batch)
        sharding = self._sharding
        sizes = data.ShardSizes.of(total, sharding)
        uneven = sharding.replicas > 1 and (sizes.empty or sizes.uneven)
        parts = tuple(
            data.map_tensors(functools.partial(_rows, replica=replica, sharding=sharding), batch)
            for replica in sharding.local
        )
        examples = tf.constant(total, tf.int64)
        # The structure of the whole batch: shards of one task may have the shapes of an earlier
        # call.
        key = (
            StepKind(kind, uneven),
            str(tf.nest.map_structure(tf.type_spec_from_value, batch)),
        )
        if sharding.workers > 1:
            self._refuse_differences(key, batch)
        with self._step_of(key, parts, examples) as function:
            logs = function(parts, examples)
        self._steps += 1
        self._driver.examples += total
        if kind == "train":
            report_progress(next(_training_steps))
        else:
            report_alive()
        return logs

    @contextlib.contextmanager
    def _step_of(self, key: tuple[StepKind, str], *arguments: Any) -> Iterator[Callable[..., Any]]:
        """Traced function of a step, and a context in which the model is placed."""
        kind = key[0]
        if self._model.run_eagerly:
            with self._driver as driver:
                yield self._whole_step(driver, kind)
            return
        while key not in self._functions:
            with self._driver as driver:
                function: Any = driver.traces.get(
                    ("batch", kind, driver.exchanges),
                    lambda: driver.traces.function(
                        self._whole_step(driver, kind), reduce_retracing=True
                    ),
                )
                function.get_concrete_function(*arguments)
                if driver.exchanges_are_complete():
                    self._functions[key] = function
        # Variables of a single replica stay in place; copies of several get the current values.
        copies = self._driver.copies
        placed = placement.placed(self._model, self._strategy, copies, seeds_vary=False)
        lost_peer_named = self._driver.replicas.lost_peer_named()
        with placed if copies else contextlib.nullcontext(), lost_peer_named:
            yield self._functions[key]

    def _whole_step(self, driver: SyncDriver, kind: StepKind) -> Callable[..., Any]:
        """Step after which the state of all replicas is equal.

        Metrics then have the values of the whole batch, moving averages their mean, and seeds do
        not depend on the replica.

        Returns:
            A function (this process's parts of the batch, int64 [] examples of the whole batch)
            -> logs.
        """
        driver.results.reset()
        step = driver.global_step(kind)
        replicas, sharding = driver.replicas, self._sharding

        def vary_seeds() -> None:
            placement.vary_seeds(self._model, sharding.local.start + replicas.local_index())

        def begin() -> None:
            self._model.reset_metrics()
            vary_seeds()

        def end() -> None:
            vary_seeds()
            if kind.trains and replicas.count > 1:
                driver.state.average_on_replica(driver.state.variables())

        def whole_step(parts: Any, total: tf.Tensor) -> Any:
            replicas.run(begin, ())
            step(parts, sharding.counts(total), total)
            replicas.run(end, ())
            return driver.results.of_batch(kind.name)

        return whole_step

    def _sum_over_tasks(self, values: tf.Tensor) -> tf.Tensor:
        replicas = self._driver.replicas

        def summed() -> tf.Tensor:
            # The values of a task count once, with any number of replicas.
            mine = values if replicas.local_index() == 0 else tf.zeros_like(values)
            return replicas.sum([mine])[0]

        return replicas.first_result(replicas.call(summed))

    def _refuse_differences(self, key: tuple[Any, ...], batch: Any) -> None:
        """Raises UsageError on all tasks if a batch, or a variable, differs between them."""
        variable = self._variables[self._steps % len(self._variables)]
        count = self._sharding.workers
        # Variables may differ before a trace, which sets them to the chief's values.
        traced = key in self._functions
        local = placement.local_copies(self._strategy, variable)[0].read_value() if traced else 0.0
        call = zlib.crc32(repr((*key, traced)).encode())
        values = [*_sampled(batch, self._steps, call), *_sampled(local, self._steps)]
        with self._driver.replicas.lost_peer_named():
            sums = self._sums(tf.constant([values, [v * v for v in values]], tf.float64))
        total, squares = np.asarray(sums)
        of_batch, of_variable = differing(total, squares, count)
        if of_batch:
            raise UsageError(
                "tasks passed different batches in this call: expected the same whole batch on "
                "every task, of which each takes its part. Draw random numbers from the same seed "
                "on every task."
            )
        if of_variable:
            raise UsageError(
                f"{variable.path!r} differs between tasks: the loop changed it on some tasks only. "
                "Make the same change on every task."
            )


def _examples(batch: Any) -> int:
    """Number of examples, which is the same in each tensor of a batch."""
    leaves = [t for t in tf.nest.flatten(batch) if t is not None]
    for leaf in leaves:
        if not tf.is_tensor(leaf) and not np.shape(leaf):
            raise UsageError(
                f"received {leaf!r} in a batch: expected arrays or tensors [examples, ...]. A list "
                "is a structure of several of them; np.array(...) makes an array of numbers."
            )
    lengths = [int(rows_of(t)) if tf.is_tensor(t) else np.shape(t)[0] for t in leaves]
    if not lengths or len(set(lengths)) > 1 or not lengths[0]:
        raise UsageError(
            f"received a batch of tensors with {lengths} rows: expected one number of examples, "
            "more than 0, along the first axis of each."
        )
    return lengths[0]


def _rows(tensor: Any, replica: int, sharding: data.Sharding) -> Any:
    """Rows of one replica: example j is replica j mod R's; a spare replica gets the first."""
    if sharding.replicas == 1:
        return tf.convert_to_tensor(tensor) if isinstance(tensor, np.ndarray) else tensor
    if isinstance(tensor, tf.SparseTensor):
        return rows_from(tensor, replica, sharding.replicas)
    length = int(rows_of(tensor)) if tf.is_tensor(tensor) else len(tensor)
    rows = tensor[replica :: sharding.replicas] if replica < length else tensor[:1]
    return tf.constant(rows) if isinstance(rows, np.ndarray) else rows


def _sampled(values: Any, step: int, checksum: int = 0) -> list[float]:
    """Some values of a structure, which differ from step to step.

    Returns:
        The bytes of a checksum over integers and texts, and `_SAMPLES` real values.
    """
    leaves = [t for t in tf.nest.flatten(values, expand_composites=True) if t is not None]
    arrays = [view_of(t) if tf.is_tensor(t) else np.asarray(t) for t in leaves]
    reals: list[float] = []
    for number in range(_SAMPLES):
        flat = arrays[number % len(arrays)].reshape(-1)
        value = flat[(step * 7919 + number * 104729) % len(flat)] if len(flat) else 0
        if flat.dtype.kind in "biuOSU":
            text = value if isinstance(value, bytes) else str(value).encode(errors="replace")
            checksum, value = zlib.crc32(text, checksum), 0
        reals.append(float(np.real(value)))
    return [*map(float, checksum.to_bytes(_PIECES, "little")), *reals]


def differing(total: np.ndarray, squares: np.ndarray, count: int) -> list[bool]:
    """Whether tasks differ in their results of `_sampled`, for each of these.

    Sums of bytes and of their squares are exact in float64, with up to 2**18 tasks.

    Args:
        total: float64 [n], the sums of all tasks' values.
        squares: float64 [n], the sums of their squares.
        count: number of tasks.
    """
    variance = count * squares - total * total  # if one task is off by x, about x**2 * count
    allowed = _TOLERANCE * squares
    each: np.ndarray = np.arange(len(total)) % (_PIECES + _SAMPLES)
    differs = variance > np.where(each < _PIECES, 0, allowed)
    return [bool(part.any()) for part in np.split(differs, len(total) // (_PIECES + _SAMPLES))]
