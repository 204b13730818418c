"""Processor time of a record of the flight recorder, beside that of an exchange over the ring.

    .venv/bin/python -m bench.recorder

Two workers are two threads of this process, which exchange small arrays.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.helpers.threads import Exchange, in_threads
from tfmw.mirrored.collectives import ring
from tfmw.runtime import recorder

ELEMENTS, ROUNDS, REPEATS = 1000, 2000, 7


def processor_us(act: Callable[[], Any], times: int) -> float:
    """The least processor time of one of `times` acts that `act` makes, in microseconds."""
    found = []
    for _ in range(REPEATS):
        begin = time.process_time()
        act()
        found.append((time.process_time() - begin) / times)
    return 1e6 * min(found)


def main() -> None:
    """Prints both times."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "exchanges")
        recorder.make_file(path)
        os.environ[recorder.EXCHANGES_FILE] = str(path)

        def record() -> None:
            for _ in range(ROUNDS):
                recorder.begun("gradients", 4000)
                recorder.waits_for(1)
                recorder.waited(0.001)
                recorder.done()

        own = processor_us(record, ROUNDS)
    meeting = Exchange(2)
    rings = in_threads(
        2,
        lambda rank: ring.connect(rank, ["127.0.0.1"] * 2, b"k" * 32, meeting.of(rank)),
    )
    local = np.ones(ELEMENTS, np.float32)

    def exchange() -> None:
        in_threads(2, lambda rank: [rings[rank].sum(local) for _ in range(ROUNDS)] and None)

    both = processor_us(exchange, 2 * ROUNDS)
    for one in rings:
        one.close()
    print(f"a record {own:.2f} us, an exchange of {ELEMENTS} floats {both:.0f} us on each worker")


if __name__ == "__main__":
    main()
