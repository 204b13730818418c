"""The embedding of ids that come and go: a fixed number of rows, which ids take and lose.

A training step, on the ids of the global batch:

    record the step for ids that have a row
    count the others
    ids that were seen `min_count` times now take the rows that were used longest ago
        these rows, and their slots of the optimizer, are initialized again
    look up the rows of this replica's ids; all ids without a row share row 0

All of it is arithmetic on ordinary variables of the layer, so it is in backups and exports as they
are. The step depends on which ids the batch has and how often, and not on their order: so it is the
same on every replica, and with any number of replicas.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfmw.compat import row_updates, table_variables
from tfmw.errors import UsageError, is_whole, require_whole
from tfmw.tables import hashing
from tfmw.tables.hash_table import Part, counted, places_within, ways_of, where

_ID_BYTES = 16  # bytes of a row: its id, and the step of its last use
_CANDIDATE_BYTES = 24  # bytes of an id that waits for a row: the same, and a count
_CANDIDATES = 2  # for each row; bench/dynamic_ids.py shows the effect of one

row_updates.note_slots()


@keras.saving.register_keras_serializable(package="tfmw")
class HashTableEmbedding(keras.layers.Layer):
    """An embedding of ids that are not known in advance, in bounded memory.

    An id gets a row of its own in the training step in which it is seen for the `min_count`-th
    time. If no row is free, it takes the one that was used longest ago, of the 16 rows that its
    hash value allows it. The row and the optimizer's slots for it are then initialized again. Ids
    without a row share row 0, which is trained like any other. Only training assigns rows to ids;
    `evaluate`, `predict` and exports look rows up.

    On parameter servers each server has the rows of some buckets, and the state of their ids. Each
    worker's batch is then a step of its own.

    A step counts each call with `training=True`: if a model calls the layer twice in a step, that
    is two.

        layer = tfmw.layers.HashTableEmbedding(8, capacity=100_000, min_count=2, max_age=10_000)
        model = keras.Sequential([keras.Input((), dtype="int64"), layer, keras.layers.Dense(1)])

    Args:
        output_dim: the length of a row.
        capacity: the most ids that have a row at a time; rounded down to whole buckets of 16.
        max_bytes: in place of `capacity`, the most bytes of the layer's variables: rows, and the
            state of ids. Each of the optimizer's slots is as large as the rows. Parameter servers
            share them equally.
        min_count: how often an id is seen, repetitions within a batch included, before it gets a
            row. For `min_count` over 1 the ids seen last are counted, twice as many as have rows.
        max_age: number of steps; ids not seen for longer lose their row, or their count. None for
            no such limit.
        embeddings_initializer: initializer of a row when an id gets it: "uniform", "zeros", or an
            object of `keras.initializers.RandomUniform`, `Zeros`, `Ones` or `Constant` (one
            number). Random values depend on `seed`, the id and the column only. Row 0 begins with
            zeros.
        seed: an int, the seed of the hash functions and of initial values.
        **options: arguments of `keras.layers.Layer`, such as `name` and `dtype`.

    Input:
        int64 or string (other integers are cast), of any shape [...]. Strings are hashed to 63
        bits: of ten million of them, two have the same hash with a probability of 1 in 200,000.

    Output:
        The layer's compute dtype, [..., output_dim].

    Raises:
        UsageError: a wrong argument, or ids of another type.
    """

    def __init__(
        self,
        output_dim: int,
        *,
        capacity: int | None = None,
        max_bytes: int | None = None,
        min_count: int = 1,
        max_age: int | None = None,
        embeddings_initializer: Any = "uniform",
        seed: int = 0,
        **options: Any,
    ):
        super().__init__(**options)
        self.output_dim = require_whole("output_dim", output_dim, 1)
        self.min_count = require_whole("min_count", min_count, 1)
        self.max_age = None if max_age is None else require_whole("max_age", max_age, 1)
        self.embeddings_initializer = _initializer(embeddings_initializer)
        self.seed = seed
        if not is_whole(seed):
            raise UsageError(f"seed={seed!r}: expected an int, the same on all workers.")
        if (capacity is None) == (max_bytes is None):
            raise UsageError(
                f"received capacity={capacity!r} and max_bytes={max_bytes!r}: expected one of "
                "them, such as capacity=100_000."
            )
        self.capacity = None if capacity is None else require_whole("capacity", capacity, 1)
        self.max_bytes = None if max_bytes is None else require_whole("max_bytes", max_bytes, 1)
        self._places = places_within(self._most_rows())
        self.supports_jit = False  # XLA has no op for the unique ids of a batch

    def _most_rows(self) -> int:
        if self.max_bytes is None:
            assert self.capacity is not None
            return self.capacity
        row = self.output_dim * tf.as_dtype(self.variable_dtype).size
        of_each = row + _ID_BYTES + _CANDIDATES * _CANDIDATE_BYTES * (self.min_count > 1)
        rows = (self.max_bytes - row - 8) // of_each
        if rows < 1:
            raise UsageError(
                f"max_bytes={self.max_bytes} is less than one row takes: expected "
                f"{of_each} bytes for each id, and {row + 8} more."
            )
        return rows

    def build(self, input_shape: Any) -> None:
        """Creates the variables, whose size never changes."""
        del input_shape
        ways = ways_of(self._places)
        self._buckets = self._places // ways
        of_rows = table_variables.Partitioning(self._buckets, ways, first=1)
        self.embeddings = table_variables.add_partitioned(
            self,
            of_rows,
            name="embeddings",
            shape=(self._places + 1, self.output_dim),
            initializer="zeros",
        )
        row_updates.resets_rows(self.embeddings)
        self.step = self._state("step", ())
        self.ids = self._state("ids", (self._places,), like=self.embeddings)
        self.used = self._state("used", (self._places,), like=self.ids)
        if self.min_count > 1:
            shape = (places_within(_CANDIDATES * self._places),)
            self.candidate_ids = self._state("candidate_ids", shape, like=self.embeddings)
            self.candidate_used = self._state("candidate_used", shape, like=self.candidate_ids)
            self.candidate_counts = self._state("candidate_counts", shape, like=self.candidate_ids)
        self._all = Part(self)
        self.built = True

    def _state(self, name: str, shape: tuple[int, ...], like: Any = None) -> Any:
        """A variable of integers, divided like the variable `like`."""
        described = {"name": name, "shape": shape, "dtype": "int64", "initializer": "zeros"}
        if like is None:
            return self.add_weight(**described, trainable=False)
        partitioning = table_variables.Partitioning(
            self._buckets, shape[0] // self._buckets, follows=like
        )
        return table_variables.add_partitioned(self, partitioning, **described, trainable=False)

    # ------------------------------------------------------------ steps

    def call(self, ids: Any, training: bool | None = None) -> Any:
        """Rows of the ids; in training, ids may get rows first."""
        if isinstance(ids, (tf.RaggedTensor, tf.SparseTensor)):
            raise UsageError(
                f"layer {self.name!r} received a {type(ids).__name__}: expected a dense tensor of "
                "ids; pad it, or look up its values."
            )
        ids = tf.convert_to_tensor(ids)
        self._require_ids(ids.dtype)
        ids = hashing.fingerprints(ids, self.seed)
        rows = self.look_up(tf.reshape(ids, [-1]), bool(training and self.trainable))
        rows = tf.reshape(rows, tf.concat([tf.shape(ids), [self.output_dim]], axis=0))
        rows.set_shape(ids.shape.concatenate(self.output_dim))
        return keras.ops.cast(rows, dtype=self.compute_dtype)

    def look_up(self, ids: tf.Tensor, is_step: bool) -> tf.Tensor:
        """[n, output_dim], rows of the ids; training on parameter servers replaces this method.

        Args:
            ids: int64 [n], the input's ids, or the fingerprints of its strings.
            is_step: whether ids may get rows first.
        """
        if is_step:
            counts = row_updates.counts_of_all_replicas(*counted(ids, tf.ones_like(ids)))
            distinct, counts = counted(*counts)
            distinct, counts = where(counts > 0, distinct, counts)
            # A batch without ids is the end of the data, and no step.
            self._all.step(distinct, counts, tf.size(distinct) > 0)
        return keras.ops.take(self.embeddings, self._all.rows(ids), axis=0)

    def rows_of(self, ids: Any) -> Any:
        """int64, of the shape of `ids`: the row of `embeddings` of each, 0 for ids without one."""
        ids = hashing.fingerprints(tf.convert_to_tensor(ids), self.seed)
        return tf.reshape(self._all.rows(tf.reshape(ids, [-1])), tf.shape(ids))

    def known_ids(self) -> np.ndarray:
        """int64 [n], the ids that have a row, in increasing order; strings as their hash values."""
        used = self.used.numpy()
        return np.sort(self.ids.numpy()[used >= int(self._all.oldest())])

    def _require_ids(self, dtype: tf.DType) -> None:
        if not (dtype.is_integer or dtype == tf.string):
            raise UsageError(
                f"layer {self.name!r} received ids of type {dtype.name}: expected int64 or "
                'string; declare the input with keras.Input(..., dtype="int64").'
            )

    # ------------------------------------------------------------ Keras

    def compute_output_spec(self, ids: Any, training: bool | None = None) -> keras.KerasTensor:
        """Shape and type of the output."""
        del training
        self._require_ids(tf.as_dtype(ids.dtype))
        return keras.KerasTensor((*ids.shape, self.output_dim), dtype=self.compute_dtype)

    def compute_output_shape(self, input_shape: Any) -> tuple[int | None, ...]:
        """[..., output_dim]."""
        return (*input_shape, self.output_dim)

    def get_config(self) -> dict[str, Any]:
        """The arguments of the layer, as JSON."""
        own = {
            "output_dim": self.output_dim,
            "capacity": self.capacity,
            "max_bytes": self.max_bytes,
            "min_count": self.min_count,
            "max_age": self.max_age,
            "embeddings_initializer": keras.initializers.serialize(self.embeddings_initializer),
            "seed": self.seed,
        }
        return {**super().get_config(), **own}


def _initializer(identifier: Any) -> Any:
    initializer = keras.initializers.get(identifier)
    kinds = keras.initializers
    is_constant = isinstance(initializer, kinds.Constant) and np.ndim(initializer.value) == 0
    if is_constant or isinstance(initializer, (kinds.RandomUniform, kinds.Zeros, kinds.Ones)):
        return initializer
    raise UsageError(
        f"embeddings_initializer={identifier!r}: expected RandomUniform, Zeros, Ones or a Constant "
        "of one number, which make a row without the others."
    )
