"""Ids that come and go, against an exact cache: `python bench/dynamic_ids.py --draws 50_000_000`.

Draws ids: half from a Zipf distribution over a growing number of ids, half from one that prefers
the newest ids, which were never seen before. A `HashTableEmbedding` sees them batch by batch, and
so does an exact reference: a cache of as many rows that evicts the least recently used id, with
counts of all ids ever seen. Prints how many draws find a row of their own in each, and the memory
of the layer.
"""

from __future__ import annotations

import argparse
import os
import resource
import time
from collections import OrderedDict
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import tensorflow as tf

import tfmw

EXPONENT = 1.05
AT_FIRST = 1_000_000  # number of ids at the beginning


def zipf(random: np.random.Generator, count: int, ids: int) -> np.ndarray:
    """int64 [count], ranks from 0 to `ids` - 1; rank r with a probability about (r + 1)**-1.05."""
    power = 1 - EXPONENT
    uniform = random.random(count)
    return ((uniform * ((ids + 1) ** power - 1) + 1) ** (1 / power)).astype(np.int64) - 1


def draw(random: np.random.Generator, count: int, before: int) -> np.ndarray:
    """Ids of a batch after `before` draws: old ones at even places, new ones at odd places."""
    ids = AT_FIRST + before // 2
    half = count // 2
    known: np.ndarray = zipf(random, half, ids) * 2
    newest: np.ndarray = (ids - 1 - zipf(random, count - half, ids)) * 2 + 1
    return np.concatenate([known, newest])


class Exact:
    """A cache that gives rows to ids seen `min_count` times, and evicts the least recently used.

    Args:
        rows: number of rows.
        ids: upper bound of the ids, exclusive.
    """

    def __init__(self, rows: int, min_count: int, ids: int):
        self._rows = rows
        self._min_count = min_count
        self._counts: np.ndarray = np.zeros(ids, np.int32)
        self._used: OrderedDict[int, None] = OrderedDict()
        self._has_row: np.ndarray = np.zeros(ids, bool)

    def step(self, ids: np.ndarray) -> int:
        """Processes a batch; returns how many of its ids had a row before."""
        hits = int(self._has_row[ids].sum())
        distinct, counts = np.unique(ids, return_counts=True)
        has_row = self._has_row[distinct]
        for id_ in distinct[has_row].tolist():
            self._used.move_to_end(id_)
        new = distinct[~has_row]
        self._counts[new] += counts[~has_row]
        admitted = new[self._counts[new] >= self._min_count]
        self._counts[admitted] = 0
        self._has_row[admitted] = True
        self._used.update(dict.fromkeys(admitted.tolist()))
        while len(self._used) > self._rows:
            gone, _ = self._used.popitem(last=False)
            self._has_row[gone] = False
        return hits


def resident_mb() -> float:
    """Peak memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def main() -> None:
    """Runs both, and prints a line after each tenth of the draws."""
    flags = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    flags.add_argument("--draws", type=int, default=2_000_000)
    flags.add_argument("--batch", type=int, default=65_536)
    flags.add_argument("--max-bytes", type=int, default=200_000_000)
    flags.add_argument("--dim", type=int, default=16)
    flags.add_argument("--min-count", type=int, default=2)
    flags.add_argument("--alone", action="store_true", help="no reference, whose memory grows")
    options = flags.parse_args()
    layer = tfmw.layers.HashTableEmbedding(
        options.dim, max_bytes=options.max_bytes, min_count=options.min_count, seed=1
    )
    layer.build(())
    rows = int(layer.embeddings.shape[0]) - 1
    most = 2 * (AT_FIRST + options.draws)
    exact = None if options.alone else Exact(rows, options.min_count, most)
    has_row = tf.function(lambda ids: tf.math.count_nonzero(layer.rows_of(ids)))
    train: Any = tf.function(lambda ids: tf.size(layer(ids, training=True)))
    random = np.random.default_rng(0)
    steps = options.draws // options.batch
    hits, expected, seconds, drawn = 0, 0, 0.0, 0
    print(f"{rows} rows of {options.dim}, {steps} batches of {options.batch} ids")
    for step in range(1, steps + 1):
        ids = draw(random, options.batch, drawn)
        batch = tf.constant(ids)
        hits += int(has_row(batch))
        begin = time.perf_counter()
        train(batch)
        seconds += time.perf_counter() - begin
        expected += exact.step(ids) if exact else 0
        drawn += options.batch
        if step % max(1, steps // 10) == 0 or step == steps:
            compared = ""
            if expected:  # no id has a row in the first batch
                off = 100 * (hits / expected - 1)
                compared = f"exact {expected / drawn:.4f} | {off:+.2f} % | "
            print(
                f"{drawn:>11,} draws | with a row {hits / drawn:.4f} | "
                f"{compared}{drawn / seconds:,.0f} ids/s | process {resident_mb():.0f} MB",
                flush=True,
            )
    held = sum(weight.numpy().nbytes for weight in layer.weights)
    print(
        f"{len(layer.known_ids()):,} ids have a row. The layer's variables: {held / 1e6:.1f} MB of "
        f"{options.max_bytes / 1e6:.1f} MB"
    )


if __name__ == "__main__":
    main()
