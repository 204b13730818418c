"""Seconds to the first batch of a resumed run, at 80 % of a pass, by source and size.

    python bench/resume_data.py [--sizes 1000000 10000000 100000000] [--only NAME...] [--skip]

Each figure is from a process of its own: from opening the files, or from arrays in memory, to the
first batch of one of two workers. With `--skip` a last
column has the time of `tf.data`'s own `skip`, which reads every element before the position, for
the smallest size.
"""

from __future__ import annotations

import argparse
import functools
import os
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import grain
import keras
import numpy as np
import pyarrow.parquet
import tensorflow as tf

from tfmw import data

BATCH = 1000
PER_FILE = 1_000_000
INTERLEAVED = "interleaved TFRecordDataset, shuffle"


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


def _files(n: int, folder: Path, first: Path) -> list[str]:
    """Names of `n` examples' files: all have the content of the first one."""
    names = [folder / f"{number:03}{first.suffix}" for number in range(n // PER_FILE)]
    for name in names:
        if not name.exists():
            os.link(first, name)
    return list(map(str, names))


def _records(n: int, folder: Path) -> list[str]:
    first = folder / "first.tfrecord"
    if not first.exists():
        with tf.io.TFRecordWriter(str(first)) as writer:
            for value in range(PER_FILE):
                writer.write(struct.pack("<d", value))
    return _files(n, folder, first)


def _parquet(n: int, folder: Path) -> list[str]:
    first = folder / "first.parquet"
    if not first.exists():
        table = pyarrow.table({"x": np.arange(PER_FILE, dtype=np.float32)})
        pyarrow.parquet.write_table(table, first, row_group_size=10_000)
    return _files(n, folder, first)


@functools.cache
def _numbers(n: int) -> np.ndarray:
    return np.arange(n, dtype=np.float32)[:, None]


def _slices(n: int) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(_numbers(n))


def _parsed(records: Iterable[str], folder: Path) -> tf.data.Dataset:
    def parse(text: tf.Tensor) -> tf.Tensor:
        return tf.io.decode_raw(text, tf.float64)

    return data.from_records(records, index_dir=folder / "index").map(parse)


def _interleaved(n: int, folder: Path) -> tf.data.Dataset:
    """Shuffled files of TFRecords, read by turns, and shuffled."""
    files = tf.data.Dataset.from_tensor_slices(_records(n, folder)).shuffle(1000, seed=2)
    records = files.interleave(tf.data.TFRecordDataset, 4, 16)
    return records.map(lambda r: tf.io.decode_raw(r, tf.float64)).shuffle(10_000, seed=1)


SOURCES: dict[str, Callable[[int, Path], Any]] = {
    "arrays": lambda n, _: data.Source(_numbers(n), batch_size=BATCH),
    "from_tensor_slices, map, batch": lambda n, _: _slices(n).map(lambda x: x + 1).batch(BATCH),
    "the same, shuffle(10_000), repeat": lambda n, _: (
        _slices(n).shuffle(10_000, seed=1).map(lambda x: x + 1).repeat().batch(BATCH)
    ),
    "range, map, batch": lambda n, _: (
        tf.data.Dataset.range(n).map(lambda i: tf.cast(i, tf.float32)[None]).batch(BATCH)
    ),
    "PyDataset": lambda n, _: Batches(n),
    "Grain, shuffled": lambda n, _: grain.MapDataset.range(n).shuffle(seed=1).batch(BATCH),
    "from_records": lambda n, folder: _parsed(_records(n, folder), folder).batch(BATCH),
    INTERLEAVED: lambda n, folder: _interleaved(n, folder).batch(BATCH),
    "from_parquet": lambda n, folder: (
        data.from_parquet(_parquet(n, folder)).map(lambda row: row["x"]).batch(BATCH)
    ),
}

IN_MEMORY = "arrays", "from_tensor_slices, map, batch", "the same, shuffle(10_000), repeat"


def _measure(name: str, n: int, skip: bool, folder: Path) -> float:
    if name in IN_MEMORY:
        _numbers(n)
    start = time.perf_counter()
    source = SOURCES[name](n, folder)
    source = source if isinstance(source, data.Source) else data.Source(source)
    position = n * 8 // 10 // BATCH
    if skip:
        dataset = source.shard(data.Sharding(2, 1), data.SharedOrder(seed=3)).dataset
        next(iter(dataset.skip(position)))
    else:
        by_index = source.is_read_once
        order = data.SharedOrder(seed=3, index_dir=str(folder / "index"))
        shard = source.shard(data.Sharding(2, 1), order, 0 if by_index else position)
        next(iter(shard.batches(position) if by_index else shard.dataset))
    return time.perf_counter() - start


def main() -> None:
    """Prints the table, or measures one cell of it in this process."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=[10**6, 10**7, 10**8])
    parser.add_argument("--only", nargs="+", choices=SOURCES, default=[*SOURCES], metavar="NAME")
    parser.add_argument("--skip", action="store_true")
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        name, n, skip, folder = options.one
        print(_measure(name, int(n), skip == "skip", Path(folder)))
        return
    runs = [(n, "seek") for n in options.sizes]
    runs += [(options.sizes[0], "skip")] * options.skip
    seconds: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for n in options.sizes:  # the index of records exists since the interrupted run
            if {"from_records", INTERLEAVED} & {*options.only}:
                _parsed(_records(n, Path(folder)), Path(folder))
        for name in options.only:
            for n, how in runs:
                command = [sys.executable, __file__, "--one", name, str(n), how, folder]
                done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
                seconds.setdefault(name, []).append(float(done.stdout))
            print(f"{name:36s}", *(f"{s:8.2f} s" for s in seconds[name]), flush=True)


if __name__ == "__main__":
    main()
