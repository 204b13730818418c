"""The order of `interleave`, computed, and equal on machines with other numbers of cores."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tfmw import data
from tfmw.cluster.group import Group
from tfmw.compat.pipelines import Pipeline
from tfmw.data.record_files import interleave_order


@given(
    st.lists(st.sampled_from([0, 1, 2, 3, 5, 8]), min_size=1, max_size=9),
    st.integers(1, 5),
    st.integers(1, 4),
    st.sampled_from([None, 1, tf.data.AUTOTUNE]),
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_the_order_of_interleaved_datasets(
    lengths: list[int], cycle_length: int, block_length: int, calls: int | None
) -> None:
    counts = tf.constant(lengths, tf.int64)
    theirs = tf.data.Dataset.range(len(lengths)).interleave(
        lambda piece: tf.data.Dataset.range(counts[piece]).map(lambda place: (piece, place)),
        *(cycle_length, block_length, calls),
        deterministic=None if calls is None else True,
    )
    order = interleave_order(lengths, cycle_length, block_length)
    found = np.stack(order(np.arange(sum(lengths))), axis=1).tolist()
    assert found == [[int(piece), int(place)] for piece, place in theirs]


def _files(folder: Path) -> tf.data.Dataset:
    for file in range(5):
        with tf.io.TFRecordWriter(str(folder / f"{file}")) as writer:
            for record in range(3):
                writer.write(f"{file}{record}".encode())
    return tf.data.Dataset.list_files(str(folder / "*"), shuffle=False)


def _inside(ranges: tf.data.Dataset, calls: int | None) -> tf.data.Dataset:
    return ranges.flat_map(
        lambda i: tf.data.Dataset.range(5).interleave(
            lambda k: tf.data.Dataset.range(3).map(lambda j: 10 * k + j), num_parallel_calls=calls
        )
    )


PIPELINES: dict[str, Callable[[Path], tf.data.Dataset]] = {
    "files": lambda d: _files(d).interleave(tf.data.TFRecordDataset).map(tf.strings.to_number),
    "files in parallel": lambda d: tf.data.TFRecordDataset(_files(d), num_parallel_reads=-1).map(
        tf.strings.to_number
    ),
    "ranges": lambda d: tf.data.Dataset.range(5).interleave(
        lambda k: tf.data.Dataset.range(3).map(lambda j: 10 * k + j)
    ),
    "in parallel": lambda d: tf.data.Dataset.range(5).interleave(
        lambda k: tf.data.Dataset.range(3).map(lambda j: 10 * k + j), num_parallel_calls=-1
    ),
    "inside": lambda d: _inside(tf.data.Dataset.range(1), None),
    "inside, in parallel": lambda d: _inside(tf.data.Dataset.range(1), -1),
}


class _Machine(Group):
    """A group whose chief has another number of cores."""

    def from_chief(self, decide: Any) -> Any:
        own = decide()
        return 3 if isinstance(own, int) else own


@pytest.mark.parametrize("name", PIPELINES)
def test_the_cycle_length_is_that_of_the_chiefs_machine(name: str, tmp_path: Path) -> None:
    """tf.data chooses it by the number of cores, so workers would have different orders."""
    dataset = PIPELINES[name](tmp_path)
    of_chief = data.SharedOrder(group=_Machine(0, 1))
    found = [int(x) for x in data.ordered(Pipeline.of(dataset), of_chief)[0].dataset]
    assert found == [0, 10, 20, 1, 11, 21, 2, 12, 22, 30, 40, 31, 41, 32, 42]
    own = data.SharedOrder()
    assert list(data.ordered(Pipeline.of(dataset), own)[0].dataset.as_numpy_iterator()) == list(
        dataset.as_numpy_iterator()
    )
    lengths = of_chief.cycle_lengths  # of an earlier run, on another machine
    again = data.SharedOrder(cycle_lengths=lengths)
    assert [int(x) for x in data.ordered(Pipeline.of(dataset), again)[0].dataset] == found
