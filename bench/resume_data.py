"""Seconds to the first batch of a resumed run, at 80 % of a pass, by source and size.

    python bench/resume_data.py [--sizes 1000000 10000000 100000000] [--skip]

Each row is a process of its own. With `--skip` a last column has the time of `tf.data`'s own
`skip`, which reads every element before the position, for the smallest size.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf

from tfmw import data

BATCH = 1000


class Batches(keras.utils.PyDataset):
    """A PyDataset of `n` examples."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self._n = n

    def __len__(self) -> int:
        return self._n // BATCH

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        rows: np.ndarray = np.arange(index * BATCH, (index + 1) * BATCH, dtype=np.float32)[:, None]
        return rows, rows


def _slices(n: int) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(np.arange(n, dtype=np.float32)[:, None])


SOURCES: dict[str, Callable[[int], data.Source]] = {
    "arrays": lambda n: data.Source(np.arange(n, dtype=np.float32)[:, None], batch_size=BATCH),
    "from_tensor_slices, map, batch": lambda n: data.Source(
        _slices(n).map(lambda x: x + 1).batch(BATCH)
    ),
    "the same, shuffle(10_000), repeat": lambda n: data.Source(
        _slices(n).shuffle(10_000, seed=1).map(lambda x: x + 1).repeat().batch(BATCH)
    ),
    "range, map, batch": lambda n: data.Source(
        tf.data.Dataset.range(n).map(lambda i: tf.cast(i, tf.float32)[None]).batch(BATCH)
    ),
    "PyDataset": lambda n: data.Source(Batches(n)),
}


def _measure(name: str, n: int, skip: bool) -> float:
    source = SOURCES[name](n)
    if skip:
        dataset = data.Source.shard(source, data.Sharding(2, 1), data.Order(seed=3)).dataset
        start = time.perf_counter()
        next(iter(dataset.skip(n * 8 // 10 // BATCH)))
    else:
        start = time.perf_counter()
        position = n * 8 // 10 // BATCH
        by_index = source.is_read_once
        shard = source.shard(data.Sharding(2, 1), data.Order(seed=3), 0 if by_index else position)
        next(iter(shard.rest(position) if shard.rest else shard.dataset))
    return time.perf_counter() - start


def main() -> None:
    """Prints the table, or measures one cell of it in this process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[10**6, 10**7, 10**8])
    parser.add_argument("--skip", action="store_true")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        name, n, skip = options.one
        print(_measure(name, int(n), skip == "skip"))
        return
    runs = [(n, "seek") for n in options.sizes]
    runs += [(options.sizes[0], "skip")] * options.skip
    for name in SOURCES:
        seconds = []
        for n, how in runs:
            command = [sys.executable, __file__, "--one", name, str(n), how]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            seconds.append(float(done.stdout))
        print(f"{name:36s}", *(f"{s:8.2f} s" for s in seconds), flush=True)


if __name__ == "__main__":
    main()
