"""A pipeline from an element on has the elements and orders of one whose elements are dropped."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.cases import every
from tfmw import data
from tfmw.compat import datasets
from tfmw.compat.pipelines import Pipeline
from tfmw.compat.shuffles import ShuffleOrder, ShuffleSeeds, has_known_order, pair_of_pass
from tfmw.data import reshuffles as reshuffles_module
from tfmw.data import seek as seek_module
from tfmw.data.order import reshuffles_of
from tfmw.data.seek import seek

N = 23


def _table() -> tf.data.Dataset:
    rows = np.arange(N)
    return tf.data.Dataset.from_tensor_slices((rows, {"double": 2.0 * rows})).map(lambda i, _: i)


SOURCES: dict[str, Callable[[], tf.data.Dataset]] = {
    "range": lambda: tf.data.Dataset.range(3, 3 + 2 * N, 2),
    "slices": _table,
    "generator": lambda: tf.data.Dataset.from_generator(
        lambda: iter(range(N)), output_signature=tf.TensorSpec([], tf.int64)
    ),
    "no index": lambda: tf.data.Dataset.range(5).flat_map(tf.data.Dataset.range),
}
STEPS: dict[str, Callable[[tf.data.Dataset, int], tf.data.Dataset]] = {
    "map": lambda d, n: d.map(lambda x: x + n),
    "parallel map": lambda d, n: d.map(lambda x: x * n, num_parallel_calls=2, deterministic=False),
    "shuffle": lambda d, n: d.shuffle(n, seed=n),
    "shuffle, unseeded": lambda d, n: d.shuffle(n),
    "shuffle all, once": lambda d, n: d.shuffle(3 * N, seed=n, reshuffle_each_iteration=False),
    "repeat": lambda d, n: d.repeat(n),
    "take": lambda d, n: d.take(4 * n),
    "skip": lambda d, n: d.skip(n),
    "prefetch": lambda d, n: d.prefetch(n),
    "shard": lambda d, n: d.shard(n + 1, n // 2),
    "cache": lambda d, n: d.cache(),
    "concatenate": lambda d, n: d.concatenate(tf.data.Dataset.range(n)),
    "zip": lambda d, n: tf.data.Dataset.zip((d, tf.data.Dataset.range(n, 99))).map(
        lambda a, b: a * 100 + b
    ),
    "filter": lambda d, n: d.filter(lambda x: x % 5 != n),
    "batched": lambda d, n: d.batch(n).unbatch(),
    "padded": lambda d, n: d.padded_batch(n).map(lambda x: x[0] + tf.size(x, tf.int64)),
}
STEP = st.tuples(st.sampled_from(sorted(STEPS)), st.integers(1, 6))


def _passes(dataset: tf.data.Dataset, position: int, seeks: bool) -> list[Any]:
    """Three passes, the second of them from `position` on: it seeks, or elements are dropped."""
    whole, reshuffles = data.ordered(Pipeline.of(dataset), data.SharedOrder(seed=9))
    found: list[Any] = []
    seen = [0] * len(reshuffles)
    for start in (0, position, 0):
        reshuffles.starts = []
        rest = seek(whole, start, reshuffles) if seeks else whole.dataset
        if reshuffles:
            reshuffles.begin(seen)
        found.append([int(x) for x in rest][0 if seeks else start :])
        if reshuffles:
            reshuffles.note(ended=True)
            seen = reshuffles.passes
        found.append(list(seen))
    return found


@given(st.sampled_from(sorted(SOURCES)), st.lists(STEP, max_size=5), st.integers(1, 70))
@settings(max_examples=12, deadline=None, derandomize=True)
def test_a_pipeline_from_an_element_on(
    source: str, steps: list[tuple[str, int]], position: int
) -> None:
    def pipeline() -> tf.data.Dataset:
        with datasets.substituted_global_seed(3):  # the same seeds of shuffles without one
            dataset = SOURCES[source]()
            for name, number in steps:
                dataset = STEPS[name](dataset, number)
            return dataset

    position %= sum(1 for _ in pipeline()) or 1  # a backup has none beyond the end
    assert _passes(pipeline(), position, True) == _passes(pipeline(), position, False)


@pytest.mark.parametrize("name", every(3, ["map", "repeat", "take", "prefetch", "shuffle", "none"]))
def test_orders_continue_in_later_passes(name: str) -> None:
    def pipeline() -> tf.data.Dataset:
        with datasets.substituted_global_seed(3):
            shuffled = STEPS.get(name, lambda d, _: d)(_table().shuffle(7), 5)
        return shuffled.repeat(3).batch(2).map(lambda x: x[-1])

    for position in (3, 15, 25):
        assert _passes(pipeline(), position, True) == _passes(pipeline(), position, False)


FILES = 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of different lengths, one of them empty: of each kind the same records."""
    folder = tmp_path_factory.mktemp("records")
    for file, count in enumerate((7, 0, 3, 12, 5)):
        values = [str(100 * file + i) for i in range(count)]
        (folder / f"{file}.txt").write_text("".join(f"{value}\n" for value in values))
        with tf.io.TFRecordWriter(str(folder / f"{file}.tfrecord")) as writer:
            for value in values:
                writer.write(value.encode())
    return folder


