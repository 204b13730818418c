"""Iterators of tf.data that end in the background."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tensorflow as tf

from tfmw.compat import datasets


def test_an_iterator_ends_in_a_thread_and_not_where_its_last_reference_is_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended = threading.Event()
    waiting: list[Callable[[], Any]] = []

    class Later(threading.Thread):
        def __init__(self, seconds: float, function: Callable[[], Any]):
            super().__init__(target=function)
            waiting.append(super().start)

        def start(self) -> None:
            """Waits for the test."""

    def numbers() -> Iterator[int]:
        try:
            yield from range(100)
        finally:
            ended.set()

    monkeypatch.setattr(threading, "Timer", Later)
    source = tf.data.Dataset.from_generator(numbers, output_signature=tf.TensorSpec([], tf.int64))
    iterator = iter(source)
    assert int(next(iterator)) == 0
    datasets.end_in_background(iterator)
    assert not waiting, "it is still in use"
    assert int(next(iterator)) == 1
    del iterator
    (start,) = waiting
    assert not ended.is_set()
    start()
    assert ended.wait(60)
