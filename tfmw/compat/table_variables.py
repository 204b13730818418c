"""Keras variables with rows on servers: their creation, initial values and lookups.

    make_variables_by(make)                        # decides for each new variable of this process
    rows = initial_rows(initializer, [10**9, 64], tf.float32)
    rows(1000, 2000)                               # as initializer([10**9, 64])[1000:2000]

Keras's random initializers draw by a counter-based generator (Philox): element n of a draw depends
on the seed and on n only, so any rows of it can be drawn alone, bit for bit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.ops import gen_stateless_random_ops_v2 as _draws
from tensorflow.python.ops import resource_variable_ops as _resource_variables
from tensorflow.python.trackable.base import VARIABLE_VALUE_KEY as VARIABLE_VALUE

from tfmw.compat.models import native, set_native
from tfmw.compat.objects import backend_module, overridden, overridden_here
from tfmw.compat.parameter_servers import RemoteRows
from tfmw.compat.row_updates import note_slots, slot_of_new

_core = backend_module("core")
_numpy = backend_module("numpy")

InitialRows = Callable[[int, int], tf.Tensor]
"""(start, stop) -> the rows [stop - start, ...] of an initial value."""

_GROUP = 4  # a group of 4 elements of 4 bytes, or of 2 of 8, begins at a counter of its own
# Number of counters for so many bytes of a draw: one for 128 bits. Truncated normals reject values,
# so 64 are reserved for each element: tensorflow/core/kernels/random_op_cpu.h,
# FillPhiloxRandomTask.
COUNTERS: dict[str, Callable[[int, int], int]] = {
    "stateless_random_uniform_v2": lambda elements, size: elements * size // 16,
    "stateless_random_normal_v2": lambda elements, size: elements * size // 16,
    "stateless_truncated_normal_v2": lambda elements, size: elements * 64,
}
_DRAWN = (
    keras.initializers.RandomUniform,
    keras.initializers.RandomNormal,
    keras.initializers.TruncatedNormal,
    keras.initializers.VarianceScaling,  # and its subclasses: Glorot, He, Lecun
)


# ---------------------------------------------------------------- new variables


@dataclasses.dataclass(frozen=True)
class Partitioning:
    """Places at which a layer's variable may be divided: between units of consecutive rows."""

    units: int  # number of units
    rows: int  # rows of each unit
    first: int = 0  # rows before the first unit, which stay with it
    # The Keras variable, partitioned into as many units, whose shards have the same units on the
    # same servers; None: no such variable.
    follows: Any = None

    def rows_of(self, start: int, stop: int) -> tuple[int, int]:
        """The rows [start, stop) of the units [start, stop)."""
        return (self.first if start else 0) + start * self.rows, self.first + stop * self.rows

    def ranges(self, count: int) -> list[tuple[int, int]]:
        """The rows [start, stop) of each of `count` shards, which have at least one unit each."""
        bounds = [self.units * i // count for i in range(count + 1)]
        return [self.rows_of(*units) for units in itertools.pairwise(bounds)]

    def units_of(self, start: int, stop: int) -> tuple[int, int]:
        """The inverse of `rows_of`."""
        return (start - self.first if start else 0) // self.rows, (stop - self.first) // self.rows

    def rows_beside(self, leader: Partitioning, start: int, stop: int) -> tuple[int, int]:
        """The rows of the units that correspond to the rows [start, stop) of a leader."""
        return self.rows_of(*leader.units_of(start, stop))

    def has_rows_of(self, other: Partitioning) -> bool:
        """Whether the same units have the same rows in both variables."""
        return (self.rows, self.first) == (other.rows, other.first)


_PARTITIONING = "_tfmw_partitioning"  # attribute of Keras variables


def add_partitioned(layer: Any, partitioning: Partitioning, **described: Any) -> Any:
    """Calls `layer.add_weight(**described)` for a variable with this partitioning over servers."""
    with overridden([(_building, "partitioning", partitioning)]):
        variable = layer.add_weight(**described)
    setattr(variable, _PARTITIONING, partitioning)
    return variable


def partitioning_of(variable: Any) -> Partitioning | None:
    """The partitioning of a Keras variable of `add_partitioned`; None for other variables."""
    return getattr(variable, _PARTITIONING, None)


@dataclasses.dataclass(frozen=True)
class NewVariable:
    """A Keras variable that has no value yet."""

    path: str
    shape: list[int]
    dtype: tf.DType
    trainable: bool
    initializer: Any  # (shape, dtype) -> the initial value
    slot_of: Any  # the Keras variable whose slot of an optimizer it is, or None
    partitioning: Partitioning | None = None  # None: it may be divided between any rows

    @property
    def row_bytes(self) -> int:
        """Size of one row in bytes."""
        return math.prod(self.shape[1:]) * int(self.dtype.size)


_make: Callable[[NewVariable], RemoteRows | None] | None = None
_building = threading.local()  # `partitioning`: that of the weight that a layer creates


def make_variables_by(make: Callable[[NewVariable], RemoteRows | None]) -> None:
    """Lets `make` create the value of each new Keras variable; None: a `tf.Variable`."""
    global _make
    _install()
    _make = make


@functools.cache
def _install() -> None:
    note_slots()
    keras_initialize = _core.Variable._initialize_with_initializer
    keras_repr = _core.Variable.__repr__

    def initialize(self: Any, initializer: Any) -> None:
        dtype = tf.as_dtype(self._dtype)
        partitioning = partitioning_of(self) or getattr(_building, "partitioning", None)
        new = NewVariable(
            path=self.path,
            shape=list(self._shape),
            dtype=dtype,
            trainable=self.trainable,
            initializer=initializer,
            slot_of=slot_of_new(),
            partitioning=partitioning,
        )
        rows = None if _make is None else _make(new)
        if rows is None:
            keras_initialize(self, initializer)
            return
        set_native(self, rows)  # Keras has set the shape
        # `tf.gather` looks for this method, and otherwise reads the whole variable.
        self.__dict__["sparse_read"] = functools.partial(_sparse_read, self)

    def represent(self: Any) -> str:
        # Keras's own repr shows the value
        return repr(self._value) if isinstance(self._value, RemoteRows) else keras_repr(self)

    _core.Variable._initialize_with_initializer = initialize
    _core.Variable.__repr__ = represent
    _numpy.take = _taking_rows(_numpy.take)


def _sparse_read(variable: Any, indices: Any, name: str | None = None) -> tf.Tensor:
    rows = native(variable)
    return rows.sparse_read(indices) if isinstance(rows, RemoteRows) else tf.gather(rows, indices)


def _taking_rows(keras_take: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `keras.ops.take` to look up rows of `RemoteRows`; Keras's reads the value's shape."""

    @functools.wraps(keras_take)
    def take(x: Any, indices: Any, axis: int | None = None) -> Any:
        rows = native(x) if isinstance(x, keras.Variable) else x
        is_lookup = isinstance(rows, RemoteRows) and axis == 0
        if not is_lookup or isinstance(indices, tf.SparseTensor):
            return keras_take(x, indices, axis)

        def found(ids: tf.Tensor) -> tf.Tensor:
            ids = tf.convert_to_tensor(ids)
            ids = tf.where(ids < 0, ids + tf.cast(x.shape[0], ids.dtype), ids)
            return tf.cast(rows.sparse_read(ids), x.dtype)  # a Keras variable may be autocast

        if isinstance(indices, tf.RaggedTensor):
            return tf.ragged.map_flat_values(found, indices)
        return found(indices)

    return take


class ValuelessVariable(_resource_variables.BaseResourceVariable):
    """A variable without a value, which a SavedModel has in place of rows on servers.

    Its checkpoint has `mark` in place of the value, under the name that the value would have.
    """

    def __init__(self, name: str, shape: Any, dtype: tf.DType, trainable: bool, mark: str):
        handle = _resource_variables._variable_handle_from_shape_and_dtype(
            shape, dtype, shared_name=None, name=name, graph_mode=False
        )
        super().__init__(
            trainable=trainable,
            shape=shape,
            dtype=dtype,
            handle=handle,
            name=name,
            unique_id=mark,
            handle_name=name,
        )
        self._mark = mark

    def _serialize_to_tensors(self) -> dict[str, tf.Tensor]:
        return {VARIABLE_VALUE: tf.constant(self._mark)}


class ExternalRows(RemoteRows):
    """A variable without rows, which a SavedModel has in place of one with rows in files."""

    def __init__(
        self,
        name: str,
        shape: list[int],
        dtype: tf.DType,
        look_up: Callable[[tf.Tensor], tf.Tensor],
        read: Callable[[], tf.Tensor],
        trainable: bool,
    ):
        with tf.device("CPU:0"):
            super().__init__(name, [0, *shape[1:]], dtype, look_up, read, trainable)

    def _serialize_to_tensors(self) -> dict[str, tf.Tensor]:
        return {VARIABLE_VALUE: tf.zeros(self.shape, self.dtype)}


def track_asset(archive: keras.export.ExportArchive, asset: Any) -> None:
    """Adds a `tf.saved_model.Asset` to an archive, whose endpoints use its path."""
    archive._tf_trackable.tfmw_asset = asset


# ---------------------------------------------------------------- initial values


def initial_rows(initializer: Any, shape: list[int], dtype: tf.DType) -> InitialRows | None:
    """Rows of `initializer(shape, dtype)`, each range alone; None if it makes only the whole."""
    is_constant = type(initializer) is keras.initializers.Constant
    if type(initializer) in (keras.initializers.Zeros, keras.initializers.Ones) or (
        is_constant and np.ndim(initializer.value) == 0
    ):
        return lambda start, stop: initializer([stop - start, *shape[1:]], dtype=dtype.name)
    if is_constant:
        values = np.broadcast_to(np.asarray(initializer.value), shape)
        return lambda start, stop: tf.cast(tf.convert_to_tensor(values[start:stop]), dtype)
    is_of_keras = type(initializer).__module__.startswith("keras.")
    if not (is_of_keras and isinstance(initializer, _DRAWN) and dtype.is_floating):
        return None
    if not isinstance(initializer.seed, int):
        return None  # a generator, which advances with each draw

    def draw(start: int, stop: int) -> tf.Tensor:
        with _drawing_rows(shape, start, stop):
            return initializer(shape, dtype=dtype.name)

    return draw


@contextlib.contextmanager
def _drawing_rows(shape: list[int], start: int, stop: int) -> Iterator[None]:
    """Restricts a draw of this shape to some of its rows, on this thread, in this context."""

    def rows_only(name: str) -> Callable[..., tf.Tensor]:
        draw = getattr(_draws, name)

        def drawn(whole: Any, **options: Any) -> tf.Tensor:
            if list(np.asarray(whole)) != shape:
                return draw(whole, **options)
            return _draw_rows(draw, COUNTERS[name], shape, start, stop, options)

        return drawn

    with overridden_here([(_draws, name, rows_only(name)) for name in COUNTERS]):
        yield


def _draw_rows(
    draw: Callable[..., tf.Tensor],
    counters: Callable[[int, int], int],
    shape: list[int],
    start: int,
    stop: int,
    options: dict[str, Any],
) -> tf.Tensor:
    """Rows of `draw(shape, **options)`, by an op of Philox that begins at a later counter.

    Args:
        counters: (elements, bytes of each) -> the number of counters that these elements use.
    """
    width = math.prod(shape[1:])
    first = start * width // _GROUP * _GROUP
    size = max(tf.as_dtype(options["dtype"]).size, 4)  # 16-bit values are drawn as 32 bits
    low, high = (int(part) for part in options["counter"].numpy())
    counter = (low + (high << 64) + counters(first, size)) % (1 << 128)
    parts = np.array([counter % (1 << 64), counter >> 64], np.uint64)
    options = {**options, "counter": tf.constant(parts)}
    values = draw([stop * width - first], **options)
    return tf.reshape(values[start * width - first :], [stop - start, *shape[1:]])
