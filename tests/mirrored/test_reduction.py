"""Values that are sent to reduce gradients. The sums themselves are tested in tests/matrix."""

from __future__ import annotations

import types
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tfmw.cluster import membership
from tfmw.compat.memory import view_of
from tfmw.errors import UsageError
from tfmw.train.arguments import COMPRESSIONS
from tfmw.train.mirrored.collectives import transports
from tfmw.train.mirrored.collectives.reduction import Reduction

MB = 1 << 20


@pytest.fixture
def sent(monkeypatch) -> list[Any]:
    """Values that replicas reduce; two equal replicas are simulated."""
    seen: list[Any] = []

    def all_reduce(operation, values, options):
        assert operation == tf.distribute.ReduceOp.SUM
        seen.extend(values)
        return [v if isinstance(v, tf.IndexedSlices) else v + v for v in values]

    replica = types.SimpleNamespace(all_reduce=all_reduce)
    monkeypatch.setattr(tf.distribute, "get_replica_context", lambda: replica)
    options = tf.distribute.experimental.CommunicationOptions(bytes_per_pack=2 * MB)
    monkeypatch.setattr(membership, "reduction_options", lambda strategy: options)
    return seen


def reduced(grads: list[Any], compression: str | None = None) -> list[Any]:
    return Reduction(tf.distribute.get_strategy(), compression)(grads)


def numbers(*shape: int) -> tf.Tensor:
    return tf.reshape(tf.range(np.prod(shape), dtype=tf.float32), shape)


@pytest.mark.parametrize(("name", "wire"), COMPRESSIONS.items())
def test_compressed_gradients_are_sent_in_16_bits(sent, name, wire):
    rows = tf.IndexedSlices(tf.ones([2, 4]), tf.constant([0, 3]), tf.constant([5, 4]))
    double = tf.ones([3], tf.float64)
    total = reduced([numbers(4, 8), None, rows, double], name)
    assert [value.dtype for value in sent] == [wire, tf.float32, tf.float64]
    assert total[0].dtype == tf.float32
    np.testing.assert_allclose(total[0], 2 * numbers(4, 8), rtol=1e-2)
    assert total[1] is None
    assert isinstance(total[2], tf.IndexedSlices)


def test_between_gpus_no_bfloat16_is_sent(sent):
    two = types.SimpleNamespace(
        num_replicas_in_sync=2, extended=types.SimpleNamespace(worker_devices=("/GPU:0", "/GPU:1"))
    )
    with pytest.raises(UsageError, match='Use "fp16"'):
        Reduction(two, "bf16")
    (total,) = Reduction(two)([tf.ones([3], tf.bfloat16)])
    assert [value.dtype for value in sent] == [tf.float32]
    assert total.dtype == tf.bfloat16


@pytest.mark.parametrize("shape", [(4096, 1025), (4097, 1025)])
def test_large_gradients_are_split_and_small_ones_are_not(sent, shape):
    large, small = numbers(*shape), numbers(7, 3)
    total = reduced([small, large])
    sizes = [int(tf.size(value)) * 4 for value in sent]
    assert sizes[0] == 7 * 3 * 4
    assert len(sizes) == 1 + 5
    assert max(sizes) == transports.PIECE_PACKS * 2 * MB
    assert sum(sizes[1:]) == shape[0] * shape[1] * 4
    np.testing.assert_array_equal(total[0], 2 * small)
    np.testing.assert_array_equal(total[1], 2 * large)


def test_pack_size_0_splits_nothing(sent, monkeypatch):
    whole = tf.distribute.experimental.CommunicationOptions(bytes_per_pack=0)
    monkeypatch.setattr(membership, "reduction_options", lambda strategy: whole)
    reduced([numbers(4096, 1025)])
    assert [value.shape.as_list() for value in sent] == [[4096, 1025]]