def _numbered(name: Any) -> tf.data.Dataset:
    return tf.data.TFRecordDataset(name).map(tf.strings.to_number)


READERS: dict[str, Callable[[tf.data.Dataset], tf.data.Dataset]] = {
    "records": tf.data.TFRecordDataset,
    "records in parallel": lambda d: tf.data.TFRecordDataset(d, num_parallel_reads=3),
    "records, tuned": lambda d: tf.data.TFRecordDataset(d, num_parallel_reads=tf.data.AUTOTUNE),
    "interleaved": lambda d: d.interleave(tf.data.TFRecordDataset, 2, 3),
    "interleaved in parallel": lambda d: d.interleave(
        _numbered, 3, num_parallel_calls=2, deterministic=False
    ),
    "interleaved, tuned": lambda d: d.interleave(_numbered, num_parallel_calls=tf.data.AUTOTUNE),
    "interleaved by default": lambda d: d.interleave(lambda f: _numbered([f, f])),
    "flat": lambda d: d.flat_map(lambda f: tf.data.TFRecordDataset(f).skip(1).prefetch(2)),
}
LINES: dict[str, Callable[[tf.data.Dataset], tf.data.Dataset]] = {
    "lines": tf.data.TextLineDataset,
    "lines without the first": lambda d: d.interleave(
        lambda f: tf.data.TextLineDataset(f).skip(1), 2
    ),
}
ABOVE: dict[str, Callable[[tf.data.Dataset], tf.data.Dataset]] = {
    "nothing": lambda d: d,
    "shuffle": lambda d: d.shuffle(6, seed=2),
    "shuffle all, repeat": lambda d: d.shuffle(99).repeat(2),
    "repeat": lambda d: d.repeat(3),
    "take, skip": lambda d: d.skip(2).take(20),
    "concatenate": lambda d: d.take(9).shuffle(4).concatenate(d),
}


OF_FILES = [
    pytest.param(
        *(reader, shuffled, above),
        id=f"{reader}, {'shuffled files, ' * shuffled}{above}",
        marks=[pytest.mark.nightly]
        * (above != "shuffle all, repeat" or not shuffled or number % 4 > 0),
    )
    for number, reader in enumerate((*READERS, *LINES))
    for shuffled in (False, True)
    for above in ABOVE
]


