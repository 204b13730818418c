"""The order of the batches of a `PyDataset`."""

from __future__ import annotations

import random
from typing import Any

import keras

from tfmw.data.py_dataset import OrderedPyDataset


class Numbers(keras.utils.PyDataset):
    """Batch i is the number i."""

    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: int) -> Any:
        return index


def order_of(dataset: OrderedPyDataset) -> list[int]:
    return [dataset[i] for i in range(7)]


def test_an_order_is_drawn_as_keras_draws_it() -> None:
    dataset = OrderedPyDataset(Numbers(), shuffle=True)
    assert order_of(dataset) == list(range(7))  # the form of batches is looked at before
    random.seed(5)
    expected = list(range(7))
    random.shuffle(expected)
    state = random.getstate()
    random.seed(5)
    dataset.draw()
    assert order_of(dataset) == expected
    assert random.getstate() == state


def test_an_order_is_restored_without_a_draw() -> None:
    dataset, again = (OrderedPyDataset(Numbers(), shuffle=True) for _ in range(2))
    dataset.draw()
    state = random.getstate()
    again.restore(dataset.drawn_from)
    assert order_of(again) == order_of(dataset)
    assert again.drawn_from == dataset.drawn_from
    assert random.getstate() == state


def test_an_order_that_is_not_shuffled_draws_nothing() -> None:
    dataset = OrderedPyDataset(Numbers(), shuffle=False)
    state = random.getstate()
    dataset.draw()
    dataset.restore(None)
    assert order_of(dataset) == list(range(7))
    assert random.getstate() == state
