"""The dataflow tells which rows of an embedding all replicas look up, and sums of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

from tfmw.compat.local_updates import replica_local_updates
from tfmw.compat.losses import ReplicaWeight
from tfmw.compat.row_origins import Origin, joined, row_parts
from tfmw.compat.step_hooks import weighting_losses
from tfmw.train.mirrored.collectives.reduction import joined_parts

TABLE = keras.Variable(np.arange(40, dtype="float32").reshape(20, 2))
SAME, REDUCED, UNKNOWN, EXAMPLES = Origin
LARGE = tf.range(200) % 20  # captured by the graph, not copied into it


def origins(lookups: Callable[[Any], list[Any]], nested: bool = False) -> list[Origin]:
    """The origins of the rows of a table that a step looks up by ids of words [None, None]."""
    found: list[Origin] = []

    def step(words: Any) -> Any:
        weight = ReplicaWeight(
            *(tf.shape(words)[0],) * 2,
            uneven=False,
            size_known=True,
            in_loss=True,
        )
        weight.begins(words)
        with tf.GradientTape() as tape:
            taken = [ops.take(TABLE, ids, axis=0) for ids in lookups(words)]
            loss = tf.add_n([tf.reduce_sum(tf.square(rows)) for rows in taken])
        gradient = tape.gradient(loss, TABLE.value)
        with weighting_losses(weight):
            found.extend(origin for origin, _ in row_parts(gradient))
        return loss

    @tf.function(autograph=False)
    def traced(iterator: Any) -> Any:
        def body(total: Any) -> Any:
            return total + step(iterator.get_next())

        zero = tf.constant(0.0)
        return tf.while_loop(lambda total: total < 0, body, [zero]) if nested else body(zero)

    spec = tf.TensorSpec([None, None], tf.int32)
    words = tf.data.Dataset.from_generator(list, output_signature=spec)
    traced.get_concrete_function(iter(words))
    return found


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        (lambda words: words, EXAMPLES),
        (lambda words: words[:, 1:] * 2 + 1, EXAMPLES),
        (lambda words: ops.where(words > 3, words, 3), EXAMPLES),
        (lambda words: ops.arange(4), SAME),
        (lambda words: [1, 1, 2], SAME),
        (lambda words: LARGE, SAME),
        (lambda words: tf.constant([1, 2]) + tf.cast(TABLE[0, 0], tf.int32), SAME),
        (lambda words: ops.arange(ops.shape(words)[1]), SAME),
        (lambda words: tf.range(tf.unstack(tf.shape(words))[1]) // 2, SAME),
        (lambda words: tf.range(tf.shape(tf.transpose(words))[0]), SAME),
        (lambda words: tf.zeros([tf.shape(tf.transpose(words))[1]], tf.int32), EXAMPLES),
        (lambda words: ops.broadcast_to(ops.arange(4), (ops.shape(words)[0], 4)), EXAMPLES),
        (lambda words: ops.zeros_like(words), EXAMPLES),
        (lambda words: ops.cumsum(ops.ones_like(words), axis=1), EXAMPLES),
        (lambda words: tf.unique(tf.reshape(words, [-1])).y, REDUCED),
        (lambda words: tf.reshape(tf.unique(tf.sort(words[:, 0])).y, [-1, 1]) + 0, REDUCED),
        (lambda words: tf.sparse.from_dense(words), REDUCED),
        (lambda words: tf.sparse.from_dense(words).values, EXAMPLES),
        (lambda words: tf.range(tf.reduce_max(words)), REDUCED),
        (lambda words: tf.range(tf.reduce_sum(words)), REDUCED),
        (lambda words: tf.range(tf.shape(words)[0]), REDUCED),
        (lambda words: tf.reduce_max(words, axis=1), EXAMPLES),
        (lambda words: tf.function(lambda x: x + 1)(words), EXAMPLES),
        (lambda words: ops.flip(words, axis=0), EXAMPLES),
        (lambda words: tf.random.uniform([3], 0, 20, tf.int32), UNKNOWN),
        (lambda words: tf.random.stateless_uniform([3], [1, 2], 0, 20, tf.int32), UNKNOWN),
    ],
)
def test_origin_of_rows(ids: Callable[[Any], Any], expected: Origin) -> None:
    assert origins(lambda words: [ids(words)]) == [expected]


def test_lookups_of_one_table_are_told_apart() -> None:
    def lookups(words: Any) -> list[Any]:
        return [words, ops.arange(4), ops.cast(words, "int64") + 1, LARGE]

    for nested in (False, True):  # captured values of a loop, and the iterator beyond it
        assert sorted(origins(lookups, nested=nested)) == [SAME, SAME, EXAMPLES, EXAMPLES]


@pytest.mark.parametrize(
    ("origin", "rows", "expected"),
    [
        (EXAMPLES, [3, 1, 3, 1], [(3, 0), (1, 1), (3, 2), (1, 3)]),
        (SAME, [3, 1, 3, 1], [(3, 2), (1, 4)]),
        (SAME, [3, 3, 3, 3], [(3, 2), (3, 4)]),  # each occurrence for itself
        (SAME, [0, 1, 0, 1, 2], [(0, 2), (1, 4), (2, 4)]),  # of batches of other lengths
        (SAME, [], []),
        (REDUCED, [5, 6, 6, 7], [(5, 0), (6, 3), (7, 3)]),
        (UNKNOWN, [3, 1, 3, 1], [(3, 2), (1, 4)]),
        (UNKNOWN, [3, 3, 3, 3], [(3, 0), (3, 1), (3, 2), (3, 3)]),
        (UNKNOWN, [3, 1, 3, 2], [(3, 0), (1, 1), (3, 2), (2, 3)]),
    ],
)
def test_sum_of_the_rows_of_two_replicas(
    origin: Origin, rows: list[int], expected: list[tuple[int, float]]
) -> None:
    values = tf.reshape(tf.range(len(rows), dtype=tf.float32), [-1, 1])
    ids = tf.constant(rows, tf.int64)
    total = joined_parts([(origin, tf.IndexedSlices(values, ids))], 2)
    found = zip(total.indices.numpy().tolist(), total.values[:, 0].numpy().tolist(), strict=True)
    assert list(found) == expected


def test_parts_are_joined_as_they_were() -> None:
    @tf.function(autograph=False)
    def step(values: Any) -> Any:
        parts = [
            (origin, tf.IndexedSlices(values[k : k + 1], tf.constant([k])))
            for k, origin in enumerate((SAME, EXAMPLES))
        ]
        one = tf.constant(1)
        weight = ReplicaWeight(one, one, uneven=False, size_known=True, in_loss=False)
        with weighting_losses(weight):
            again = joined(parts)
            assert [origin for origin, _ in row_parts(again)] == [SAME, EXAMPLES]
        return again.values, again.indices

    values, indices = step(tf.constant([[1.0], [2.0]]))
    assert indices.numpy().tolist() == [0, 1]
    assert values.numpy().tolist() == [[1.0], [2.0]]


def test_compiled_function_passes_the_origins_of_rows_on() -> None:
    """A step that XLA compiles passes them on, too: gradients are reduced outside of it."""
    table = keras.Variable(np.ones([20, 2], "float32"))
    optimizer = keras.optimizers.SGD(1.0)
    optimizer.build([table])
    found: list[Origin] = []

    @contextlib.contextmanager
    def reduced(grads: list[Any], variables: list[Any], weight: Any) -> Iterator[Any]:
        found.extend(origin for origin, _ in row_parts(grads[0]))
        yield grads, variables

    @tf.function(autograph=False)
    def step(words: Any) -> None:
        rows = tf.shape(words)[0]
        weight = ReplicaWeight(rows, rows, uneven=False, size_known=True, in_loss=False)
        with weighting_losses(weight), weight.deferring_gradients() as deferred:

            @tf.function(autograph=False)
            def compute(words: Any) -> Any:
                weight.begins(words)
                with tf.GradientTape() as tape:
                    taken = [ops.take(table, ids, axis=0) for ids in (words, ops.arange(4))]
                    loss = tf.add_n([tf.reduce_sum(rows) for rows in taken])
                optimizer.apply(tape.gradient(loss, [table.value]), [table])
                return [grads for grads, _ in deferred]

            for grads, (_, finish) in zip(compute(words), deferred, strict=True):
                finish(grads)

    with replica_local_updates(optimizer, reduced):
        step(tf.constant([[0, 5], [5, 6]]))
    assert sorted(found) == [SAME, EXAMPLES]
    expected = np.ones(20)
    np.subtract.at(expected, [0, 5, 5, 6, 0, 1, 2, 3], 1)
    np.testing.assert_array_equal(table.value[:, 0], expected)