@pytest.mark.parametrize(("reader", "shuffled", "above"), OF_FILES)
def test_files_from_a_record_on(
    reader: str, shuffled: bool, above: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    suffix = "txt" if reader in LINES else "tfrecord"

    def pipeline() -> tf.data.Dataset:
        with datasets.substituted_global_seed(3):
            names = tf.data.Dataset.list_files(str(folder / f"*.{suffix}"), shuffled)
            elements = ABOVE[above]({**READERS, **LINES}[reader](names))
        number = (
            (lambda x: x) if elements.element_spec.dtype == tf.float32 else tf.strings.to_number
        )
        return elements.map(number).batch(2).map(lambda x: x[-1])

    skipped: list[Pipeline] = []
    skip = seek_module._skipped

    def noted(node: Pipeline, position: int) -> tf.data.Dataset:
        skipped.append(node)
        return skip(node, position)

    monkeypatch.setattr(seek_module, "_skipped", noted)
    length = sum(1 for _ in pipeline())
    for position in (1, length // 2, length - 1):
        found = _passes(pipeline(), position, True)
        assert found == _passes(pipeline(), position, False)
    # A shuffle in the first part of a concatenation begins a pass: it is read.
    assert not skipped or above.startswith("concatenate")


def _reads(dataset: tf.data.Dataset, position: int) -> list[int]:
    """Elements that a counting map under `dataset` has seen once the first one was read."""
    seen: list[int] = []

    def note(i: Any) -> Any:
        seen.append(int(i))
        return i

    noted = dataset.map(lambda i: tf.ensure_shape(tf.py_function(note, [i], tf.int64), []))
    next(iter(seek(Pipeline.of(noted.batch(2).map(lambda b: b)), position)))
    return seen


READ_AGAIN: dict[str, Callable[[], tf.data.Dataset]] = {
    "filter": lambda: tf.data.Dataset.range(40).filter(lambda i: i % 2 == 0),
    "interleave": lambda: tf.data.Dataset.range(9).interleave(tf.data.Dataset.range, 3),
    "shuffles": lambda: SOURCES["no index"]().repeat(3).shuffle(5, seed=2).shuffle(3, seed=1),
    "generator": SOURCES["generator"],
    "shuffle below": lambda: SOURCES["slices"]().shuffle(9, seed=1).filter(lambda i: i >= 0),
}


@pytest.mark.parametrize("name", READ_AGAIN)
def test_the_log_says_how_many_elements_are_read_again(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = _passes(READ_AGAIN[name](), 17, True)
    caplog.set_level("INFO", logger="tfmw")
    monkeypatch.setattr(seek_module, "_MANY", 9)
    assert _passes(READ_AGAIN[name](), 17, True) == expected
    (line,) = [record.getMessage() for record in caplog.records]
    assert re.fullmatch(r"the position in the data is 17 elements .* and dropped", line)


def test_two_passes_over_one_shuffle_are_those_of_an_uninterrupted_run() -> None:
    shuffled = tf.data.Dataset.range(20).shuffle(4, seed=5)
    zipped = tf.data.Dataset.zip((shuffled, shuffled))
    reshuffles = reshuffles_of(Pipeline.of(zipped))
    whole = [(int(a), int(b)) for a, b in zipped]
    rest = seek(Pipeline.of(zipped), 3, reshuffles)
    reshuffles.begin([0] * len(reshuffles))
    assert [(int(a), int(b)) for a, b in rest] == whole[3:]


def test_the_place_of_a_shuffle_is_read_without_its_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """An iterator's state has a part for each element of the buffer: seconds for 10,000."""
    buffers = []

    class Seeds(ShuffleSeeds):
        def __init__(self, dataset: tf.data.Dataset) -> None:
            buffers.append(Pipeline.of(dataset).buffer_size)
            super().__init__(dataset)

    monkeypatch.setattr(reshuffles_module, "ShuffleSeeds", Seeds)
    shuffled = tf.data.Dataset.range(30_000).shuffle(10_000, seed=1).repeat()
    whole, reshuffles = data.ordered(Pipeline.of(shuffled), data.SharedOrder(seed=9))
    assert int(next(iter(seek(whole, 20_000, reshuffles)))) < 30_000
    assert buffers == [1]


@pytest.mark.parametrize("size", [10**3, 10**6, 10**9])
def test_no_element_before_the_position_is_read(size: int) -> None:
    shuffled = datasets.shuffled(tf.data.Dataset.range(size), 10, [1, 2], True)
    for dataset in (tf.data.Dataset.range(size), shuffled, shuffled.repeat()):
        assert len(_reads(dataset, size // 4)) < 50  # the two of a batch, and some read ahead


@pytest.mark.parametrize(
    ("length", "buffer_size"), [(1000, 7), (1000, 999), (1000, 2000), (40, 1), (200_000, 30)]
)
def test_orders_are_those_of_tensorflow(length: int, buffer_size: int) -> None:
    assert has_known_order()
    shuffle = datasets.shuffled(tf.data.Dataset.range(length), buffer_size, [5, 2**33], True)
    for number in range(2):
        theirs = next(shuffle.batch(length).as_numpy_iterator())
        for start in (0, 1, length // 2, length - 1):
            order = ShuffleOrder(buffer_size, length, pair_of_pass([5, 2**33], number))
            ours = np.concatenate(list(order.blocks(start)))
            np.testing.assert_array_equal(ours, theirs[start:])
