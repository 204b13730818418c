"""Time of an all-reduce over the workers: tfmw's ring, and TensorFlow's by chunk size.

    tfmw run --workers 2 bench/ring.py [--mb 11 64] [--pieces 512 1024 2048 4096 8192 0]

Wall time and processor time of the chief, in ms: medians of five rounds of five all-reduces.
The sizes in tfmw/train/mirrored/collectives/transports.py come from here. A worker has one core.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import tensorflow as tf

import tfmw
from tfmw.train.mirrored.collectives.reduction import Reduction

ROUNDS, TIMES = 5, 5
SUM = tf.distribute.ReduceOp.SUM


def by_tensorflow(piece: int, flat: tf.Tensor) -> list[Any]:
    """Sums in chunks of `piece` elements, over TensorFlow's ring."""
    # Packs of one byte: nothing is merged, so that the chunks stay as they are.
    options = tf.distribute.experimental.CommunicationOptions(bytes_per_pack=1)
    elements = int(flat.shape[0])
    sizes = [min(piece, elements - start) for start in range(0, elements, piece)]
    parts = tf.split(flat, sizes) if len(sizes) > 1 else [flat]
    reduced: list[Any] = tf.distribute.get_replica_context().all_reduce(SUM, parts, options)
    return reduced


def measure(
    strategy: Any, elements: int, dtype: tf.DType, reduce: Callable[[tf.Tensor], list[Any]]
) -> tuple[float, float]:
    """(wall, processor) milliseconds of an all-reduce of `elements`."""
    with strategy.scope():
        values = tf.Variable(tf.ones([elements]))

    def once() -> Any:
        reduced = reduce(tf.cast(values.read_value(), dtype))
        return tf.cast(tf.concat(reduced, axis=0)[0], tf.float32)

    @tf.function(autograph=False)
    def many() -> Any:
        def body(made: Any, total: Any) -> Any:
            first = strategy.experimental_local_results(strategy.run(once))[0]
            return made + 1, total + first

        zero = tf.constant(0), tf.constant(0.0)
        return tf.while_loop(lambda made, _: made < TIMES, body, zero, parallel_iterations=1)[1]

    many()
    wall, processor = [], []
    for _ in range(ROUNDS):
        begin, used = time.perf_counter(), time.process_time()
        float(many())
        wall.append(time.perf_counter() - begin)
        processor.append(time.process_time() - used)
    return tuple(1000 * statistics.median(t) / TIMES for t in (wall, processor))  # type: ignore


def main() -> None:
    """Measures each size, prints a table on the chief."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--mb", type=float, nargs="+", default=[11, 64])
    parser.add_argument("--pieces", type=int, nargs="+", default=[1024, 2048, 4096, 8192, 0])
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    options = parser.parse_args()
    cluster = tfmw.init()
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[cluster.index % len(cores)]})
    strategy, dtype = tfmw.strategies.current_strategy(), tf.as_dtype(options.dtype)
    reduction = Reduction(strategy)

    def over_ring(flat: tf.Tensor) -> list[Any]:
        return reduction([flat])

    if cluster.is_chief:
        print(f"{'MB':>6} {'over':>22} {'ms':>8} {'ms of processor':>16}")
    for mb in options.mb:
        elements = int(mb * (1 << 20)) // dtype.size
        ways: dict[str, Callable[[tf.Tensor], list[Any]]] = {"tfmw's ring": over_ring}
        for kb in options.pieces:
            piece = kb * 1024 // dtype.size or elements
            ways[f"gRPC, {f'{kb} KB' if kb else 'whole'}"] = functools.partial(by_tensorflow, piece)
        for name, reduce in ways.items():
            wall, processor = measure(strategy, elements, dtype, reduce)
            if cluster.is_chief:
                print(f"{mb:>6g} {name:>22} {wall:>8.1f} {processor:>16.1f}", flush=True)


if __name__ == "__main__":
    main()
