"""Rows and gradients of several tables, on their way to servers and back in one message."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfmw.compat.graph import function_of
from tfmw.tables.shards import MultiTableLookup, VariableShard
from tfmw.train.parameter_server import exchange, lookups
from tfmw.train.parameter_server.lookups import ops_between

WIDTH = 3


def table(first: float, *rows: int) -> list[VariableShard]:
    """Shards of so many rows each, on servers 0, 1, ...; the values go up from `first`."""
    shards, start = [], 0
    for server, count in enumerate(rows):
        values = first + np.arange(start, start + count)[:, None] + np.arange(WIDTH) / 10
        stop = start + count if len(rows) > 1 else 0
        variable = tf.Variable(values.astype(np.float32))
        shards.append(VariableShard(variable, server, start, stop))
        start += count
    return shards


TABLES = [(100.0, (4, 6)), (200.0, (5,)), (300.0, (1, 1, 7))]
IDS = [[9, 0, 0, 5, 9], [4, 4], [8, 0, 1, 2, 8, 1]]


def answers(
    group: MultiTableLookup, asked: dict[int, tuple[tf.Tensor, tf.Tensor]]
) -> dict[int, tf.Tensor]:
    """Answers of the servers."""
    found = {}
    for server, (sizes, ids) in asked.items():
        shards = [shard for _, shard in group.shards[server]]
        assert len(set(ids.numpy().tolist())) <= len(ids)
        parts = tf.split(ids, sizes, num=len(shards))
        rows = [tf.gather(s.variable, own) for s, own in zip(shards, parts, strict=True)]
        found[server] = tf.concat(rows, axis=0)
    return found


@pytest.mark.parametrize("static", [True, False])
def test_rows_of_several_tables_are_asked_for_at_once(static: bool) -> None:
    group = MultiTableLookup([table(first, *rows) for first, rows in TABLES])
    ids = [tf.constant(own, tf.int64) for own in IDS]
    if not static:
        group._one_op = tf.function(
            group.traced_route,
            input_signature=[[tf.TensorSpec([None], tf.int64)] * len(ids)],
            autograph=False,
        )
    route = group.route(ids)
    # Each row once: rows 9, 0, 5 of the first table, 4 of the second, 8, 0, 1, 2 of the third.
    assert sum(int(tf.size(own)) for _, own in route.asked.values()) == 8
    rows = route.deliver(answers(group, route.asked))
    for (first, _), own, found in zip(TABLES, IDS, rows, strict=True):
        expected = first + np.array(own)[:, None] + np.arange(WIDTH) / 10
        np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_gradients_of_a_row_are_added_and_follow_their_ids() -> None:
    shards = [table(first, *rows) for first, rows in TABLES]
    group = MultiTableLookup(shards)
    route = group.route([tf.constant(own, tf.int64) for own in IDS])
    grads = [np.random.default_rng(n).normal(size=(len(own), WIDTH)) for n, own in enumerate(IDS)]
    sent = route.send([tf.constant(grad, tf.float32) for grad in grads])
    whole: list[Any] = [np.zeros((sum(rows), WIDTH), np.float32) for _, rows in TABLES]
    for server, (sizes, ids) in route.asked.items():
        numbers: Any = np.repeat(np.arange(len(sizes)), sizes)
        for number, local, grad in zip(numbers, ids.numpy(), sent[server].numpy(), strict=True):
            of, shard = group.shards[server][number]
            whole[of][shard.start + local] += grad
    for total, own, grad in zip(whole, IDS, grads, strict=True):
        expected = np.zeros_like(total)
        np.add.at(expected, own, grad.astype(np.float32))
        np.testing.assert_allclose(total, expected, rtol=1e-6)


@pytest.mark.parametrize("wrong", [10, -1])
def test_an_id_that_is_no_row_of_its_table_is_no_row_of_the_next(wrong: int) -> None:
    group = MultiTableLookup([table(0.0, 10), table(100.0, 10)])
    ids = [tf.constant([1, wrong], tf.int64), tf.constant([2], tf.int64)]
    with pytest.raises(tf.errors.InvalidArgumentError, match="no rows of their table"):
        group.route(ids)


def test_a_message_has_tensors_of_any_type() -> None:
    tensors = [
        tf.constant([3, 1], tf.int64),
        tf.constant([[1.5, -2.0], [0.0, 7.0], [np.inf, 1e-40]]),
        tf.constant([], tf.float32),
        tf.constant([2.5, -1.0, 3.0], tf.bfloat16),
        tf.constant([7], tf.uint8),
        tf.constant(5, tf.int64),
    ]
    message = exchange.pack(tensors)
    assert message.dtype == tf.uint8
    specs = [exchange.spec_of(tensor) for tensor in tensors]
    for sent, found in zip(tensors, exchange.unpack(message, specs), strict=True):
        assert sent.dtype == found.dtype
        np.testing.assert_array_equal(sent, found)


def test_which_ops_are_between_a_batch_and_ids() -> None:
    seen: dict[str, Any] = {}
    weights = tf.Variable([1, 2, 3, 4], dtype=tf.int64)

    @tf.function
    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        batch = [x, y]
        seen["twice"] = [ops_between(batch, (x + 1) * 2), ops_between(batch, (x + 1) * 2)]
        seen["other constant"] = ops_between(batch, (x + 1) * 3)
        seen["other input"] = ops_between(batch, (y + 1) * 2)
        seen["both"] = ops_between(batch, tf.gather(x, y % 4))
        seen["weights"] = ops_between(batch, x + weights)
        seen["random"] = ops_between(batch, x + tf.random.uniform([4], 0, 5, tf.int64))
        seen["waits"] = None
        with tf.control_dependencies([weights.assign_add(weights)]):
            seen["waits"] = ops_between(batch, tf.identity(x))
        seen["without inputs"] = ops_between(batch, tf.range(4, dtype=tf.int64))
        seen["an input"] = ops_between(batch, x)
        ids = tf.gather((x + 1) * 2, y % 4)
        compute = function_of([ids, y], batch)
        assert compute is not None
        again, other = compute([x + 10, y])
        assert other is y  # a given tensor is passed on
        return tf.stack([ids, again])

    x, y = tf.constant([5, 6, 7, 8], tf.int64), tf.constant([3, 2, 9, 0], tf.int64)
    ids, again = step(x, y).numpy()
    np.testing.assert_array_equal(again, ids + 20)
    once, twice = seen["twice"]
    assert once == twice
    known = [once, seen["other constant"], seen["other input"], seen["both"]]
    assert None not in known
    assert len(set(known)) == 4
    assert seen["weights"] is None
    assert seen["random"] is None
    assert seen["waits"] is None
    assert seen["without inputs"] is not None
    assert seen["an input"] is not None


def test_lookups_that_follow_from_the_batch_are_planned_once() -> None:
    """Two lookups of one table with the same ids are one; one of ids that are drawn is none."""
    shards = table(0.0, 5, 5)
    variable = keras.Variable(tf.zeros([10, WIDTH]))
    spec = {"a": tf.TensorSpec([None], tf.int64), "b": tf.TensorSpec([None], tf.int64)}

    def trace(batch: Any, fetched: lookups.Fetched) -> list[Any]:
        drawn = tf.random.uniform([2], 0, 10, tf.int64)
        asked = [batch["a"] * 2, batch["a"] * 2, batch["b"], drawn]
        return [fetched.rows(variable, ids) for ids in asked]

    plan = lookups.plan_lookups(trace, spec, lambda of: shards)

    @tf.function(autograph=False)
    def step(batch: Any) -> Any:
        asked = plan.asked(batch)
        answers = {where: plan.answer(where, sent) for where, sent in asked.sent.items()}
        first, same, other, drawn = trace(batch, plan.fetched(asked, answers))
        assert drawn is None
        assert same is first
        return first[0], other[0]

    first, other = step({"a": tf.constant([1, 4, 1], tf.int64), "b": tf.constant([9], tf.int64)})
    np.testing.assert_allclose(first[:, 0], [2.0, 8.0, 2.0])
    np.testing.assert_allclose(other[:, 0], [9.0])


@pytest.fixture(scope="module")
def travelled(run_cluster: Any) -> Any:
    """Differences between the tables of `ps_row_travel.py` and the arithmetic in NumPy."""
    return run_cluster("ps_row_travel.py", workers=1, ps=2).chief


@pytest.mark.process
@pytest.mark.nightly
class TestRowsOnTheirWay:
    def test_rows_are_those_before_the_step(self, travelled: Any) -> None:
        assert travelled["plain"]["off_by"] < 1e-5

    def test_rows_that_are_fetched_ahead_are_one_update_staler(self, travelled: Any) -> None:
        assert travelled["ahead"]["off_by"] < 1e-5
        assert travelled["ahead"]["off_by_plain"] > 1e-3

    def test_rows_and_gradients_travel_as_bfloat16(self, travelled: Any) -> None:
        assert travelled["bf16"]["off_by"] < 1e-5
        assert travelled["bf16"]["off_by_plain"] > 1e-4

    def test_one_message_there_and_one_back_between_two_steps(self, travelled: Any) -> None:
        """The loop has ten steps; one more message asks for rows before the first.

        Rows, gradients, variables and moving averages of two tables and two more layers.
        """
        there = {f"worker to server {number}": 11 for number in range(2)}
        back = {f"server {number} to worker": 10 for number in range(2)}
        assert travelled["messages"] == {**there, **back}

    def test_gradients_go_the_way_of_their_rows(self, travelled: Any) -> None:
        """Unique ids and their owners are computed once, before the step."""
        assert travelled["distinct"] == ["Unique"]

    def test_a_step_is_traced_for_its_lookups_and_as_one_op(self, travelled: Any) -> None:
        """One more trace makes the variables that only the step knows."""
        for name in ("plain", "ahead", "bf16"):
            assert travelled[name]["traces"] == 3, name

    def test_a_step_that_sends_messages_is_no_op(self, travelled: Any) -> None:
        """Traced to build, for its lookups, as one op, and for each of 10 + 1 steps in loops."""
        assert travelled["drawn"]["traces"] == 14
        assert travelled["drawn"]["off_by"] < 1e-5

    def test_a_step_reads_the_optimizers_count(self, travelled: Any) -> None:
        for name in ("plain", "ahead", "bf16", "drawn"):
            assert travelled[name]["updates"] == [pytest.approx(9.5)], "of 20 steps"

    def test_wrong_settings(self, travelled: Any) -> None:
        assert travelled["refused"] == [
            "unknown prefetch_rows 2: expected one of 0, 1.",
            "unknown row_compression 'fp16': expected one of None, 'bf16'.",
            "prefetch_rows and row_compression are for rows that stay on servers, which "
            "sync_replicas=True does not have: leave them out, or train asynchronously.",
        ]
