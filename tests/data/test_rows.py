"""Sources with an index: the rows of each worker, the order, and the first row of a resumed run."""

from __future__ import annotations

import gzip
import io
import os
import select
import signal
import subprocess
import sys
import tarfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import datasets as hugging_face
import grain
import numpy as np
import pyarrow.parquet
import pytest
import tensorflow as tf

from tests.helpers.cases import every
from tests.helpers.open_files import opened_below
from tfmw import data
from tfmw.cluster.group import Group
from tfmw.data import record_files, record_index
from tfmw.data.grain_datasets import by_index
from tfmw.errors import UsageError
from tfmw.train.epoch_iterator import EpochIterator

N, B = 50, 8


class Counting:
    """Row i is ([i, -i], i); it notes which rows are read."""

    def __init__(self, length: int = N) -> None:
        self.read: list[int] = []
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        self.read.append(int(index))
        return np.array([index, -index], np.float32), index


class Doubled(grain.transforms.Map):
    def map(self, element: Any) -> Any:
        return 2 * element[0], element[1]


class Noise(grain.transforms.RandomMap):
    def random_map(self, element: Any, rng: np.random.Generator) -> Any:
        return element[0] + rng.normal(size=2).astype(np.float32), element[1]


def _loader(source: Any, workers: int = 0) -> Any:
    return grain.DataLoader(
        data_source=source,
        sampler=grain.samplers.IndexSampler(len(source), shuffle=True, seed=2, num_epochs=1),
        operations=[Doubled(), Noise(), grain.transforms.Batch(batch_size=B)],
        worker_count=workers,
    )


def _shuffled(source: Any) -> Any:
    return grain.MapDataset.source(source).shuffle(seed=3)


GRAIN: dict[str, Callable[[Any], Any]] = {
    "MapDataset": lambda s: _shuffled(s).map(Doubled()).batch(B),
    "remainder dropped": lambda s: _shuffled(s).batch(B, drop_remainder=True),
    "repeated": lambda s: _shuffled(s).repeat(2).batch(B),
    "IterDataset": lambda s: _shuffled(s).to_iter_dataset().batch(B),
    "DataLoader": _loader,
}
WHOLE: dict[str, Callable[[Any], Any]] = {
    "batches mapped": lambda s: _shuffled(s).batch(B).map(lambda b: b).repeat(2),
    "batch_fn": lambda s: _shuffled(s).batch(
        B, batch_fn=lambda rows: (np.stack([r[0] for r in rows]), np.array([r[1] for r in rows]))
    ),
    "iterator of batches": lambda s: _shuffled(s).batch(B).to_iter_dataset(),
}
STATES: dict[str, Callable[[Any], Any]] = {
    "filtered": lambda s: (
        _shuffled(s).filter(lambda row: row[1] % 3 > 0).to_iter_dataset().batch(B)
    ),
    "mapped iterator": lambda s: _shuffled(s).to_iter_dataset().map(Doubled()).batch(B),
    "shuffled iterator": lambda s: grain.experimental.WindowShuffleIterDataset(
        _shuffled(s).to_iter_dataset(), window_size=9, seed=4
    ).batch(B),
}
ALL = {**GRAIN, **WHOLE, **STATES}


def _keras_batches(dataset: Any) -> list[list[np.ndarray]]:
    return [[np.asarray(t) for t in batch] for batch in dataset]


def _shard(source: data.Source, workers: int, rank: int, start: int = 0, state: Any = None) -> Any:
    sharding, order = data.Sharding(workers, rank), data.SharedOrder(seed=9)
    if start and source.is_read_once:
        shard = source.shard(sharding, order)
        shard.hooks.restore(state)
        assert shard.rest is not None
        return shard.batches(start)
    return source.shard(sharding, order, start).dataset


