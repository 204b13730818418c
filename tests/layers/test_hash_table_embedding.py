"""Ids that come and go, in one process; `tests/matrix` has several replicas."""

from __future__ import annotations

import itertools
import os
from typing import Any

import hypothesis
import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import strategies as st

import tfmw
from tests.helpers.cases import cases, every
from tests.layers.reference import Reference, Table
from tfmw.compat import models, table_variables
from tfmw.layers import HashTableEmbedding
from tfmw.tables import hashing
from tfmw.tables.hash_table import Part, bucket_of, counted

SEED = 5


def embedding(capacity: int, **options: Any) -> HashTableEmbedding:
    layer = HashTableEmbedding(2, capacity=capacity, seed=SEED, **options)
    layer.build((None,))
    return layer


def train(layer: HashTableEmbedding, *batches: list[int]) -> None:
    for ids in batches:
        layer(tf.constant(ids, tf.int64), training=True)


def has_row(layer: HashTableEmbedding, *ids: int) -> list[bool]:
    return [bool(row) for row in layer.rows_of(tf.constant(ids, tf.int64)).numpy()]


def state(layer: HashTableEmbedding) -> list[bytes]:
    return [weight.numpy().tobytes() for weight in layer.weights]


# ------------------------------------------------------------ which ids have rows

IDS = st.integers(-40, 40) | st.sampled_from([-(2**63), 2**63 - 1])


