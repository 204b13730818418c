"""Processor time of the flight recorder, beside that of the exchanges over the ring it records.

    .venv/bin/python -m bench.recorder

Two workers are two threads of this process, which exchange arrays. Exchanges, and records of as
many with as many waits, are measured in many short turns. The cost is the median of the ratios of
neighbours: other load on the machine slows both of a pair.
"""

from __future__ import annotations

import functools
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.helpers.threads import Exchange, in_threads
from tfmw.observe import recorder
from tfmw.train.mirrored.collectives import ring

ROUNDS, TURNS = {1000: 400, 1_000_000: 20}, 60


def processor_s(act: Callable[[], Any]) -> float:
    """The processor time of one call."""
    begin = time.process_time()
    act()
    return time.process_time() - begin


def record(exchanges: int, waits: int) -> None:
    """Makes the calls of so many exchanges, and of the `waits` in all of them."""
    for _ in range(exchanges):
        recorder.begun("gradients", 4000)
        recorder.done()
    for _ in range(waits):
        recorder.waits_for(1)
        recorder.waited(0.001)


def waits_in(act: Callable[[], Any]) -> int:
    """The number of waits that the ring records in a call."""
    counted, waited = [0], recorder.waited

    def count(seconds: float) -> None:
        counted[0] += 1
        waited(seconds)

    recorder.waited = count
    try:
        act()
    finally:
        recorder.waited = waited
    return counted[0]


def main() -> None:
    """Prints the cost for small and for large exchanges."""
    folder = tempfile.TemporaryDirectory()
    path = Path(folder.name, "exchanges")
    recorder.make_file(path)
    os.environ[recorder.EXCHANGES_FILE] = str(path)
    meeting = Exchange(2)
    rings = in_threads(
        2,
        lambda rank: ring.connect(rank, ["127.0.0.1"] * 2, b"k" * 32, meeting.of(rank), range(2)),
    )
    for elements, rounds in ROUNDS.items():
        local: np.ndarray = np.ones(elements, np.float32)

        def exchange(local: np.ndarray = local, rounds: int = rounds) -> None:
            in_threads(
                2, lambda rank: [rings[rank].sum(local.copy()) for _ in range(rounds)] and None
            )

        waits = waits_in(exchange)
        own_part = functools.partial(record, 2 * rounds, waits)
        pairs = [(processor_s(own_part), processor_s(exchange)) for _ in range(TURNS)]
        own, whole = (1e6 * statistics.median(s) / (2 * rounds) for s in zip(*pairs, strict=True))
        cost = statistics.median(a / b for a, b in pairs)
        print(
            f"{elements:>9,} floats: an exchange {whole:8.1f} us with {waits / (2 * rounds):.1f} "
            f"waits, its record {own:.2f} us: {100 * cost:.2f} %"
        )
    for one in rings:
        one.close()
    folder.cleanup()


if __name__ == "__main__":
    main()