def _union(make: Callable[[], Any], workers: int, start: int = 0, state: Any = None) -> Any:
    """The global batches, from the shards of all workers."""
    shards = [
        [
            data.step_of(element, data.Sharding(workers, rank))
            for element in _shard(data.Source(make()), workers, rank, start, state)
        ]
        for rank in range(workers)
    ]
    found = []
    for steps in zip(*shards, strict=True):
        total = int(steps[0][2])
        batch = []
        for leaf in range(2):
            whole = np.zeros([total, *steps[0][0][0][leaf].shape[1:]])
            for rank, (parts, counts, _) in enumerate(steps):
                whole[rank::workers] = parts[0][leaf][: int(counts[0])]
            batch.append(whole)
        found.append(batch)
    return found


def _assert_equal(found: Any, expected: Any) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        for a, b in zip(one, other, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("name", every(4, ALL))
def test_workers_read_the_batches_of_grain_in_its_order(name: str, workers: int) -> None:
    expected = _keras_batches(ALL[name](Counting()))
    _assert_equal(_union(lambda: ALL[name](Counting()), workers), expected)


@pytest.mark.parametrize("name", every(3, ALL))
def test_a_resumed_run_continues_on_other_workers(name: str) -> None:
    expected = _keras_batches(ALL[name](Counting()))
    source = data.Source(ALL[name](Counting()))
    shard = source.shard(data.Sharding(2, 0), data.SharedOrder(seed=9))
    for _ in zip(range(3), shard.dataset, strict=False):
        pass
    _assert_equal(_union(lambda: ALL[name](Counting()), 3, 3, shard.hooks.state(3)), expected[3:])


@pytest.mark.parametrize("name", GRAIN)
def test_each_worker_reads_its_rows_only(name: str) -> None:
    seen = []
    for rank in range(2):
        source = Counting()
        dataset = _shard(data.Source(GRAIN[name](source)), 2, rank)
        source.read.clear()
        assert list(dataset)
        seen.append(list(source.read))
    passes = 2 if name == "repeated" else 1
    read = 48 if name == "remainder dropped" else N * passes
    assert [len(rows) for rows in seen] == [read // 2, read // 2]
    if passes == 1:
        assert not set(seen[0]) & set(seen[1])


@pytest.mark.parametrize("name", every(2, [*GRAIN, *WHOLE, *STATES]))
def test_a_resumed_run_reads_no_row_before_its_position(name: str) -> None:
    length = 200
    first = data.Source(ALL[name](Counting(length)))
    shard = first.shard(data.Sharding(), data.SharedOrder())
    state = [shard.hooks.state(10) for _ in zip(range(11), shard.dataset, strict=False)][-1]
    source = Counting(length)
    again = data.Source(ALL[name](source))
    shard = again.shard(data.Sharding(), data.SharedOrder(), 0 if again.is_read_once else 10)
    shard.hooks.restore(state)
    source.read.clear()
    rest = shard.dataset if shard.rest is None else shard.batches(10)
    assert list(rest)
    passes = 2 if "repeat" in name or name == "batches mapped" else 1
    window = 9 * (name == "shuffled iterator")
    assert len(source.read) <= passes * length - 10 * B + window + B


def test_an_endless_dataset_of_grain_is_infinite() -> None:
    shard = data.Source(_shuffled(Counting()).repeat().batch(B)).shard(
        data.Sharding(2, 1), data.SharedOrder()
    )
    assert shard.steps == data.INFINITE
    assert len(list(shard.dataset.take(9))) == 9


PIPELINES: dict[str, Callable[[tf.data.Dataset], tf.data.Dataset]] = {
    "batch": lambda d: d.batch(B),
    "map": lambda d: d.map(lambda x, y: (x + 1, y)).batch(B),
    "shuffle": lambda d: d.shuffle(20, seed=1).batch(B, drop_remainder=True),
    "shuffle, repeat, map": lambda d: (
        d.shuffle(N, seed=1).repeat(2).map(lambda x, y: (x * 2, y)).batch(B)
    ),
    "batches mapped": lambda d: d.batch(B).map(lambda x, y: (x, y)),
}


@pytest.mark.parametrize("name", every(2, PIPELINES))
def test_rows_are_those_of_slices(name: str) -> None:
    rows = [Counting()[i] for i in range(N)]
    arrays = tuple(np.stack([row[k] for row in rows]) for k in range(2))
    slices = PIPELINES[name](tf.data.Dataset.from_tensor_slices(arrays))
    for workers, start in ((1, 0), (3, 4)):
        _assert_equal(
            _union(lambda: PIPELINES[name](data.from_index(Counting())), workers, start),
            _union(lambda: slices, 1, start),
        )


def _hugging_face(path: Any = None) -> Any:
    numbers = range(N)
    columns = {"x": [[i, -i] for i in numbers], "y": [*numbers], "t": [f"é{i}" for i in numbers]}
    columns["b"] = [bytes([i, 0]) for i in numbers]
    dataset = hugging_face.Dataset.from_dict(columns)
    if path is None:
        return dataset
    dataset.save_to_disk(path)
    return hugging_face.load_from_disk(path)


def test_rows_of_hugging_face(tmp_path: Any) -> None:
    dataset = data.from_index(_hugging_face(str(tmp_path)).shuffle(seed=3))
    expected = [(r["x"], r["y"]) for r in _hugging_face().shuffle(seed=3)]
    for workers in (1, 2):
        found = _union(lambda: dataset.map(lambda r: (r["x"], r["y"])).batch(B), workers, 2)
        for k in range(2):
            whole = np.concatenate([batch[k] for batch in found])
            np.testing.assert_array_equal(whole, [pair[k] for pair in expected[2 * B :]])
    first = next(iter(dataset.batch(3)))
    assert first["t"][0].numpy().decode() == f"é{expected[0][1]}"
    assert first["b"][0].numpy() == bytes([expected[0][1], 0])


def test_rows_of_parquet_files(tmp_path: Any) -> None:
    x = [[i, -i] for i in range(N)]
    for name, rows in (("a", slice(20)), ("b", slice(20, N))):
        texts, binary = (["é"] * len(x[rows]), [b"\1\0"] * len(x[rows]))
        columns = {"x": x[rows], "y": [*range(N)][rows], "text": texts, "binary": binary}
        table = pyarrow.table(columns)
        pyarrow.parquet.write_table(table, tmp_path / f"{name}.parquet", row_group_size=7)
    rows = data.from_parquet(tmp_path / "*.parquet", columns=["x", "y"])
    for workers in (1, 2):
        found = _union(
            lambda: rows.map(lambda r: (r["x"], r["y"])).shuffle(9, seed=2).batch(B), workers, 2
        )
        arrays = tf.data.Dataset.from_tensor_slices((x, range(N))).shuffle(9, seed=2).batch(B)
        _assert_equal(found, _union(lambda: arrays, 1, 2))  # noqa: B023
    two = next(iter(data.from_parquet([tmp_path / "b.parquet"]).batch(2)))
    assert two["text"][1].numpy().decode() == "é"
    assert two["binary"][1].numpy() == b"\1\0"
    with pytest.raises(UsageError, match=r"no file .*: expected a path, a pattern"):
        data.from_parquet(tmp_path / "none*")


@pytest.mark.parametrize("size", [1, 2])
def test_a_resumed_run_decodes_row_groups_after_its_position_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """A worker decodes the row groups, here of one row or two, that have rows of its own."""
    path = tmp_path / "rows.parquet"
    table = pyarrow.table({"x": np.arange(16 * size)})
    pyarrow.parquet.write_table(table, path, row_group_size=size)
    decoded: list[int] = []
    read = pyarrow.parquet.ParquetFile.read_row_group

    def counted(file: Any, number: int, **options: Any) -> Any:
        decoded.append(number)
        return read(file, number, **options)

    monkeypatch.setattr(pyarrow.parquet.ParquetFile, "read_row_group", counted)
    for rank in range(2):
        decoded.clear()
        rows = data.from_parquet(path).map(lambda row: row["x"]).batch(2 * size)
        assert decoded == [0, 8, 15]  # for the shapes of rows
        dataset = _shard(data.Source(rows), 2, rank, 5)
        own = [int(x) for parts, counts, _ in dataset for x in parts[0][: int(counts[0])]]
        assert own == [*range(10 * size + rank, 16 * size, 2)]
        assert decoded[3:] == sorted({row // size for row in own} - {15})


# Some are empty, and some end in zeros.
TEXTS = [f"record {i} é".encode() * (i % 4) + bytes(i % 3) for i in range(N)]


def _record_files(folder: Path, kind: str) -> list[str]:
    paths = []
    for name, rows in (("a", slice(20)), ("none", slice(0)), ("[b] é", slice(20, N))):
        paths.append(str(folder / name))
        if kind == "tfrecord":
            with tf.io.TFRecordWriter(paths[-1]) as writer:
                for text in TEXTS[rows]:
                    writer.write(text)
        else:
            breaks = b"\r\n" if name == "a" else b"\n"
            last = breaks if name == "a" else b""  # a file may end without one
            Path(paths[-1]).write_bytes(breaks.join(TEXTS[rows]) + last if TEXTS[rows] else b"")
    return paths


@pytest.mark.parametrize("kind", ["tfrecord", "text"])
def test_records_are_those_of_tensorflow(kind: str, tmp_path: Path) -> None:
    paths = _record_files(tmp_path, kind)
    reader = tf.data.TFRecordDataset if kind == "tfrecord" else tf.data.TextLineDataset
    expected = list(reader(paths).as_numpy_iterator())
    assert len(expected) == N
    for index_dir in (None, tmp_path / "index", tmp_path / "index"):
        records = data.from_records(paths, kind=kind, index_dir=index_dir)
        assert list(records.as_numpy_iterator()) == expected
    assert len(list((tmp_path / "index").iterdir())) == 3
    shuffled = lambda: records.map(lambda t: (t, tf.strings.length(t))).shuffle(9, seed=2).batch(B)  # noqa: E731
    found: list[list[Any]] = [[], []]
    for rank in range(2):
        for (part,), counts, _ in _shard(data.Source(shuffled()), 2, rank, 2):
            found[rank] += part[0].numpy()[: int(counts[0])].tolist()
    alike = tf.data.Dataset.from_tensor_slices(expected).shuffle(9, seed=2)
    rest = list(alike.as_numpy_iterator())[2 * B :]
    assert [found[0], found[1]] == [rest[::2], rest[1::2]]


@pytest.mark.parametrize("kind", ["tfrecord", "text"])
def test_a_resumed_run_opens_the_files_and_records_after_its_position(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = _record_files(tmp_path, kind)
    data.from_records(paths, kind=kind, index_dir=tmp_path / "index")
    with monkeypatch.context() as patch:
        patch.setattr(record_index, "_index", None)  # made once
        records = data.from_records(paths, kind=kind, index_dir=tmp_path / "index")
    reads: list[str] = []
    pread = os.pread

    def counted(descriptor: int, size: int, begin: int) -> bytes:
        reads.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        return pread(descriptor, size, begin)

    monkeypatch.setattr(os, "pread", counted)
    for rank in range(2):
        dataset = _shard(data.Source(records.batch(B)), 2, rank, 3)
        reads.clear()
        assert list(dataset)
        assert reads == [os.path.realpath(paths[-1])] * ((N - 3 * B) // 2)


def test_an_interrupted_run_finds_the_indices_of_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths, index_dir = _record_files(tmp_path, "tfrecord"), str(tmp_path / "index")
    monkeypatch.setattr(record_index, "_LARGE", 0)
    files = tf.data.Dataset.from_tensor_slices(paths)
    records = files.interleave(tf.data.TFRecordDataset, 2).batch(B)
    whole = list(records.as_numpy_iterator())

    (process,) = data.index_in_background(records, index_dir)
    assert process.wait() == 0
    monkeypatch.setattr(record_index, "_index", None)  # made once
    reads: list[int] = []
    pread = os.pread

    def noted(descriptor: int, size: int, begin: int) -> bytes:
        reads.append(begin)
        return pread(descriptor, size, begin)

    monkeypatch.setattr(os, "pread", noted)
    rest = (
        data.Source(records)
        .shard(data.Sharding(), data.SharedOrder(index_dir=index_dir), 3)
        .dataset
    )
    assert [part.numpy().tolist() for ((part,),) in rest] == [batch.tolist() for batch in whole[3:]]
    assert len(reads) == N - 3 * B


def test_a_changed_file_gets_a_new_index(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    for text in ("one\ntwo", "three"):
        path.write_text(text)
        records = data.from_records(path, kind="text", index_dir=tmp_path / "index")
        assert [t.decode() for t in records.as_numpy_iterator()] == text.split("\n")


def test_files_without_complete_records_are_refused(tmp_path: Path) -> None:
    (path, *_) = _record_files(tmp_path, "tfrecord")
    whole = Path(path).read_bytes()
    for content in (whole[:-3], gzip.compress(whole), b"12345"):
        Path(path).write_bytes(content)
        with pytest.raises(UsageError, match="no complete TFRecord file"):
            data.from_records(path)
    with pytest.raises(UsageError, match="expected a file on this machine"):
        data.from_records(tmp_path / "missing")
    with pytest.raises(UsageError, match='"tfrecord" or "text"'):
        data.from_records(path, kind="csv")


def _tar(path: Path, members: dict[str, bytes], mode: Any = "w") -> str:
    with tarfile.open(path, mode) as tar:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return str(path)


def _tars(folder: Path) -> list[str]:
    """Samples of three members, of which names differ in their folders, and what is no sample."""
    paths = []
    for part, rows in enumerate((range(20), range(20, N))):
        members = {"train/": b"", "README": b"none", ".hidden": b"none"}
        for i in rows:
            name = f"{'long' * 40 if i == 3 else 'train'}/é {i:03}"
            members[f"{name}.IMG.png"] = bytes([i, 0]) * (i + 1)
            members[f"{name}.cls"] = str(i).encode()
            members[f"{name}.json"] = b"{}"
        paths.append(_tar(folder / f"[{part}] é.tar", members))
    return paths


def test_samples_of_tars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = _tars(tmp_path)
    for _ in range(2):
        samples = data.from_tars(paths, ["cls", ".img.png"], index_dir=tmp_path / "index")
        monkeypatch.setattr(record_index, "_index", None)  # made once
    expected = [{"cls": str(i).encode(), "img.png": bytes([i, 0]) * (i + 1)} for i in range(N)]
    assert list(samples.as_numpy_iterator()) == expected
    reads: list[str] = []
    pread = os.pread

    def counted(descriptor: int, size: int, begin: int) -> bytes:
        reads.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        return pread(descriptor, size, begin)

    monkeypatch.setattr(os, "pread", counted)
    numbers: list[list[int]] = []
    for rank in range(2):
        batches = samples.map(lambda s: (tf.strings.to_number(s["cls"]), s["cls"])).batch(B)
        dataset = _shard(data.Source(batches), 2, rank, 3)
        reads.clear()
        steps = [(parts[0][0], int(counts[0])) for parts, counts, _ in dataset]
        numbers.append([int(i) for part, count in steps for i in part[:count]])
        assert reads == [os.path.realpath(paths[-1])] * len(numbers[rank]) * 2
    assert numbers == [[*range(3 * B, N, 2)], [*range(3 * B + 1, N, 2)]]


def test_tars_without_samples_are_refused(tmp_path: Path) -> None:
    whole = {"a.jpg": b"1", "a.cls": b"2", "b.jpg": b"3"}
    with pytest.raises(UsageError, match=r"the sample b of .* has the members \['jpg'\]"):
        data.from_tars(_tar(tmp_path / "one", whole), ["jpg", "cls"])
    with pytest.raises(UsageError, match="no tar file without compression"):
        data.from_tars(_tar(tmp_path / "two", whole, "w:gz"), ["jpg"])
    with pytest.raises(UsageError, match="has no rows"):
        data.from_tars(_tar(tmp_path / "three", {"none": b""}), ["jpg"])
    for none in ("jpg", ()):
        with pytest.raises(UsageError, match="expected several"):
            data.from_tars(tmp_path / "one", none)


@pytest.mark.parametrize("bad", [5, {}, [], [[np.zeros(2)], np.zeros(3)], [None]])
def test_a_source_without_rows_is_refused(bad: Any) -> None:
    with pytest.raises(UsageError, match=r"expected|different structures"):
        data.from_index(bad)


def test_a_dataset_of_hugging_face_alone_is_refused() -> None:
    with pytest.raises(UsageError, match="from_index"):
        data.Source(_hugging_face())


def test_only_what_has_an_index_is_read_by_it() -> None:
    for name, make in ALL.items():
        assert (by_index(make(Counting())) is None) == (name in STATES), name
    assert by_index(_loader(Counting(), workers=2)) is None


def test_lines_are_found_piece_by_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Line breaks and carriage returns are at the ends of chunks, and beside them."""
    path = tmp_path / "rows.txt"
    for text in (
        b"ab\r\n\n\r\ncdef\r\n\nghi\r",
        b"ab\ncd\n",
        b"\n",
        b"a",
        b"\r\n" * 5,
        b"abcdefghij",
    ):
        path.write_bytes(text)
        expected = list(tf.data.TextLineDataset(str(path)).as_numpy_iterator())
        for size in range(1, len(text) + 2):
            monkeypatch.setattr(record_index, "_PIECE", size)
            index = record_index.index_of(str(path), "text", None)
            assert [text[begin:end] for begin, end in index] == expected, (text, size)


@pytest.mark.parametrize("kept", [True, False])
def test_few_of_many_files_are_open_at_a_time(
    kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_files, "_OPENED", 4)
    paths = []
    for number in range(40):
        paths.append(tmp_path / f"{number:02}.txt")
        paths[-1].write_text(f"{number}\n{number + 40}")
    index_dir = tmp_path / "index" if kept else None
    records = record_files.Records([str(path) for path in paths], "text", index_dir)
    numbers = np.random.default_rng(1).integers(80, size=300)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(records.read, np.split(numbers, 30)))
    expected = [[b"%d" % (n // 2 + 40 * (n % 2)) for n in part] for part in np.split(numbers, 30)]
    assert [part.tolist() for part in found] == expected
    assert 4 <= len(opened_below(tmp_path)) <= 2 * 4 + 1


def test_a_file_without_records_has_an_index_too(tmp_path: Path) -> None:
    (path := tmp_path / "empty.txt").touch()
    for index_dir in (None, tmp_path / "index", tmp_path / "index"):  # made, made and kept, read
        assert record_index.index_of(str(path), "text", index_dir).shape == (0, 2)
    assert record_index.count_of(str(path), "text", str(tmp_path / "index")) == 0


def test_parquet_files_are_open_while_they_are_decoded(tmp_path: Path) -> None:
    for number in range(40):
        table = pyarrow.table({"x": [number, number + 40]})
        pyarrow.parquet.write_table(table, tmp_path / f"{number:02}.parquet")
    rows = data.from_parquet(tmp_path / "*.parquet").map(lambda row: row["x"])
    found = [int(x) for x in rows]
    assert sorted(found) == list(range(80))
    assert len(opened_below(tmp_path)) <= 2


@pytest.fixture
def endless_text(tmp_path: Path) -> str:
    """A text so long that no index of it is ever complete; it takes no space."""
    path = tmp_path / "rows.txt"
    with path.open("wb") as file:
        file.truncate(1 << 42)
    return str(path)


def test_the_process_that_makes_indices_ends_with_the_call(
    endless_text: str, tmp_path: Path
) -> None:
    process = record_index.make_in_background([endless_text], "text", str(tmp_path / "index"))
    assert process is not None
    dataset = tf.data.Dataset.range(4).batch(2)
    epoch = EpochIterator(data.Source(dataset), Group(0, 1), data.Sharding(), None, "steps")
    epoch._indexing = [process]
    epoch.end_indexing()
    assert process.returncode == -signal.SIGKILL


@pytest.mark.nightly
def test_the_process_that_makes_indices_ends_with_the_training(
    endless_text: str, tmp_path: Path
) -> None:
    program = (
        "import sys; from tfmw.data import record_index; "
        "print(record_index.make_in_background([sys.argv[1]], 'text', sys.argv[2]).pid, flush=True)"
        "; input()"
    )
    command = [sys.executable, "-c", program, endless_text, str(tmp_path / "index")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as training:
        assert training.stdout is not None
        helper = os.pidfd_open(int(training.stdout.readline()))
        training.kill()
    select.select([helper], [], [])  # until it has ended
    os.close(helper)
