"""Steps of a loop of the user's own: one batch a call, on all replicas.

    batches = BatchDriver(model, strategy)
    logs = batches.step("train", (x, y, None))      # the same batch on every task

A step is one traced function. At its end metrics, moving averages and seeds are equal on all
replicas, so that between two calls the model is an ordinary one, which a loop may read, save and
change. No message is needed but the step's own collectives: samples of the batch and a checksum of
one variable travel with the metrics, and show if tasks differ.
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
from tfmw.data.batches import rows_from, rows_of
from tfmw.errors import UsageError
from tfmw.keras_compat import placement
from tfmw.keras_compat.memory import view_of
from tfmw.mirrored.driver import SyncDriver
from tfmw.mirrored.replicas import new_function
from tfmw.runtime.progress import blocking_call, report_alive, report_progress

_training_steps = itertools.count(1)  # of all models of a loop

_SAMPLES = 16  # values of a batch that tasks compare in a step
_TOLERANCE = 1e-5  # relative variance: hosts may round a batch that they computed differently
_CHECKED_BYTES = 1 << 16  # of one variable in a step


class BatchDriver:
    """Steps of one model, a batch a call.

    Args:
        model: compiled and built.
        strategy: a synchronous strategy.
    """

    def __init__(self, model: keras.Model, strategy: tf.distribute.Strategy):
        self._model = model
        self._strategy = strategy
        self._driver = SyncDriver(model, strategy)
        self._driver.copies = {}
        self._functions: dict[Any, Any] = {}
        self._traced: set[Any] = set()
        self._steps = 0
        self._variables = placement.all_variables(model)

    @property
    def sharding(self) -> data.Sharding:
        """How a batch is divided."""
        return self._driver.sharding

    def step(self, kind: str, batch: Any) -> dict[str, Any]:
        """Trains or evaluates on one batch, the same on all tasks; returns its logs.

        A collective: all tasks must call it.

        Args:
            kind: "train" or "test".
            batch: (x, y, sample weights), structures of arrays [examples, ...].

        Raises:
            UsageError: tensors of different lengths, or tasks that differ.
        """
        total = _examples(batch)
        sharding = self.sharding
        sizes = data.ShardSizes.of(total, sharding)
        uneven = sharding.replicas > 1 and (sizes.empty or sizes.uneven)
        parts = tuple(
            data.map_tensors(functools.partial(_rows, replica=replica, sharding=sharding), batch)
            for replica in sharding.local
        )
        examples = tf.constant(total, tf.int64)
        with self._step_of(kind, uneven, parts, examples) as function:
            witness = self._witness(batch, total)
            logs, sums = function(parts, examples, witness)
        self._refuse_differences(np.asarray(sums, np.float64))
        self._steps += 1
        self._driver.examples += total
        if kind == "train":
            report_progress(next(_training_steps))
        else:
            report_alive()
        return logs

    @contextlib.contextmanager
    def _step_of(self, kind: str, uneven: bool, *arguments: Any) -> Iterator[Callable[..., Any]]:
        """The function of a step, traced, and a context in which the model is placed."""
        if self._model.run_eagerly:
            with self._driver as driver:
                yield driver.batch_step(kind, uneven)
            return
        key = (kind, uneven)
        shapes = (*key, str(tf.nest.map_structure(tf.type_spec_from_value, arguments)))
        if shapes not in self._traced:
            with self._driver as driver, blocking_call("tracing"):
                if key not in self._functions:
                    step = driver.batch_step(kind, uneven)
                    self._functions[key] = new_function(step, reduce_retracing=True)
                self._functions[key].get_concrete_function(*arguments, self._no_witness)
            self._traced.add(shapes)
        # Variables of one replica stay where they are; copies of several get the values of now.
        copies = self._driver.copies
        placed = placement.placed(self._model, self._strategy, copies, seeds_vary=False)
        with placed if copies else contextlib.nullcontext(), self._driver.lost_peer_named():
            yield self._functions[key]

    # ------------------------------------------------------------ what tasks compare

    @property
    def _no_witness(self) -> tf.Tensor:
        return tf.zeros([0 if self.sharding.workers == 1 else 2 * (_SAMPLES + 2)])

    def _witness(self, batch: Any, total: int) -> tf.Tensor:
        """float32 [n]: values that must be equal on all tasks, each with its square."""
        workers = self.sharding.workers
        if workers == 1:
            return self._no_witness
        bits = (24 - (workers - 1).bit_length()) // 2  # so sums of squares are exact in float32
        variable = placement.local_copies(self._strategy, self._variable_of_step)[0]
        exact = [zlib.crc32(b"%d" % total), _checksum(variable)]
        values = _sampled(batch, self._steps) + [float(each >> (32 - bits)) for each in exact]
        return tf.constant([each for v in values for each in (v, v * v)], tf.float32)

    @property
    def _variable_of_step(self) -> Any:
        return self._variables[self._steps % len(self._variables)]

    def _refuse_differences(self, sums: np.ndarray) -> None:
        """Raises UsageError on all tasks if a batch, or a variable, was not the same on all.

        Args:
            sums: over tasks, of `_witness`.
        """
        if not len(sums):
            return
        count, total, squares = self.sharding.workers, sums[0::2], sums[1::2]
        variance = count * squares - total * total
        samples = variance[:-2] > _TOLERANCE * count * squares[:-2]
        if samples.any() or variance[-2]:
            raise UsageError(
                "tasks passed different batches in this call: expected the same whole batch on "
                "every task, of which each takes its part. Draw random numbers from the same seed "
                "on every task."
            )
        if variance[-1]:
            raise UsageError(
                f"{self._variable_of_step.path!r} differs between tasks: the loop changed it on "
                "some tasks only. Make the same change on every task."
            )


def _examples(batch: Any) -> int:
    """The number of examples, the same in each tensor of a batch."""
    leaves = [t for t in tf.nest.flatten(batch) if t is not None]
    lengths = [int(rows_of(t)) if tf.is_tensor(t) else int(np.shape(t)[0]) for t in leaves]
    if not lengths or len(set(lengths)) > 1 or not lengths[0]:
        raise UsageError(
            f"received a batch of tensors with {lengths} rows: expected one number of examples, "
            "more than 0, along the first axis of each."
        )
    return lengths[0]


def _rows(tensor: Any, replica: int, sharding: data.Sharding) -> Any:
    """Rows of one replica: example j is replica j mod R's, and the first one of a spare replica."""
    if sharding.replicas == 1:
        return tf.convert_to_tensor(tensor) if isinstance(tensor, np.ndarray) else tensor
    if isinstance(tensor, tf.SparseTensor):
        return rows_from(tensor, replica, sharding.replicas)
    length = int(rows_of(tensor)) if tf.is_tensor(tensor) else len(tensor)
    rows = tensor[replica :: sharding.replicas] if replica < length else tensor[:1]
    return tf.constant(rows) if isinstance(rows, np.ndarray) else rows


def _sampled(batch: Any, step: int) -> list[float]:
    """Some values of a batch, others in each step; a text counts by its checksum."""
    leaves = [t for t in tf.nest.flatten(batch, expand_composites=True) if t is not None]
    arrays = [view_of(t) if tf.is_tensor(t) else np.asarray(t) for t in leaves]
    out: list[float] = []
    for number in range(_SAMPLES):
        flat = arrays[number % len(arrays)].reshape(-1)
        value = flat[(step * 7919 + number * 104729) % len(flat)] if len(flat) else 0
        if isinstance(value, bytes | str | np.bytes_ | np.str_):
            value = zlib.crc32(value.encode() if isinstance(value, str) else value) >> 16
        out.append(float(np.real(value)))
    return out


def _checksum(variable: tf.Variable) -> int:
    """A checksum of the first values of a variable, of 32 bits."""
    if variable.dtype == tf.string:
        return 0
    values = view_of(variable.read_value()).reshape(-1)
    return zlib.crc32(
        np.ascontiguousarray(values[: _CHECKED_BYTES // values.itemsize]).view(np.uint8).data
    )
