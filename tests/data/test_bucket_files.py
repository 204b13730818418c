"""Files of records in a bucket: the records that local files have, and no bytes of others."""

from __future__ import annotations

import gc
import io
import random
import re
import tarfile
import threading
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

import tfmw
from tests.helpers.buckets import NIGHTLY, opened, put
from tests.helpers.cluster import run_command
from tfmw.cluster import membership
from tfmw.cluster.cluster import Cluster
from tfmw.data import bucket_files, record_index
from tfmw.data.bucket_files import BucketFile, cache_of, expanded
from tfmw.data.record_files import Records
from tfmw.data.sharding import shard_dataset
from tfmw.data.values import Sharding, SharedOrder
from tfmw.errors import UsageError
from tfmw.storage.bucket import Bucket

LARGE = 4000  # bytes of a record: more than the gap that is read to save a request


@pytest.fixture(scope="module", params=["s3", *NIGHTLY])
def server(request):
    with pytest.MonkeyPatch.context() as patch, opened(request.param, patch) as found:
        yield found


@pytest.fixture
def url(server, request):
    server.fault = lambda number, method, key: None
    for cached in (bucket_files._bucket, bucket_files._listed, record_index._known):
        cached.cache_clear()
    server.sent.clear()
    name = re.sub(r"\W", "-", request.node.name)
    return f"{server.url}/{name}"


def records_in(url: str, tmp_path, counts, size: int) -> list[bytes]:
    """Writes TFRecord files train-<n>.tfrecord of random records; returns these."""
    drawn = np.random.default_rng(0)
    found = []
    for number, count in enumerate(counts):
        path = str(tmp_path / f"train-{number}.tfrecord")
        with tf.io.TFRecordWriter(path) as file:
            for _ in range(count):
                found.append(drawn.bytes(size + int(drawn.integers(10))))
                file.write(found[-1])
        Bucket(url).upload(path, f"train-{number}.tfrecord")
    return found


def random_bytes(size: int, seed: str = "") -> bytes:
    return random.Random(seed).randbytes(size)


def test_names_are_expanded_in_order(url):
    for name in ("b-2", "b-10", "c", "b-1/x", "b-[1]"):
        put(Bucket(url), name, b"")
    assert expanded(f"{url}/b-*") == [f"{url}/{name}" for name in ("b-10", "b-2", "b-[1]")]
    assert expanded(f"{url}/c") == [f"{url}/c"]
    assert expanded("/local/*") == []
    assert expanded("/local/a") == ["/local/a"]


@pytest.mark.parametrize("index", ["local", "bucket", None])
def test_records_are_those_of_local_files(url, tmp_path, server, index):
    expected = records_in(url, tmp_path, [7, 0, 5], 100)
    index_dir = {"local": tmp_path / "index", "bucket": f"{url}/index", None: None}[index]
    for _ in range(2):
        data = tfmw.data.from_records(f"{url}/train-*.tfrecord", index_dir=index_dir)
        assert list(data.as_numpy_iterator()) == expected
        bucket_files._listed.cache_clear()
    made = [r for r in server.requests if r.startswith("PUT") and f"-{index}-/index/" in r]
    assert len(made) == (3 if index == "bucket" else 0)  # once


def test_each_worker_fetches_its_own_records_only(url, tmp_path, server):
    expected = records_in(url, tmp_path, [10, 10], LARGE)
    data = Records(expanded(f"{url}/train-*.tfrecord"), "tfrecord", tmp_path / "index")
    server.sent.clear()
    mine = list(range(1, 20, 2))
    for batch in np.split(np.array(mine), 5):
        assert list(data.read(batch)) == [expected[number] for number in batch]
    part = sum(len(expected[number]) for number in mine)
    assert part <= sum(server.sent.values()) <= 1.05 * part


def test_a_changed_object_is_refused_by_name(url, tmp_path):
    records_in(url, tmp_path, [3], LARGE)
    name = f"{url}/train-0.tfrecord"
    data = Records([name], "tfrecord", tmp_path / "index")
    assert len(data.read([0])[0]) >= LARGE
    put(Bucket(url), "train-0.tfrecord", bytes(3 * LARGE + 100))
    with pytest.raises(UsageError, match=rf"{name} has changed since this run began"):
        data.read([1])
    with pytest.raises(UsageError, match=rf"cannot read {name}-; expected an object"):
        tfmw.data.from_records(f"{name}-")


@pytest.mark.parametrize(("kind", "expected"), [("tfrecord", "no complete"), ("tar/a", "no tar")])
def test_an_object_of_another_format_is_named(url, kind, expected):
    put(Bucket(url), "a", b"x" * 100)
    with pytest.raises(UsageError, match=rf"^{url}/a is {expected}"):
        record_index.index_of(f"{url}/a", kind, None)


