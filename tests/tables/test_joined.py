"""Small tables in one variable of their server: rows, marks and slots at the same places."""

from __future__ import annotations

import dataclasses
import gc
import types
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfmw.compat.table_variables import NewVariable
from tfmw.tables import creation, joined, shards, table
from tfmw.tables.creation import _Creation
from tfmw.tables.joined import Joined
from tfmw.tables.shards import MultiTableLookup, VariableShard, look_up
from tfmw.train.parameter_server.lookups import RowTransfer
from tfmw.train.parameter_server.updates import ServerRows, Updates


@pytest.fixture(autouse=True)
def one_process(monkeypatch):
    for module in (creation, joined, shards, table):
        monkeypatch.setattr(module, "server", lambda number: "/CPU:0")


def new(rows, width=2, value=0.0, slot_of=None, dtype=tf.float32):
    initializer = keras.initializers.Constant(value)
    return NewVariable("path", [rows, width], dtype, slot_of is None, initializer, slot_of)


def made(create, *arguments, **options):
    """A Keras variable that holds a new table; and the table."""
    found = create(new(*arguments, **options))
    assert found is not None
    variable = keras.Variable([0.0])
    variable._value = found
    return variable, found


@pytest.fixture
def create():
    """Makes tables of two shards each, on two servers."""
    return _Creation(lambda shape, dtype: 2, 2, 1 << 30)


def variables_of(*tables):
    return {id(shard.variable) for of in tables for shard in of.shards}


def firsts(of):
    return [shard.first for shard in of.shards]


def test_tables_of_one_kind_share_a_variable_on_each_server(create):
    (_, first), (_, second) = made(create, 4, value=1.0), made(create, 6, value=2.0)
    (_, wide), (_, half) = made(create, 4, width=3), made(create, 4, dtype=tf.float16)
    assert len(variables_of(first, second)) == 2  # one on each server
    assert len(variables_of(first, second, wide, half)) == 6
    assert firsts(first) == [0, 0]
    assert firsts(second) == [2, 2]
    np.testing.assert_array_equal(first.read_all(), np.full([4, 2], 1.0))
    np.testing.assert_array_equal(second.read_all(), np.full([6, 2], 2.0))
    first.assign(np.arange(8.0).reshape(4, 2))
    np.testing.assert_array_equal(second.read_all(), np.full([6, 2], 2.0))
    found = look_up(first.shards, tf.constant([3, 0], tf.int64))
    np.testing.assert_array_equal(found[:, 0], [6, 0])


def test_large_tables_have_variables_of_their_own(create, monkeypatch):
    monkeypatch.setattr(creation, "TABLE_BYTES", 3 * 8)
    small, large = made(create, 6)[1], made(create, 8)[1]
    assert [shard.is_alone for of in (small, large) for shard in of.shards] == [False] * 2 + [
        True
    ] * 2
    assert [shard.variable.shape for shard in large.shards] == [[4, 2], [4, 2]]


def test_a_full_variable_is_followed_by_another(create, monkeypatch):
    monkeypatch.setattr(creation, "SHARED_BYTES", 5 * 8)
    first, second, third = (made(create, 4)[1] for _ in range(3))
    assert len(variables_of(first, second)) == 2
    assert len(variables_of(first, second, third)) == 4
    assert firsts(third) == [0, 0]


def test_an_index_behind_the_last_row_is_not_the_next_tables(create):
    (_, first), _ = made(create, 4), made(create, 4)
    for wrong in (4, -1):
        with pytest.raises(tf.errors.InvalidArgumentError, match="no rows of their table"):
            first.sparse_read(tf.constant([0, wrong], tf.int64))
        with pytest.raises(tf.errors.InvalidArgumentError, match="no rows of their table"):
            tf.function(first.sparse_read)(tf.constant([wrong], tf.int64))


def test_rows_are_a_variable_of_their_own(create):
    (_, first), (_, second) = made(create, 4, value=1.0), made(create, 4, value=5.0)
    rows = second.shards[0]
    rows.mark_all(False)
    rows.scatter_update(tf.IndexedSlices(tf.constant([[7.0, 8.0]]), tf.constant([1])))
    np.testing.assert_array_equal(rows.read_value(), [[5, 5], [7, 8]])
    np.testing.assert_array_equal(rows.marks(), [False, True])
    np.testing.assert_array_equal(tf.gather(rows, tf.constant([1, 1])), [[7, 8], [7, 8]])
    np.testing.assert_array_equal(first.read_all(), np.full([4, 2], 1.0))


def test_dense_gradients_update_the_rows_of_one_table(create):
    (_, first), (variable, second) = made(create, 4, value=1.0), made(create, 4, value=5.0)
    optimizer = keras.optimizers.SGD(1.0)
    optimizer.build([variable])
    variables = types.SimpleNamespace(slots_of=lambda variable: [])
    updates = Updates(variables, [variable], RowTransfer())  # type: ignore[arg-type]
    updates.update_whole(optimizer, second.shards[1], variable, tf.ones([2, 2]))
    np.testing.assert_array_equal(second.read_all()[:, 0], [5, 5, 4, 4])
    np.testing.assert_array_equal(first.read_all(), np.full([4, 2], 1.0))


