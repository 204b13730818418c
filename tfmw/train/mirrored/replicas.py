"""Replicas of a strategy, those of this process, and the functions traced for them."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from tfmw.cluster.group import Group
from tfmw.compat import models, placement, runtime
from tfmw.data import Sharding
from tfmw.data.whole_batches import WHOLE_BATCHES
from tfmw.errors import UsageError
from tfmw.observe.progress import blocking_call
from tfmw.train.mirrored.collectives.all_reduce import RingBroken

if TYPE_CHECKING:
    from tfmw.train.mirrored.collectives.transports import Transport

_REFUSAL = re.compile(rf"a batch has \d+ rows in .*? {re.escape(WHOLE_BATCHES)}", re.DOTALL)
_OF_SHAPES = re.compile(r"shape|dimension|incompatible|broadcast|Reshape|size", re.IGNORECASE)


class Replicas:
    """All replicas of a synchronous strategy, and the local ones of this process.

    Args:
        strategy: mirrored, multi-worker mirrored, or TensorFlow's default.
        transport: transport between its replicas.
    """

    def __init__(self, strategy: tf.distribute.Strategy, transport: Transport):
        self.transport = transport
        self.strategy = strategy
        self.group = Group.of(strategy)  # the processes that train together
        self.sharding = Sharding(
            self.group.size, self.group.rank, placement.local_replicas(strategy)
        )

    @property
    def count(self) -> int:
        """Number of replicas, over all processes."""
        return self.strategy.num_replicas_in_sync

    @property
    def local(self) -> int:
        """Number of replicas of this process."""
        return self.sharding.local_replicas

    def local_index(self) -> int:
        """Index of the running replica among this process's; see `local_index`."""
        return local_index(self.strategy)

    def call(self, function: Callable[..., Any], args: tuple[Any, ...] = ()) -> Any:
        """Calls a function on each local replica; see `tf.distribute.Strategy.run`."""
        with runtime.without_eager_advice():
            return self.strategy.run(function, args=args)

    def run(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Runs a model's function on each local replica."""
        try:
            return self.call(models.with_unseeded_generator(function), args)
        except RuntimeError as e:
            if "merge_call" not in str(e):
                raise
            raise UsageError(
                "a step applies gradients, or combines other values of all replicas, within "
                "tf.cond or tf.while_loop. Several replicas of one process cannot do so there: "
                "apply gradients outside, as an optimizer with gradient_accumulation_steps does, "
                "or train with one replica in each process."
            ) from None

    def sum(self, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Sums over all replicas, one reduction per wire dtype; called in a replica context."""
        return in_packs(values, self.transport.summed)

    @contextlib.contextmanager
    def lost_peer_named(self) -> Iterator[None]:
        """Replaces the error of an exchange by one that names the lost task and the reason."""
        try:
            with self.group.shared_call():
                yield
        except Exception as e:
            ring = self.transport.ring
            broken = None if ring is None else ring.broken
            # TensorFlow wraps the exception of an op, except in eager execution. `broken` is
            # another one if the ring was closed first, because the loss of a worker was known.
            if broken is None or not (e is broken or isinstance(e, tf.errors.OpError | RingBroken)):
                raise
            lost = isinstance(broken, OSError | tf.errors.OpError)
            raise (self.group.root_cause(broken) if lost else broken) from None

    @contextlib.contextmanager
    def step_errors(self, splits: bool) -> Iterator[None]:
        """Adds a hint to the errors of a step that partial batches may cause.

        Args:
            splits: whether each replica has a shard of the batch.
        """
        try:
            with self.lost_peer_named():
                yield
        except (ValueError, TypeError, tf.errors.InvalidArgumentError) as e:
            if self.count == 1 or not splits:
                raise
            refusal = _REFUSAL.search(str(e))
            if refusal is not None:
                raise UsageError(refusal.group()) from None
            if "None" in str(e):
                e.add_note(
                    "tfmw: steps are traced for batches of any size, of which a replica has a "
                    "part: use keras.ops.shape(x)[0], which is a tensor, in place of x.shape[0]."
                )
            if _OF_SHAPES.search(str(e)):
                e.add_note(
                    f"tfmw: each of {self.count} replicas had a part of the batch. If the model "
                    "needs whole batches, pass split_batch=False: each replica then takes one."
                )
            raise

    def from_chief(self, numbers: Sequence[float]) -> list[float]:
        """The chief's numbers, on every task. A collective, with as many numbers on each.

        Over the ring it takes a tenth of the time of `Group.from_chief`.
        """
        ring = self.transport.ring
        if ring is None:
            return [float(n) for n in self.group.from_chief(lambda: list(numbers))]
        with self.lost_peer_named():
            limit_s, ring.timeout_s = ring.timeout_s, None  # the chief may be in a callback
            try:
                values = ring.broadcast(np.array(numbers, np.float64), what="decisions")
                return [float(value) for value in values]
            finally:
                ring.timeout_s = limit_s

    def own_row(self, value: tf.Tensor) -> tf.Tensor:
        """[replicas, ...]: the value in the row of this replica, and zeros in the other rows.

        The sum over replicas has the values of all replicas. Called in a replica context.
        """
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        numbers = tf.reshape(tf.range(self.count), [-1] + [1] * value.shape.rank)
        return tf.where(numbers == replica, value[None], tf.zeros_like(value)[None])

    def rows(self, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """[replicas, ...], all replicas' values of each value; called in a replica context."""
        rows = [self.own_row(value) for value in values]
        return self.sum(rows) if self.count > 1 else rows

    def local_results(self, value: Any) -> tuple[Any, ...]:
        """The values on this process's replicas, of a result of `strategy.run`."""
        results: tuple[Any, ...] = self.strategy.experimental_local_results(value)
        return results

    def first_result(self, value: Any) -> Any:
        """The value on this process's first replica, for values that are the same on all."""
        return self.local_results(value)[0]


def local_index(strategy: tf.distribute.Strategy) -> int:
    """Index of the running replica among this process's; called in a replica context."""
    if placement.local_replicas(strategy) == 1:
        return 0
    replica = tf.distribute.get_replica_context()
    number = int(tf.get_static_value(replica.replica_id_in_sync_group))
    return number - placement.first_local_replica(strategy)


def wire_dtype_of(dtype: tf.DType) -> tf.DType:
    """The dtype in which values of `dtype` are sent unchanged, as collectives support only a few.

    Complex values are sent as pairs of their parts.
    """
    if dtype.is_complex:
        dtype = dtype.real_dtype
    if dtype.is_floating:
        return tf.float64 if dtype == tf.float64 else tf.float32
    return tf.int64


def in_packs(
    values: Sequence[tf.Tensor], exchange: Callable[[tf.Tensor], tf.Tensor]
) -> list[tf.Tensor]:
    """Calls a collective on one flat tensor per wire dtype, instead of on each value.

    Args:
        values: the same shapes and dtypes on all replicas.
        exchange: a collective, [n] -> [n], such as a sum over replicas.

    Returns:
        The results in the shapes and dtypes of `values`.
    """
    out: list[Any] = [None] * len(values)
    by_carrier: dict[tf.DType, list[int]] = {}
    for i, value in enumerate(values):
        by_carrier.setdefault(wire_dtype_of(value.dtype), []).append(i)
    for carrier, positions in sorted(by_carrier.items(), key=lambda item: item[0].name):
        own = [_carried(values[i], carrier) for i in positions]
        for i, part in zip(positions, split_as(exchange(flattened(own)), own), strict=True):
            convert = tf.bitcast if values[i].dtype.is_complex else tf.cast
            out[i] = convert(part, values[i].dtype)
    return out


def _carried(value: tf.Tensor, carrier: tf.DType) -> tf.Tensor:
    return tf.bitcast(value, carrier) if value.dtype.is_complex else tf.cast(value, carrier)


def flattened(values: Sequence[tf.Tensor]) -> tf.Tensor:
    """[n], the elements of all values; a single value is not copied."""
    row = tf.constant([-1])  # one constant for all, as every op takes time to trace and to compile
    flat = [value if value.shape.rank == 1 else tf.reshape(value, row) for value in values]
    return flat[0] if len(flat) == 1 else tf.concat(flat, axis=0)


def split(flat: tf.Tensor, sizes: Sequence[Any]) -> list[tf.Tensor]:
    """[n] -> one [size] for each of `sizes`; a single one is not copied."""
    if len(sizes) < 2:
        return [flat][: len(sizes)]
    parts: list[tf.Tensor] = tf.split(flat, sizes, num=len(sizes))
    return parts


def split_as(flat: tf.Tensor, values: Sequence[Any]) -> list[tf.Tensor]:
    """The elements of `flattened` in the shapes of `values`, which are tensors or variables."""
    parts = split(flat, [value.shape.num_elements() or tf.size(value) for value in values])
    for i, value in enumerate(values):
        shape = value.shape
        if not shape.is_fully_defined():
            parts[i] = tf.ensure_shape(tf.reshape(parts[i], tf.shape(value)), shape)
        elif shape.rank != 1:
            parts[i] = tf.reshape(parts[i], shape)
    return parts


class Traces:
    """The functions that a driver has traced, each under a key."""

    def __init__(self) -> None:
        self._functions: dict[Hashable, Callable[..., Any]] = {}

    def get(self, key: Hashable, make: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
        """The function under `key`; `make` creates it at the first call."""
        if key not in self._functions:
            self._functions[key] = make()
        return self._functions[key]

    def function(self, function: Callable[..., Any], **options: Any) -> Any:
        """A `tf.function`; while it is traced, the task counts as alive."""

        def noted(*arguments: Any) -> Any:
            with blocking_call("tracing"):
                return function(*arguments)

        return new_function(noted, **options)


def new_function(function: Callable[..., Any], **options: Any) -> Any:
    """A `tf.function` of one driver.

    TensorFlow warns if the same code is traced often, but each driver must trace its own copy. A
    separate `functools.partial` for each driver is counted separately.
    """
    return tf.function(functools.partial(function), autograph=False, **options)
