"""What travels when gradients are reduced. That the sums are right is in tests/matrix."""

from __future__ import annotations

import types
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tfmw import reduction, strategies
from tfmw.reduction import Reduction

MB = 1 << 20


@pytest.fixture
def sent(monkeypatch) -> list[Any]:
    """What replicas are asked to reduce; two equal replicas are made up."""
    seen: list[Any] = []

    def all_reduce(operation, values, options):
        assert operation == tf.distribute.ReduceOp.SUM
        seen.extend(values)
        return [v if isinstance(v, tf.IndexedSlices) else v + v for v in values]

    replica = types.SimpleNamespace(all_reduce=all_reduce)
    monkeypatch.setattr(tf.distribute, "get_replica_context", lambda: replica)
    options = tf.distribute.experimental.CommunicationOptions(bytes_per_pack=2 * MB)
    monkeypatch.setattr(strategies, "reduction_options", lambda strategy: options)
    return seen


def reduced(grads: list[Any], compression: str | None = None) -> list[Any]:
    return Reduction(tf.distribute.get_strategy(), compression)(grads)


def numbers(*shape: int) -> tf.Tensor:
    return tf.reshape(tf.range(np.prod(shape), dtype=tf.float32), shape)


@pytest.mark.parametrize(("name", "wire"), reduction.COMPRESSIONS.items())
def test_compressed_gradients_travel_in_16_bits(sent, name, wire):
    rows = tf.IndexedSlices(tf.ones([2, 4]), tf.constant([0, 3]), tf.constant([5, 4]))
    double = tf.ones([3], tf.float64)
    total = reduced([numbers(4, 8), None, rows, double], name)
    assert [value.dtype for value in sent] == [wire, tf.float32, tf.float64]
    assert total[0].dtype == tf.float32
    np.testing.assert_allclose(total[0], 2 * numbers(4, 8), rtol=1e-2)
    assert total[1] is None
    assert isinstance(total[2], tf.IndexedSlices)


@pytest.mark.parametrize("shape", [(4096, 1025), (4097, 1025)])
def test_large_gradients_travel_in_pieces_and_small_ones_whole(sent, shape):
    large, small = numbers(*shape), numbers(7, 3)
    total = reduced([small, large])
    sizes = [int(tf.size(value)) * 4 for value in sent]
    assert sizes[0] == 7 * 3 * 4
    assert len(sizes) == 1 + 5
    assert max(sizes) == reduction.PIECE_PACKS * 2 * MB
    assert sum(sizes[1:]) == shape[0] * shape[1] * 4
    np.testing.assert_array_equal(total[0], 2 * small)
    np.testing.assert_array_equal(total[1], 2 * large)


def test_a_pack_size_of_0_leaves_all_whole(sent, monkeypatch):
    whole = tf.distribute.experimental.CommunicationOptions(bytes_per_pack=0)
    monkeypatch.setattr(strategies, "reduction_options", lambda strategy: whole)
    reduced([numbers(4096, 1025)])
    assert [value.shape.as_list() for value in sent] == [[4096, 1025]]
