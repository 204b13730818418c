"""Workers that are threads of one process, for what needs no TensorFlow."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class Exchange:
    """`from_all` for threads."""

    def __init__(self, size: int):
        self._barrier = threading.Barrier(size)
        self._values: list[Any] = [None] * size

    def of(self, rank: int) -> Callable[[Any], list[Any]]:
        def from_all(value: Any) -> list[Any]:
            self._values[rank] = value
            self._barrier.wait(60)
            values = list(self._values)
            self._barrier.wait(60)
            return values

        return from_all


def in_threads(size: int, work: Callable[[int], Any]) -> list[Any]:
    """Results of `work`, or its exceptions, for each rank."""
    results: list[Any] = [None] * size

    def one(rank: int) -> None:
        try:
            results[rank] = work(rank)
        except Exception as e:
            results[rank] = e

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return results
