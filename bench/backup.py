"""Cost of backups: stall per backup, time to write, share of the training time.

    python bench/backup.py [--seconds 30] [--every 10] [--pairs 2] [--dir s3://bucket/run7]

One process trains an MLP of 25 million parameters with Adam (300 MB of state) in one call of fit.
The first backup allocates the memory that all others reuse, and is reported apart. Then stretches
with backups and stretches without alternate, so that both see the same machine; the cost is the
ratio of their times per step. Processor time is reported too: on a machine that others use, it is
the figure to trust.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
import time
from collections.abc import Sized
from typing import Any
from unittest import mock

WIDTH = 2730  # 784 x 2730 + 3 x 2730 x 2730 + 2730 x 10 and biases: 24.5 million parameters
BATCH = 64


def main() -> None:
    """Trains, and prints the figures."""
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--seconds", type=float, default=30.0, help="of each stretch")
    flags.add_argument("--every", type=float, default=10.0, help="seconds between backups")
    flags.add_argument("--pairs", type=int, default=2, help="of stretches, with and without")
    flags.add_argument("--dir", help="a directory, or a place in a bucket; default: temporary")
    options = flags.parse_args()

    import keras
    import numpy as np
    import tensorflow as tf

    import tfmw
    from tfmw.train.checkpoint import resume

    tfmw.init()
    saves: list[float] = []
    writes: list[tuple[float, float]] = []
    switch = Switch(options.seconds, 2 * options.pairs, options.every + 5.0, writes)
    backups = resume.Backups
    save, signals, write = backups.save, backups.signals, backups._write

    def timed_save(self: Any, *args: Any, **named: Any) -> None:
        start = time.perf_counter()
        save(self, *args, **named)
        saves.append(time.perf_counter() - start)

    def timed_write(self: Any, *args: Any) -> None:
        start, cpu = time.perf_counter(), time.thread_time()
        write(self, *args)
        writes.append((time.perf_counter() - start, time.thread_time() - cpu))

    def signals_now(self: Any) -> tuple[float, float]:
        leave, due = signals(self)
        return leave, due * switch.with_backups

    for name, timed in (
        ("save", timed_save),
        ("_write", timed_write),
        ("signals", signals_now),
    ):
        mock.patch.object(backups, name, timed).start()

    class Watch(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            switch.step()
            self.model.stop_training = switch.over

    model = keras.Sequential(
        [keras.Input((784,))]
        + [keras.layers.Dense(WIDTH, activation="relu") for _ in range(4)]
        + [keras.layers.Dense(10)]
    )
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    x = np.random.default_rng(0).normal(size=(1024, 784)).astype(np.float32)
    dataset = tf.data.Dataset.from_tensor_slices((x, np.arange(1024) % 10)).batch(BATCH).repeat()
    place: Any = contextlib.nullcontext(options.dir)
    if "://" not in (options.dir or ""):
        place = tempfile.TemporaryDirectory(dir=options.dir)
    with place as folder:
        tfmw.fit(
            model,
            dataset,
            steps_per_epoch=1_000_000,
            verbose=0,
            callbacks=[Watch()],
            backup_dir=folder,
            backup_every=f"{options.every} s",
        )
    print(f"{model.count_params() / 1e6:.1f} M parameters, Adam, batch {BATCH}")
    switch.report(saves[:-1], writes[:-1], options.every)


class Switch:
    """Stretches of the training, with and without backups in turns, and their times per step.

    Args:
        seconds: duration of a stretch.
        stretches: number of stretches, with backups and without in turns.
        warm_up: seconds before the first stretch.
        writes: one entry for each backup that has been written. A stretch with backups, and the
            warm-up, lasts until it has one, however slow the disk or the bucket is.
    """

    def __init__(self, seconds: float, stretches: int, warm_up: float, writes: Sized):
        self._seconds = seconds
        self._writes = writes
        self._written = 0
        self._warm_up = warm_up
        self._stretches = stretches
        self._number = -1  # the first steps trace, warm up, and make the first backup
        self._begun = self._last = time.perf_counter()
        self._cpu_begun = time.process_time()
        self._steps = 0
        self._done: list[tuple[bool, float, float]] = []
        self._all: dict[bool, list[float]] = {True: [], False: []}

    @property
    def with_backups(self) -> bool:
        return self._number < 0 or self._number % 2 == 0

    @property
    def over(self) -> bool:
        return self._number >= self._stretches

    def step(self) -> None:
        """Records that a step is complete."""
        now = time.perf_counter()
        if self._number >= 0:
            self._all[self.with_backups].append(now - self._last)
        self._last = now
        self._steps += 1
        lasts = self._seconds if self._number >= 0 else self._warm_up
        lacks = self.with_backups and len(self._writes) == self._written
        if now - self._begun >= lasts and not lacks:
            if self._number >= 0:
                wall, cpu = now - self._begun, time.process_time() - self._cpu_begun
                self._done.append((self.with_backups, wall / self._steps, cpu / self._steps))
            self._number += 1
            self._written = len(self._writes)
            self._begun, self._cpu_begun, self._steps = now, time.process_time(), 0

    def report(self, saves: list[float], writes: list[tuple[float, float]], every: float) -> None:
        """Prints the figures."""
        mean = {
            on: statistics.mean(t for was_on, t, _ in self._done if was_on == on)
            for on in (True, False)
        }
        median = statistics.median(self._all[False])
        (first, *saves), (_, *writes) = saves, writes
        wall, cpu = (statistics.mean(times) for times in zip(*writes, strict=True))
        lines = [
            ("step without backups", f"{1000 * mean[False]:.1f} ms, median {1000 * median:.1f}"),
            (f"step with one every {every:g} s", f"{1000 * mean[True]:.1f} ms"),
            ("stall, first backup", f"{1000 * first:.1f} ms"),
            ("stall per backup", f"{1000 * statistics.median(saves):.1f} ms, of {len(saves)}"),
            ("slowest step with backups", f"{1000 * max(self._all[True]):.1f} ms"),
            ("written in the background", f"{wall:.2f} s, {cpu:.2f} s of it computing"),
            ("cost in wall time", f"{100 * (mean[True] / mean[False] - 1):.2f} %"),
            ("processor time, without", f"{1000 * self._cpu(False):.1f} ms per step"),
            ("cost in processor time", f"{100 * (self._cpu(True) / self._cpu(False) - 1):.2f} %"),
        ]
        for what, value in lines:
            print(f"{what:32}{value}")

    def _cpu(self, with_backups: bool) -> float:
        """Processor seconds of this process per step, which other processes change little."""
        return statistics.mean(cpu for on, _, cpu in self._done if on == with_backups)


if __name__ == "__main__":
    main()