@hypothesis.given(
    batches=st.lists(st.lists(IDS, min_size=1, max_size=40), min_size=1, max_size=8),
    capacity=st.sampled_from([1, 3, 16, 40]),
    min_count=st.integers(1, 3),
    max_age=st.sampled_from([None, 1, 3]),
)
@hypothesis.settings(
    max_examples=int(os.environ.get("TFMW_TEST_TABLES", "15")),
    deadline=None,
    derandomize=True,
    database=None,
)
def test_as_a_reference_in_plain_python(batches, capacity, min_count, max_age):
    layer = embedding(capacity, min_count=min_count, max_age=max_age)
    every = sorted({id_ for batch in batches for id_ in batch})

    def buckets(count: int, seed: int) -> list[int]:
        return hashing.buckets(tf.constant(every, tf.int64), count, seed).numpy().tolist()

    def table(places: int, of_ids: list[int]) -> Table:
        return Table(places, dict(zip(every, of_ids, strict=True)).__getitem__)

    places = int(layer.ids.shape[0])
    of_rows = buckets(max(places // 16, 1), SEED)
    waiting = None
    if min_count > 1:  # counted beside the bucket of the row, in one bucket or two
        candidates = int(layer.candidate_ids.shape[0])
        beside = 2 if places >= 16 else 1
        chosen = buckets(beside, SEED + 1)
        of_candidates = [b * beside + c for b, c in zip(of_rows, chosen, strict=True)]
        waiting = table(candidates, of_candidates)
    reference = Reference(table(places, of_rows), waiting, min_count, max_age)
    for ids in batches:
        train(layer, ids)
        reference.step(ids)
        rows = layer.rows_of(tf.constant(every, tf.int64)).numpy()
        assert dict(zip(every, rows, strict=True)) == {i: reference.row_of(i) for i in every}
        assert layer.known_ids().tolist() == [i for i, row in zip(every, rows, strict=True) if row]


@pytest.mark.parametrize("bounds", cases([[0, 2, 3, 4]], [[0, 1, 4]]))
@pytest.mark.parametrize("options", cases([{}], [{"min_count": 2, "max_age": 4}]))
def test_parts_do_together_what_one_does(bounds, options):
    """Each part has some of the buckets, in variables of its own."""
    whole, divided = embedding(64, **options), embedding(64, **options)
    shards = []
    for first, last in itertools.pairwise(bounds):
        held = []
        for variable in divided.weights:
            partitioning = table_variables.partitioning_of(variable)
            value = variable.numpy()
            if partitioning is not None:
                value = value[slice(*partitioning.rows_of(first, last))]
            held.append((variable, tf.Variable(value)))
        shards.append((Part(divided, first), held))
    random = np.random.default_rng(0)
    for step in range(20):
        ids = tf.constant(random.zipf(1.3, 60).clip(max=300) + 3 * step)
        train(whole, ids.numpy())
        distinct, counts = counted(ids, tf.ones_like(ids))
        buckets = bucket_of(divided, distinct)
        for (part, held), (first, last) in zip(shards, itertools.pairwise(bounds), strict=True):
            own = (buckets >= first) & (buckets < last)
            own_ids = tf.boolean_mask(distinct, own)
            with models.substituted(held):
                part.step(own_ids, tf.boolean_mask(counts, own), tf.constant(True))
                rows = part.rows(own_ids)
                values = part.values(rows).numpy()
            assert rows.numpy().tolist() == whole.rows_of(own_ids).numpy().tolist()
            expected = tf.gather(whole.embeddings.value, rows).numpy()
            np.testing.assert_array_equal(values[rows > 0], expected[rows > 0])
    for number, variable in enumerate(whole.weights):
        parts = [held[number][1].numpy() for _, held in shards]
        if variable is whole.step:
            assert [int(part) for part in parts] == [20] * len(shards)
        else:
            np.testing.assert_array_equal(np.concatenate(parts), variable.numpy())


def test_rows_of_steps_that_are_under_way_are_kept():
    layer = embedding(2)
    part = Part(layer, kept_steps=1)
    for step, (id_, row) in enumerate([(1, 1), (2, 2), (3, 1), (4, 2), (4, 2), (5, 1)]):
        ids = tf.constant([id_], tf.int64)
        part.step(ids, tf.ones_like(ids), tf.constant(True))
        assert part.rows(ids).numpy().tolist() == [row], step
    both = tf.constant([6, 7], tf.int64)  # of the rows, that of 5 was used in the step before
    part.step(both, tf.ones_like(both), tf.constant(True))
    assert part.rows(both).numpy().tolist() == [2, 0]


def test_an_id_has_a_row_once_it_was_seen_min_count_times():
    layer = embedding(16, min_count=3)
    train(layer, [7, 8], [7, 8, 8])
    assert has_row(layer, 7, 8, 9) == [False, True, False]
    train(layer, [7])
    assert has_row(layer, 7, 8, 9) == [True, True, False]


def test_ids_go_after_max_age_steps_and_begin_anew():
    layer = embedding(16, min_count=2, max_age=2)
    train(layer, [1, 1, 5], [2], [2])
    assert has_row(layer, 1, 2) == [True, True]
    train(layer, [2])
    assert has_row(layer, 1, 2, 5) == [False, True, False]
    train(layer, [1, 5])  # seen twice, but too long ago
    assert has_row(layer, 1, 2, 5) == [False, True, False]
    assert layer.known_ids().tolist() == [2]


def test_the_id_used_longest_ago_loses_its_row():
    layer = embedding(3)
    train(layer, [1], [2], [3], [1], [4])
    assert has_row(layer, 1, 2, 3, 4) == [True, False, True, True]
    train(layer, [1, 3, 4, 9])  # no row is free: all are used in this step
    assert has_row(layer, 1, 3, 4, 9) == [True, True, True, False]


def test_the_bound_holds_whatever_comes():
    layer = HashTableEmbedding(8, max_bytes=20_000, min_count=2)
    layer.build(())
    size = sum(weight.numpy().nbytes for weight in layer.weights)
    assert 15_000 < size <= 20_000
    random = np.random.default_rng(0)
    for _ in range(5):
        ids = tf.constant(random.integers(0, 500, 5000))
        layer(ids, training=True)
    places = int(layer.ids.shape[0])
    assert sum(weight.numpy().nbytes for weight in layer.weights) == size
    assert 0.9 * places < len(layer.known_ids()) <= places
    rows = layer.rows_of(layer.known_ids()).numpy()
    assert len(set(rows)) == len(rows)
    assert rows.min() >= 1
    assert rows.max() <= places


def test_neither_the_order_of_ids_nor_their_shape_matters():
    random = np.random.default_rng(0)
    one, other = embedding(32, min_count=2), embedding(32, min_count=2)
    for _ in range(6):
        ids = random.zipf(1.3, (20, 4)).clip(max=10**6)
        one(tf.constant(ids), training=True)
        other(tf.constant(random.permutation(ids.ravel())), training=True)
    assert state(one) == state(other)
    assert len(one.known_ids()) > 10


def test_seeds_decide():
    def after(seed: int) -> list[bytes]:
        layer = HashTableEmbedding(2, capacity=64, seed=seed)
        train(layer, list(range(40)))
        return state(layer)

    assert after(1) == after(1)
    assert after(1) != after(2)


def test_only_training_changes_what_has_a_row():
    layer = embedding(16)
    train(layer, [1, 2])
    before = state(layer)
    layer(tf.constant([3, 3]), training=False)
    layer(tf.constant([3, 3]))
    layer.trainable = False
    layer(tf.constant([3, 3]), training=True)
    assert state(layer) == before


# ------------------------------------------------------------ values


def test_first_values_are_uniform_and_of_the_id_alone():
    layer = HashTableEmbedding(64, capacity=20_000, seed=SEED, embeddings_initializer="uniform")
    ids = tf.range(-5000, 5000, dtype=tf.int64)
    drawn = layer(ids, training=True).numpy()
    assert drawn.min() >= -0.05
    assert drawn.max() <= 0.05
    counts, _ = np.histogram(drawn, bins=50)
    assert abs(counts / drawn.size * 50 - 1).max() < 0.03
    assert abs(drawn.mean(axis=0)).max() < 0.05 / 3**0.5 / 100 * 5  # of 10,000 rows
    assert abs(np.corrcoef(drawn[:-1].ravel(), drawn[1:].ravel())[0, 1]) < 0.01
    other = HashTableEmbedding(64, capacity=640, seed=SEED)
    np.testing.assert_array_equal(other(ids[100:90:-1], training=True), drawn[100:90:-1])


def test_initializers_of_keras():
    low_high = keras.initializers.RandomUniform(2.0, 3.0)
    for initializer, low, high in [
        ("zeros", 0, 0),
        (keras.initializers.Constant(0.5), 0.5, 0.5),
        (low_high, 2, 3),
    ]:
        layer = HashTableEmbedding(8, capacity=32, embeddings_initializer=initializer)
        rows = layer(tf.constant([1, 2, 3]), training=True).numpy()
        assert low <= rows.min() <= rows.max() <= high


def test_shapes_are_known_in_a_graph():
    layer = embedding(16)
    spec = tf.TensorSpec([None, 3], tf.int64)
    traced = tf.function(lambda ids: layer(ids, training=True)).get_concrete_function(spec)
    assert traced.output_shapes.as_list() == [None, 3, 2]
    assert layer.compute_output_shape((None, 3)) == (None, 3, 2)


def test_ids_without_a_row_share_row_0_which_is_trained():
    layer = embedding(16, min_count=2)
    model = keras.Sequential([keras.Input((), dtype="int64"), layer])
    model.compile(keras.optimizers.SGD(1.0), "mse", run_eagerly=True)
    before = model.predict(np.array([3, 4]), verbose=0)
    assert not before.any()
    model.train_on_batch(np.array([1, 2]), np.ones((2, 2), "float32"))
    after = model.predict(np.array([1, 3]), verbose=0)
    assert after.all()
    np.testing.assert_array_equal(after[0], after[1])


@pytest.mark.parametrize(
    "optimizer",
    every(
        4,
        [
            lambda: keras.optimizers.Ftrl(0.1),
            lambda: keras.optimizers.SGD(0.1, momentum=0.9),
            lambda: keras.optimizers.Adagrad(0.1),
            lambda: keras.optimizers.RMSprop(0.1),
        ],
    ),
)
def test_a_row_begins_anew_with_its_next_id(optimizer):
    def model() -> Any:
        layer = HashTableEmbedding(3, capacity=1, seed=SEED)
        model = keras.Sequential([keras.Input((), dtype="int64"), layer])
        model.compile(optimizer(), "mse", run_eagerly=True)
        return model

    def fit(model: Any, id_: int) -> list[np.ndarray]:
        model.fit(np.full(4, id_), np.ones((4, 3), "float32"), batch_size=1, verbose=0)
        slots = model.optimizer.variables[2:]  # after the step and the learning rate
        assert slots
        return [v.numpy()[1] for v in [model.layers[0].embeddings, *slots]]

    used, fresh = model(), model()
    fit(used, 1)
    for got, expected in zip(fit(used, 2), fit(fresh, 2), strict=True):
        np.testing.assert_array_equal(got, expected)


def test_compiled_again_the_slots_of_the_new_optimizer_begin_anew():
    layer = HashTableEmbedding(1, capacity=1)
    model = keras.Sequential([keras.Input((), dtype="int64"), layer])
    one: Any = np.ones((1, 1), "float32")
    for _ in range(2):
        optimizer = keras.optimizers.Adagrad(0.1, initial_accumulator_value=0.5)
        model.compile(optimizer, "mse", run_eagerly=True)
        model.train_on_batch(np.array([1]), one)
        model.train_on_batch(np.array([2]), one)
        (accumulator,) = model.optimizer.variables[2:]
        gradient = 2 * (1 - _first_value(2, layer.seed))
        assert accumulator.numpy()[1, 0] == pytest.approx(0.5 + gradient**2, rel=1e-5)


def _first_value(id_: int, seed: int) -> float:
    return float(hashing.uniform(tf.constant([id_], tf.int64), 1, seed)[0, 0]) * 0.1 - 0.05


# ------------------------------------------------------------ files


@pytest.fixture(scope="module")
def trained() -> tuple[Any, Any]:
    """A model of string ids, and ids of which some have a row."""
    layer = HashTableEmbedding(4, capacity=64, min_count=2, max_age=30, seed=SEED)
    model = keras.Sequential(
        [keras.Input((2,), dtype="string"), layer, keras.layers.Flatten(), keras.layers.Dense(1)]
    )
    model.compile("adagrad", "mse")
    random = np.random.default_rng(1)
    ids = [[f"user {i}" for i in pair] for pair in random.zipf(1.5, (200, 2))]
    ids = tf.constant(ids)
    data = tf.data.Dataset.from_tensor_slices((ids, np.ones((200, 1), "float32"))).batch(32)
    tfmw.fit(model, data, verbose=0)
    rows = layer.rows_of(ids).numpy()
    assert (rows == 0).any()
    assert (rows > 0).any()
    return model, ids


# Keras's own, with NumPy 2.
@pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept:DeprecationWarning")
def test_keras_archive(trained, tmp_path):
    model, ids = trained
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    for restored, weight in zip(again.weights, model.weights, strict=True):
        np.testing.assert_array_equal(restored.numpy(), weight.numpy())
    expected = model.predict(ids, verbose=0, batch_size=50)
    np.testing.assert_array_equal(again.predict(ids, verbose=0, batch_size=50), expected)


def test_saved_model(trained, tmp_path):
    model, ids = trained
    path = str(tmp_path / "export")
    assert tfmw.export(model, path) == path
    serve = tf.saved_model.load(path).signatures["serving_default"]
    (outputs,) = serve(ids).values()
    np.testing.assert_allclose(outputs, model.predict(ids, verbose=0, batch_size=50), rtol=1e-6)


# ------------------------------------------------------------ wrong use


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"capacity=None and max_bytes=None: expected one of them"),
        ({"capacity": 5, "max_bytes": 5}, "capacity=5 and max_bytes=5"),
        ({"capacity": 0}, "capacity=0: expected a whole number from 1 up"),
        ({"capacity": 2.5}, "capacity=2.5: expected a whole number"),
        ({"max_bytes": 39}, "max_bytes=39 is less than one row takes: expected 24 bytes"),
        ({"capacity": 5, "min_count": 0}, "min_count=0"),
        ({"capacity": 5, "max_age": -1}, "max_age=-1"),
        ({"capacity": 5, "seed": None}, "seed=None: expected an int"),
        ({"capacity": 5, "embeddings_initializer": "orthogonal"}, "orthogonal': expected Random"),
    ],
)
def test_wrong_arguments(options, message):
    with pytest.raises(tfmw.UsageError, match=message):
        HashTableEmbedding(2, **options)


def test_wrong_ids():
    layer = embedding(16)
    with pytest.raises(tfmw.UsageError, match=r"ids of type float32: expected int64 or string"):
        keras.Sequential([keras.Input(()), layer])
    with pytest.raises(tfmw.UsageError, match="ids of type float32"):
        layer.call(tf.constant([1.0]))
    with pytest.raises(tfmw.UsageError, match="received a RaggedTensor: expected a dense tensor"):
        layer.call(tf.ragged.constant([[1], [2, 3]]))


def test_replicas_outside_of_tfmw():
    layer = embedding(16)
    with pytest.raises(tfmw.UsageError, match=r"train the model with tfmw\.fit"):
        _on_two_replicas(layer)


def _on_two_replicas(layer: HashTableEmbedding) -> None:
    class TwoReplicas:
        num_replicas_in_sync = 2

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tf.distribute, "get_strategy", TwoReplicas)
        layer(tf.constant([1]), training=True)