def test_an_object_that_has_changed_since_its_index_was_made_is_refused(url, tmp_path):
    """A run that resumes would continue in other records."""
    records_in(url, tmp_path, [3], 10)
    name = f"{url}/train-0.tfrecord"
    for index_dir in (tmp_path / "index", f"{url}/index"):
        assert len(record_index.index_of(name, "tfrecord", index_dir)) == 3
    records_in(url, tmp_path, [4], 10)
    for cached in (bucket_files._listed, record_index._known):  # as in another process
        cached.cache_clear()
    for index_dir in (tmp_path / "index", f"{url}/index"):
        changed = rf"{name} has changed since its index in {index_dir} was made: a run that"
        with pytest.raises(UsageError, match=changed):
            record_index.index_of(name, "tfrecord", index_dir)
    assert len(record_index.index_of(name, "tfrecord", None)) == 4


def test_only_the_indices_of_files_that_are_read_are_fetched(url, tmp_path, server):
    """A run that resumes in a large data set begins in one file."""
    expected = records_in(url, tmp_path, [3, 0, 2000], 10)
    names = expanded(f"{url}/train-*.tfrecord")
    Records(names, "tfrecord", f"{url}/index")
    record_index._known.cache_clear()  # as in another process
    server.sent.clear()
    data = Records(names, "tfrecord", f"{url}/index")
    assert data.counts == [3, 0, 2000]
    assert not [key for key in server.sent if "/index/" in key]
    assert data.read([1])[0] == expected[1]
    ((read, size),) = [(key, size) for key, size in server.sent.items() if "/index/" in key]
    assert size == len(Bucket(url).read(read.partition("/")[2])[0]) == 3 * 16  # type: ignore[index]