class TestOverRing:
    @pytest.fixture
    def addresses(self) -> list[int]:
        """Addresses of the arrays that the ring sends."""
        return []

    @pytest.fixture
    def exchanged(self, monkeypatch, addresses) -> list[Any]:
        """Values sent over a ring of two equal workers: arrays, or lists of rows and indices."""
        seen: list[Any] = []

        def total(mine, add=np.add, what=None):
            seen.append(mine.copy())
            addresses.append(mine.ctypes.data)
            add(mine, mine, mine)

        def gather(mine):
            seen.append(list(mine))
            return [np.concatenate([array, array]) for array in mine]

        ring = types.SimpleNamespace(sum=total, gather=gather, size=1, rank=0, turn=None)
        monkeypatch.setattr(transports, "ring_of", lambda strategy: ring)
        options = tf.distribute.experimental.CommunicationOptions(bytes_per_pack=100)
        monkeypatch.setattr(membership, "reduction_options", lambda strategy: options)
        return seen

    def test_small_gradients_are_packed_the_last_ones_first(self, exchanged):
        grads = [numbers(3), None, numbers(2, 10), numbers(30), numbers(4), numbers(0)]
        total = reduced(grads)
        assert [len(array) for array in exchanged] == [4, 30, 23]
        for grad, summed in zip(grads, total, strict=True):
            if grad is None:
                assert summed is None
            else:
                np.testing.assert_array_equal(summed, 2 * grad)
                assert summed.shape == grad.shape

    def test_dtypes_and_sparse_gradients_have_their_own_packs(self, exchanged):
        rows = tf.IndexedSlices(numbers(2, 4), tf.constant([0, 3], tf.int64), tf.constant([5, 4]))
        total = reduced([numbers(0), rows, numbers(0), tf.ones([2], tf.float64), numbers(5)])
        kinds = ["rows" if isinstance(sent, list) else sent.dtype.name for sent in exchanged]
        assert kinds == ["float32", "float64", "float32", "rows", "float32"]
        np.testing.assert_array_equal(total[1].values, np.concatenate([numbers(2, 4)] * 2))
        np.testing.assert_array_equal(total[1].indices, [0, 3, 0, 3])
        np.testing.assert_array_equal(total[3], [2, 2])
        assert total[3].dtype == tf.float64

    @pytest.mark.parametrize(("name", "wire"), COMPRESSIONS.items())
    def test_16_bits(self, exchanged, name, wire):
        total_of = Reduction(tf.distribute.get_strategy(), name)
        (total,) = tf.function(lambda: total_of([numbers(40)]), autograph=False)()
        assert exchanged[0].dtype == wire.as_numpy_dtype
        assert total.dtype == tf.float32
        np.testing.assert_array_equal(total, 2 * numbers(40))

    def test_each_step_of_a_traced_loop_gets_the_sums_of_its_own_gradients(self, exchanged):
        total_of = Reduction(tf.distribute.get_strategy())

        @tf.function(autograph=False)
        def run() -> Any:
            def step(done: Any, sums: Any) -> Any:
                (total,) = total_of([tf.fill([30], tf.cast(done, tf.float32))])
                return done + 1, tf.concat([sums, total[:1]], axis=0)

            start = tf.constant(0), tf.zeros([0])
            shapes = tf.TensorShape([]), tf.TensorShape([None])
            return tf.while_loop(lambda done, _: done < 4, step, start, shapes)[1]

        np.testing.assert_array_equal(run(), [0, 2, 4, 6])

    @pytest.mark.parametrize(
        ("wide", "narrow"),
        [(tf.int64, tf.int32), (tf.float64, tf.float32), (tf.float32, tf.bfloat16)],
    )
    def test_a_sum_that_is_cast_to_fewer_bits(self, exchanged, wide, narrow):
        """TensorFlow moves such casts: none may read the memory before the exchange."""
        reduction = Reduction(tf.distribute.get_strategy())

        @tf.function(autograph=False)
        def step(x: tf.Tensor) -> tf.Tensor:
            total = reduction.transport.summed(tf.cast(x, wide)[None])
            return tf.cast(tf.reshape(total, []), narrow)

        assert float(step(tf.constant(3.0))) == 6

    def test_a_sum_takes_the_memory_of_a_gradient_without_other_use(self, exchanged, addresses):
        total_of = Reduction(tf.distribute.get_strategy())
        step = tf.function(lambda x: total_of([tf.linalg.matmul(x, x)]), autograph=False)
        (total,) = step(tf.ones([64, 64]))
        np.testing.assert_array_equal(total, np.full([64, 64], 128))
        assert view_of(total).ctypes.data == addresses[0]

    def test_what_else_a_gradient_is_used_for_keeps_its_value(self, exchanged):
        total_of = Reduction(tf.distribute.get_strategy())
        weight = tf.Variable(numbers(40))
        constant = tf.constant(numbers(30).numpy())

        @tf.function(autograph=False)
        def step() -> Any:
            grads = [weight.read_value(), constant, tf.range(50.0) + weight[0]]
            totals = total_of(grads)
            with tf.control_dependencies(totals):
                return totals, [tf.identity(grad) for grad in grads]

        for _ in range(3):
            totals, grads = step()
            for total, grad in zip(totals, grads, strict=True):
                np.testing.assert_array_equal(grad, numbers(len(grad)))
                np.testing.assert_array_equal(total, 2 * numbers(len(grad)))
        np.testing.assert_array_equal(weight, numbers(40))

    def test_shapes_that_are_known_only_when_a_step_runs(self, exchanged):
        total_of = Reduction(tf.distribute.get_strategy())

        @tf.function(input_signature=[tf.TensorSpec([None, 2])])
        def run(grad):
            return total_of([numbers(3), grad])

        total = run(numbers(6, 2))
        assert [len(array) for array in exchanged] == [12, 3]
        np.testing.assert_array_equal(total[1], 2 * numbers(6, 2))

    def test_exchanges_keep_the_order_of_the_program(self, exchanged):
        """The order holds across functions, too: workers with another order would deadlock."""
        total_of = Reduction(tf.distribute.get_strategy())
        steps = tf.Variable(0)

        @tf.function
        def first(matrix):
            steps.assign_add(1)
            return total_of([tf.linalg.matmul(matrix, matrix)[0, :3]])

        @tf.function
        def run(matrix):
            return first(matrix), total_of([numbers(2)])

        run(tf.ones([1500, 1500]))
        assert [len(array) for array in exchanged] == [3, 2]
