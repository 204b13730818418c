"""Positions in the data: what was read before one and after it, on any number of replicas."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.helpers.cases import cases
from tfmw import data
from tfmw.cluster.group import Group
from tfmw.compat.shuffles import ShuffleSeeds
from tfmw.errors import UsageError
from tfmw.train.epoch_iterator import EpochIterator, Position

EXAMPLES = 22


def shuffled() -> tf.data.Dataset:
    return tf.data.Dataset.range(EXAMPLES).shuffle(EXAMPLES, seed=3)


def iterator(
    dataset: tf.data.Dataset,
    sharding: data.Sharding,
    position: Position | None = None,
    split: bool = True,
) -> EpochIterator:
    source = data.Source(dataset, split=split)
    as_json = None if position is None else dataclasses.asdict(position)
    found = EpochIterator(source, Group(0, 1), sharding, None, "steps_per_epoch", as_json)
    if position is not None:
        found.restore_position()
    return found


def read(epoch: EpochIterator, steps: int = 1000) -> list[list[int]]:
    """The examples of each step, until the end of the epoch or for some steps."""
    found: list[list[int]] = []
    while len(found) < steps and (call := epoch.next_call(1)) is not None:
        parts, counts, _ = data.step_of(next(call.iterator), epoch._sharding)
        found.append([int(i) for part, n in zip(parts, counts, strict=True) for i in part[:n]])
        epoch.advance(1, 1)
    return found


@pytest.mark.parametrize("later", cases([1, 3], [2]))
@pytest.mark.parametrize("steps", cases([2], [1]))
def test_whole_batches_go_on_with_other_replicas(steps: int, later: int) -> None:
    """Eleven batches of two: two replicas begin the epoch, others end it."""
    seen: list[int] = []
    for rank in range(2):
        epoch = iterator(shuffled().batch(2), data.Sharding(2, rank), split=False)
        epoch.begin_epoch()
        seen += [i for step in read(epoch, steps) for i in step]
        position = epoch.position(in_epoch=True)
    assert len(seen) == steps * 4
    for rank in range(later):
        rest = iterator(shuffled().batch(2), data.Sharding(later, rank), position, split=False)
        rest.begin_epoch()
        found = read(rest)
        assert len(found) == -(-(11 - 2 * steps) // later)
        assert rest.at_epoch_end
        rest.end_epoch()
        seen += [i for step in found for i in step]
        rest.begin_epoch()
        assert len(read(rest)) == -(-11 // later), "the next epoch is a whole one"
    assert sorted(seen) == list(range(EXAMPLES))


@pytest.mark.parametrize("old", [False, True])
def test_a_position_has_the_orders_before_it(old: bool) -> None:
    """Of this call and of earlier ones; a backup of an earlier version counts those of its call."""
    first = shuffled()
    if not old:
        next(iter(first))
    epoch = iterator(first.batch(4), data.Sharding())
    whole: list[list[int]] = []
    for _ in range(2):
        epoch.begin_epoch()
        whole += read(epoch, 6 if not whole else 2)
        if len(whole) == 6:
            epoch.end_epoch()
    position = epoch.position(in_epoch=True)
    assert position.orders == [2 if old else 3]
    if old:
        position = dataclasses.replace(position, orders=None, orders_now=None, orders_left=None)
    expected = read(epoch)
    again = shuffled()
    rest = iterator(again.batch(4), data.Sharding(), position)
    rest.begin_epoch()
    assert read(rest) == expected
    passes: Any = ShuffleSeeds(again).passes
    assert passes == ShuffleSeeds(first).passes == (3 if old else 4)


ROWS: np.ndarray = np.arange(EXAMPLES, dtype=np.float32)

SHORTER: dict[str, Callable[[int], data.Source]] = {
    "slices": lambda n: data.Source(tf.data.Dataset.range(n).batch(2)),
    "shuffled": lambda n: data.Source(tf.data.Dataset.range(n).shuffle(9, seed=1).batch(2)),
    "whole batches": lambda n: data.Source(tf.data.Dataset.range(n).batch(2), split=False),
    "arrays": lambda n: data.Source(ROWS[:n], batch_size=2),
    "shuffled arrays": lambda n: data.Source(ROWS[:n], batch_size=2, shuffle=True),
    "PyDataset": lambda n: data.Source(Rows(n)),
}


class Rows(keras.utils.PyDataset):
    def __init__(self, number: int):
        super().__init__()
        self._number = number

    def __len__(self) -> int:
        return self._number // 2

    def __getitem__(self, index: int) -> Any:
        return (ROWS[2 * index : 2 * index + 2],)


@pytest.mark.parametrize("kind", SHORTER)
@pytest.mark.parametrize("length", [2, 10])
def test_data_that_ends_before_the_position_of_a_backup_is_refused(kind: str, length: int) -> None:
    """Five steps were done, in a pass over eleven batches; then there are one or five."""

    def begun(length: int, position: Any = None) -> EpochIterator:
        source = SHORTER[kind](length)
        return EpochIterator(source, Group(0, 1), data.Sharding(), None, "steps", position)

    epoch = begun(EXAMPLES)
    epoch.begin_epoch()
    for _ in range(5):
        call = epoch.next_call(1)
        assert call is not None
        next(call.iterator)
        epoch.advance(1, 1)
    position = dataclasses.asdict(epoch.position(in_epoch=True))
    with pytest.raises(UsageError, match=f"after 5 steps of a pass .* has {length // 2} steps"):
        begun(length, position).restore_position()
    begun(12, position).restore_position()
