"""The embedding of ids that come and go: a fixed number of rows, which ids take and lose.

A training step, on the ids of the global batch:

    of ids that have a row, note the step
    count the others
    ids that were seen `min_count` times now take the rows that were used longest ago
        these rows, and the optimizer's slots of them, begin anew
    look up the rows of this replica's ids; row 0 is that of all ids without one

All of it is arithmetic on ordinary variables of the layer, so it is in backups and exports as they
are. The step depends on which ids the batch has and how often, and not on their order: so it is the
same on every replica, and with any number of replicas.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfmw import keras_compat
from tfmw.errors import UsageError
from tfmw.layers import hashing
from tfmw.layers.candidates import Candidates
from tfmw.layers.hash_table import HashTable, places_within

_ID_BYTES = 16  # of a row: its id, and the step of its last use
_CANDIDATE_BYTES = 24  # of an id that waits for a row: the same, and a count
_CANDIDATES = 2  # for each row; what one would cost: bench/dynamic_ids.py

keras_compat.note_slots()


@keras.saving.register_keras_serializable(package="tfmw")
class HashTableEmbedding(keras.layers.Layer):
    """An embedding of ids that are not known in advance, in bounded memory.

    An id gets a row of its own in the training step in which it is seen for the `min_count`-th
    time. Where no row is free, it takes the one that was used longest ago, of the 16 rows that its
    hash value allows it. The row and the optimizer's slots for it then begin anew. Ids without a
    row share row 0, which is trained like any other. Only training changes which id has which row;
    `evaluate`, `predict` and exports look rows up.

    A step counts each call with `training=True`: if a model calls the layer twice in a step, that
    is two.

        layer = tfmw.layers.HashTableEmbedding(8, capacity=100_000, min_count=2, max_age=10_000)
        model = keras.Sequential([keras.Input((), dtype="int64"), layer, keras.layers.Dense(1)])

    Args:
        output_dim: the length of a row.
        capacity: the most ids that have a row at a time; rounded down to whole buckets of 16.
        max_bytes: in place of `capacity`, the most bytes of the layer's variables: rows, and what
            is known of ids. The optimizer's slots are as large as the rows, each.
        min_count: how often an id is seen, repetitions within a batch included, before it gets a
            row. For `min_count` over 1 the ids seen last are counted, twice as many as have rows.
        max_age: number of steps; ids not seen for longer lose their row, or their count. None for
            no such limit.
        embeddings_initializer: of a row when an id gets it: "uniform", "zeros", or an object of
            `keras.initializers.RandomUniform`, `Zeros`, `Ones` or `Constant` (one number). Random
            values depend on `seed`, the id and the column only. Row 0 begins with zeros.
        seed: of the hash functions and of initial values, an int.
        **options: of `keras.layers.Layer`, as `name` and `dtype`.

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
        self.output_dim = _at_least_1("output_dim", output_dim)
        self.min_count = _at_least_1("min_count", min_count)
        self.max_age = None if max_age is None else _at_least_1("max_age", max_age)
        self.embeddings_initializer = _initializer(embeddings_initializer)
        self.seed = seed
        if not _is_int(seed):
            raise UsageError(f"seed={seed!r}: expected an int, the same on all workers.")
        if (capacity is None) == (max_bytes is None):
            raise UsageError(
                f"received capacity={capacity!r} and max_bytes={max_bytes!r}: expected one of "
                "them, such as capacity=100_000."
            )
        self.capacity = capacity if capacity is None else _at_least_1("capacity", capacity)
        self.max_bytes = max_bytes if max_bytes is None else _at_least_1("max_bytes", max_bytes)
        self._places = places_within(self._most_rows())
        self.supports_jit = False  # XLA has no op for the distinct ids of a batch

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
        """Creates the variables, of a size that never changes."""
        del input_shape
        self.embeddings = self.add_weight(
            name="embeddings", shape=(self._places + 1, self.output_dim), initializer="zeros"
        )
        keras_compat.resets_rows(self.embeddings)
        self.step = self._state("step", ())
        self.ids = self._state("ids", (self._places,))
        self.used = self._state("used", (self._places,))
        self._table = HashTable(self.ids, self.used, self.seed)
        self._candidates = None
        if self.min_count > 1:
            shape = (places_within(_CANDIDATES * self._places),)
            self.candidate_ids = self._state("candidate_ids", shape)
            self.candidate_used = self._state("candidate_used", shape)
            self.candidate_counts = self._state("candidate_counts", shape)
            table = HashTable(self.candidate_ids, self.candidate_used, self.seed + 1)
            self._candidates = Candidates(table, self.candidate_counts)
        self.built = True

    def _state(self, name: str, shape: tuple[int, ...]) -> Any:
        return self.add_weight(
            name=name, shape=shape, dtype="int64", trainable=False, initializer="zeros"
        )

    # ------------------------------------------------------------ steps

    def call(self, ids: Any, training: bool | None = None) -> Any:
        """The rows of the ids; in training, ids may get rows first."""
        ids = hashing.fingerprints(self._checked(ids), self.seed)
        flat = tf.reshape(ids, [-1])
        if training and self.trainable:
            self._update(flat)
        rows = tf.reshape(self._rows(flat), tf.shape(ids))
        rows.set_shape(ids.shape)
        return keras.ops.cast(
            keras.ops.take(self.embeddings, rows, axis=0), dtype=self.compute_dtype
        )

    def rows_of(self, ids: Any) -> Any:
        """int64, of the shape of `ids`: the row of `embeddings` of each, 0 for ids without one."""
        ids = hashing.fingerprints(tf.convert_to_tensor(ids), self.seed)
        return tf.reshape(self._rows(tf.reshape(ids, [-1])), tf.shape(ids))

    def known_ids(self) -> np.ndarray:
        """int64 [n], the ids that have a row now; of strings their hash values. Eager only."""
        used = self.used.numpy()
        return np.sort(self.ids.numpy()[used >= int(self._oldest())])

    def _rows(self, ids: tf.Tensor) -> tf.Tensor:
        return self._table.find(ids, self._oldest()) + 1

    def _oldest(self) -> tf.Tensor:
        """int64 [], the first step whose ids are still known."""
        if self.max_age is None:
            return tf.constant(1, tf.int64)
        now = tf.convert_to_tensor(keras_compat.native(self.step))
        return tf.maximum(now - self.max_age, 1)

    def _update(self, ids: tf.Tensor) -> None:
        """A step with these ids int64 [n] on this replica."""
        counts = keras_compat.counts_of_all_replicas(*_counted(ids, tf.ones_like(ids)))
        ids, counts = _counted(*counts)
        ids, counts = tf.boolean_mask(ids, counts > 0), tf.boolean_mask(counts, counts > 0)
        # A batch without ids is the end of the data, and no step.
        self.step.assign(keras_compat.native(self.step) + tf.cast(tf.size(ids) > 0, tf.int64))
        now, oldest = tf.convert_to_tensor(keras_compat.native(self.step)), self._oldest()
        places = self._table.find(ids, oldest)
        has_row = places >= 0
        self._table.touch(tf.boolean_mask(places, has_row), now)
        ids, counts = tf.boolean_mask(ids, ~has_row), tf.boolean_mask(counts, ~has_row)
        if self._candidates is not None:
            counts += self._candidates.seen_before(ids, oldest)
            order = tf.argsort(counts, direction="DESCENDING", stable=True)
            ids, counts = tf.gather(ids, order), tf.gather(counts, order)
        admitted = self._admit(ids, counts, now)
        if self._candidates is not None:
            self._candidates.update(ids, counts, admitted, now, oldest)

    def _admit(self, ids: tf.Tensor, counts: tf.Tensor, now: tf.Tensor) -> tf.Tensor:
        """Gives rows to ids that were seen often enough: bool [n], which of them have one."""
        asks = tf.where(counts >= self.min_count)[:, 0]
        asking = tf.gather(ids, asks)
        places = self._table.claim(asking, now)
        found = places >= 0
        places, new = tf.boolean_mask(places, found), tf.boolean_mask(asking, found)
        self._table.put(places, new, now)
        keras_compat.assign_rows(self.embeddings, places + 1, self._initial(new))
        keras_compat.reset_slots(self.embeddings, places + 1)
        return tf.scatter_nd(
            tf.boolean_mask(asks, found)[:, None],
            tf.ones_like(places, tf.bool),
            tf.shape(ids, tf.int64),
        )

    def _initial(self, ids: tf.Tensor) -> tf.Tensor:
        """[n, output_dim], the first values of the rows of ids int64 [n]."""
        initializer, dtype = self.embeddings_initializer, self.embeddings.dtype
        if isinstance(initializer, keras.initializers.RandomUniform):
            low, high = initializer.minval, initializer.maxval
            drawn = hashing.uniform(ids, self.output_dim, self.seed)
            return tf.cast(low + drawn * (high - low), dtype)
        row = tf.convert_to_tensor(initializer([1, self.output_dim], dtype=dtype))
        return tf.repeat(row, tf.size(ids), axis=0)

    def _checked(self, ids: Any) -> tf.Tensor:
        if isinstance(ids, (tf.RaggedTensor, tf.SparseTensor)):
            raise UsageError(
                f"layer {self.name!r} received a {type(ids).__name__}: expected a dense tensor of "
                "ids; pad it, or look up its values."
            )
        ids = tf.convert_to_tensor(ids)
        if not (ids.dtype.is_integer or ids.dtype == tf.string):
            raise UsageError(
                f"layer {self.name!r} received ids of type {ids.dtype.name}: expected int64 or "
                'string; declare the input with keras.Input(..., dtype="int64").'
            )
        return ids

    # ------------------------------------------------------------ Keras

    def compute_output_spec(self, ids: Any, training: bool | None = None) -> keras.KerasTensor:
        """Shape and type of the output."""
        del training
        if not (str(ids.dtype).startswith(("int", "uint")) or ids.dtype == "string"):
            raise UsageError(
                f"layer {self.name!r} received ids of type {ids.dtype}: expected int64 or "
                'string; declare the input with keras.Input(..., dtype="int64").'
            )
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


def _counted(ids: tf.Tensor, counts: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """(the distinct ids int64 [n] in increasing order, the sum of the counts of each)."""
    unique, positions = tf.unique(ids, out_idx=tf.int64)
    sums = tf.math.unsorted_segment_sum(counts, positions, tf.size(unique))
    order = tf.argsort(unique, stable=True)
    return tf.gather(unique, order), tf.gather(sums, order)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _at_least_1(name: str, value: Any) -> int:
    if not _is_int(value) or value < 1:
        raise UsageError(f"{name}={value!r}: expected an int of at least 1.")
    return int(value)


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