def test_workers_divide_the_making_of_indices(url, tmp_path, server, monkeypatch):
    """Each begins elsewhere, so files that another worker has done are not read again."""
    records_in(url, tmp_path, [2, 2, 2, 2], 10)
    index_of = record_index.index_of
    made: list[tuple[str, str]] = []
    begun = threading.Barrier(2)

    def recorded(path, kind, index_dir):
        if threading.current_thread().name not in {name for name, _ in made}:
            made.append((threading.current_thread().name, path))
            begun.wait(60)
        return index_of(path, kind, index_dir)

    def clusters():
        return Cluster(workers=("a:1", "b:1"), index=int(threading.current_thread().name))

    monkeypatch.setattr(record_index, "index_of", recorded)
    monkeypatch.setattr(membership, "current_cluster", clusters)
    names = expanded(f"{url}/train-*.tfrecord")
    found = {}

    def make():
        data = Records(names, "tfrecord", tmp_path / "index")
        found[threading.current_thread().name] = data.counts

    threads = [threading.Thread(target=make, name=str(index)) for index in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {"0": [2] * 4, "1": [2] * 4}
    assert sorted(made) == [("0", names[0]), ("1", names[2])]


def cached(url: str, folder: Path, limit: int = 1 << 30) -> BucketFile:
    """The file as another process sees it."""
    bucket_files._cache.cache_clear()
    return BucketFile(url, cache_of(str(folder), limit))


def test_workers_of_a_machine_share_a_cache(url, tmp_path, server):
    content = random_bytes(10_000)
    put(Bucket(url), "a", content)
    ranges = [(0, 3000), (4000, 4000), (5000, 9000)]
    expected = [content[begin:end] for begin, end in ranges]
    assert cached(f"{url}/a", tmp_path).read(ranges) == expected
    server.fault = lambda number, method, key: 403
    assert cached(f"{url}/a", tmp_path).read(ranges[::-1]) == expected[::-1]
    with pytest.raises(OSError, match="access is denied"):
        cached(f"{url}/a", tmp_path).read([(0, 3001)])


def test_a_cache_has_nothing_of_another_version_or_object(url, tmp_path, server):
    for name in ("a", "b"):
        put(Bucket(url), name, random_bytes(100, name))
    assert cached(f"{url}/a", tmp_path).read([(0, 100)]) == [random_bytes(100, "a")]
    assert cached(f"{url}/b", tmp_path).read([(0, 100)]) == [random_bytes(100, "b")]
    put(Bucket(url), "a", random_bytes(100, "c"))
    bucket_files._listed.cache_clear()
    assert cached(f"{url}/a", tmp_path).read([(0, 100)]) == [random_bytes(100, "c")]


def test_a_cache_has_a_limit(url, tmp_path, caplog):
    put(Bucket(url), "a", random_bytes(3 << 20))
    file = cached(f"{url}/a", tmp_path, limit=1 << 20)
    for begin in range(0, 3 << 20, 100_000):
        (data,) = file.read([(begin, min(begin + 100_000, 3 << 20))])
        assert data == random_bytes(3 << 20)[begin : begin + 100_000]
    assert (tmp_path / "ranges.sqlite").stat().st_size <= 1 << 20
    assert caplog.text.count("is full; further records are not cached") == 1


@pytest.mark.parametrize("damage", ["no database", "middle", "no directory"])
def test_a_cache_that_cannot_be_used_is_not_needed(url, tmp_path, caplog, damage):
    content = random_bytes(1 << 20)
    put(Bucket(url), "a", content)
    ranges = [(begin, begin + 50_000) for begin in range(0, 1_000_000, 50_000)]
    expected = [content[begin:end] for begin, end in ranges]
    folder = tmp_path / "cache"
    if damage == "no directory":
        folder.write_bytes(b"")
    else:
        assert cached(f"{url}/a", folder).read(ranges) == expected
        bucket_files._cache.cache_clear()
        gc.collect()  # closes the database
        path = folder / "ranges.sqlite"
        whole = path.read_bytes()
        path.write_bytes(b"x" * 99 if damage == "no database" else whole[: len(whole) // 2])
    assert cached(f"{url}/a", folder).read(ranges) == expected
    assert len(caplog.records) == 1


def test_a_reader_that_is_killed_leaves_whole_ranges(url, tmp_path, server):
    """Kills a reader within the transaction that writes one."""
    content = random_bytes(1 << 20)
    put(Bucket(url), "a", content)
    program = f"""
import os
from tfmw.data.bucket_files import BucketFile, cache_of
cache = cache_of({str(tmp_path)!r}, 1 << 30)
file = BucketFile({f"{url}/a"!r}, cache)
file.read([(0, 1000)])
cache._database.create_function("die", 0, lambda: os._exit(9))
cache._database.execute("CREATE TEMP TRIGGER t AFTER INSERT ON ranges BEGIN SELECT die(); END")
file.read([(2000, 900000)])
"""
    assert run_command("python", "-c", program) == (9, "")
    server.sent_to.clear()
    file = cached(f"{url}/a", tmp_path)
    assert file.read([(0, 1000)]) == [content[:1000]]
    assert not server.sent_to
    assert file.read([(2000, 900_000)]) == [content[2000:900_000]]
    assert server.sent_to


def test_requests_of_several_batches_are_made_at_the_same_time(url, tmp_path, server):
    """The order is known, so a batch is requested before those ahead of it have arrived."""
    expected = records_in(url, tmp_path, [8], LARGE)
    data = tfmw.data.from_records(f"{url}/train-*.tfrecord", index_dir=tmp_path / "index")
    both = threading.Barrier(2)

    def fault(number, method, key):
        both.wait(120)
        server.fault = lambda number, method, key: None

    server.fault = fault
    shard = shard_dataset(data.shuffle(8, seed=1).batch(1), Sharding(), SharedOrder())
    assert len(list(shard.dataset)) == len(expected)


def test_the_datasets_of_tensorflow_name_what_reads_such_files():
    data = tf.data.Dataset.from_tensor_slices(["s3://bucket/a"])
    for reader, kind in ((tf.data.TFRecordDataset, "tfrecord"), (tf.data.TextLineDataset, "text")):
        for records in (data.interleave(reader), reader(["s3://bucket/a"]), data.flat_map(reader)):
            expected = rf"does not read s3://bucket/a: .*from_records\(files, kind='{kind}'\)"
            with pytest.raises(UsageError, match=expected):
                shard_dataset(records.batch(2), Sharding(), SharedOrder())


@pytest.mark.parametrize("action", [503, "lost", "truncated"])
def test_ranges_survive_requests_that_fail(url, server, action):
    content = bytes(range(256)) * 1000
    put(Bucket(url), "a", content)
    file = BucketFile(f"{url}/a")
    server.fault = lambda number, method, key: action if number % 2 else None
    ranges = [(200_000, 256_000), (3, 10), (8, 30), (100_000, 100_000), (0, 1)]
    assert file.read(ranges) == [content[begin:end] for begin, end in ranges]


def test_samples_of_tars(url, tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for key in range(3):
            for extension in ("txt", "cls"):
                info = tarfile.TarInfo(f"{key}.{extension}")
                info.size = 5
                tar.addfile(info, io.BytesIO(f"{extension}-{key}".encode()))
    Bucket(url).upload(str(tmp_path / "a.tar"), "a.tar")
    data = tfmw.data.from_tars(f"{url}/a.tar", ["cls", "txt"], index_dir=tmp_path / "index")
    found = [(sample["cls"], sample["txt"]) for sample in data.as_numpy_iterator()]
    assert found == [(f"cls-{key}".encode(), f"txt-{key}".encode()) for key in range(3)]


def test_rows_of_parquet_files(url, tmp_path):
    import pyarrow
    import pyarrow.parquet

    for part in range(2):
        table = pyarrow.table({"x": list(range(5 * part, 5 * part + 5))})
        pyarrow.parquet.write_table(table, tmp_path / "part", row_group_size=2)
        Bucket(url).upload(str(tmp_path / "part"), f"part-{part}.parquet")
    data = tfmw.data.from_parquet(f"{url}/part-*.parquet")
    assert [row["x"] for row in data.as_numpy_iterator()] == list(range(10))


def test_a_shuffle_has_the_order_that_it_has_over_local_files(url, tmp_path):
    expected = records_in(url, tmp_path, [9, 8], 20)
    paths = [str(tmp_path / f"train-{number}.tfrecord") for number in range(2)]
    of = {
        place: tfmw.data.from_records(files, index_dir=tmp_path / "index").shuffle(5, seed=3)
        for place, files in {"local": paths, "bucket": f"{url}/train-*.tfrecord"}.items()
    }
    local, bucket = (list(of[place].as_numpy_iterator()) for place in ("local", "bucket"))
    assert local == bucket
    assert sorted(bucket) == sorted(expected)