def test_marks_are_those_of_one_table(create):
    (_, first), (_, second) = made(create, 4), made(create, 4)
    shard = second.shards[0]
    shard.mark_changed(tf.constant([1], tf.int64))
    np.testing.assert_array_equal(shard.marks(), [False, True])
    assert not np.any(first.shards[0].marks())
    shard.mark_changed()
    assert np.all(shard.marks())
    assert not np.any(first.shards[0].marks())
    first.shards[0].mark_all(True)
    first.shards[0].mark_all(False)
    assert np.all(shard.marks())


def with_slots(of, slots):
    """The shards of a table with those of its slots."""
    return [
        dataclasses.replace(shard, slots={id(slot): slot.shards[number] for slot in slots})
        for number, shard in enumerate(of.shards)
    ]


def test_slots_have_the_places_of_their_rows(create):
    (one, first), (other, second) = made(create, 4), made(create, 6)
    slots = {}
    for variable, value in ((one, 0.1), (other, 0.2)):  # as an optimizer makes them
        slots[id(variable)] = [
            made(create, variable._value.shape[0], value=value, slot_of=variable)[1]
            for _ in range(2)
        ]
    (slot, slot_of_second), others = zip(*slots.values(), strict=True)
    assert len(variables_of(slot, slot_of_second)) == len(variables_of(*others)) == 2
    assert not variables_of(slot, slot_of_second) & variables_of(*others)
    np.testing.assert_array_equal(others[1].read_all(), np.full([6, 2], 0.2, np.float32))
    assert firsts(slot_of_second) == firsts(second) == [2, 2]
    for own, of in zip(slot.shards, first.shards, strict=True):
        assert (own.changed, own.first) == (of.changed, of.first)
    group = MultiTableLookup(
        [with_slots(first, slots[id(one)]), with_slots(second, slots[id(other)])]
    )
    assert {server: len(found) for server, found in group.shards.items()} == {0: 1, 1: 1}


def test_tables_whose_slots_are_elsewhere_are_not_updated_as_one(create):
    """One of two models that share a table may have been compiled again."""
    (one, first), (other, second) = made(create, 4), made(create, 4)
    before = made(create, 4, slot_of=one)[1]
    slots = [made(create, 4, slot_of=one)[1]], [made(create, 4, slot_of=other)[1]]
    assert variables_of(before) == variables_of(*slots[1]) != variables_of(*slots[0])
    group = MultiTableLookup([with_slots(first, slots[0]), with_slots(second, slots[1])])
    assert {server: len(found) for server, found in group.shards.items()} == {0: 2, 1: 2}


def test_rows_whose_slots_are_in_other_variables_are_updated_alone(create):
    made(create, 4)
    _, second = made(create, 4, value=3.0)
    slot = object()
    alone = [
        dataclasses.replace(
            shard, slots={id(slot): VariableShard(tf.Variable(tf.zeros([2, 2])), 0, 0, 0)}
        )
        for shard in second.shards
    ]
    group = MultiTableLookup([alone])
    route = group.route([tf.constant([1], tf.int64)])
    (_, held), (sizes, ids) = group.shards[0][0], route.asked[0]
    for shard in (held, held.slots[id(slot)]):
        rows = ServerRows([shard], [ids], sizes)
        rows.assign_add(tf.constant([[1.0, 2.0]]))
        rows.assign_sub(tf.constant([[0.5, 0.5]]))
    np.testing.assert_array_equal(second.read_all()[:3], [[3, 3], [3.5, 4.5], [3, 3]])
    np.testing.assert_array_equal(held.slots[id(slot)].variable, [[0, 0], [0.5, 1.5]])


def test_ids_of_joined_tables_and_others_are_routed_together(create, monkeypatch):
    ids = [[3, 0, 3], [5, 1, 0], [7, 0, 7, 2]]
    tables = [made(create, 4)[1], made(create, 6)[1]]
    monkeypatch.setattr(creation, "TABLE_BYTES", 0)
    tables.append(made(create, 8)[1])
    for number, of in enumerate(tables):
        of.assign(100.0 * number + np.arange(of.shape[0])[:, None] + np.zeros([1, 2]))
    group = MultiTableLookup([of.shards for of in tables])
    route = group.route([tf.constant(own, tf.int64) for own in ids])
    found, rows = {}, {}
    for server, (sizes, places) in route.asked.items():
        held = [shard for _, shard in group.shards[server]]
        assert len(held) == 2  # the joined ones are one
        parts = tf.split(places, sizes, num=2)
        rows[server] = ServerRows(held, parts, sizes)
        found[server] = tf.convert_to_tensor(rows[server])
    for number, (own, delivered) in enumerate(zip(ids, route.deliver(found), strict=True)):
        np.testing.assert_array_equal(delivered[:, 0], 100 * number + np.array(own))
    grads = route.send([tf.ones([len(own), 2]) for own in ids])
    for server, some in rows.items():
        some.assign_add(grads[server])
    for number, (own, of) in enumerate(zip(ids, tables, strict=True)):
        expected = 100.0 * number + np.arange(of.shape[0]) + np.bincount(own, minlength=of.shape[0])
        np.testing.assert_array_equal(of.read_all()[:, 0], expected)


def test_variables_are_freed_with_their_last_table():
    first = Joined(0, 8)
    shard = first.table(new(2), 0, 2)
    known = weakref.ref(shard.variable)
    more = first.table(new(1), 0, 1)
    assert more.variable is shard.variable
    del shard
    gc.collect()
    assert known() is not None
    del more
    gc.collect()
    assert known() is None
