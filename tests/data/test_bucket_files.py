"""Files of records in a bucket: the records that local files have, and no bytes of others."""

from __future__ import annotations

import io
import tarfile

import numpy as np
import pytest
import tensorflow as tf

import tfmw
from tests.helpers.buckets import s3
from tfmw.data import bucket_files, record_index
from tfmw.data.bucket_files import BucketFile, expanded
from tfmw.data.record_files import Records
from tfmw.errors import UsageError
from tfmw.storage.bucket import Bucket

LARGE = 40_000  # bytes of a record: more than the gap that is read to save a request


@pytest.fixture(scope="module")
def server():
    with pytest.MonkeyPatch.context() as patch, s3(patch) as found:
        yield found


@pytest.fixture
def url(server, request):
    server.fault = lambda number, method, key: None
    for cached in (bucket_files._bucket, bucket_files._listed):
        cached.cache_clear()
    server.sent.clear()
    return f"{server.url}/{request.node.name}"


def records_in(url: str, tmp_path, counts, size: int) -> list[bytes]:
    """Writes TFRecord files train-<n>.tfrecord of random records; returns these."""
    random = np.random.default_rng(0)
    found = []
    for number, count in enumerate(counts):
        path = str(tmp_path / f"train-{number}.tfrecord")
        with tf.io.TFRecordWriter(path) as file:
            for _ in range(count):
                found.append(random.bytes(size + int(random.integers(10))))
                file.write(found[-1])
        Bucket(url).upload(path, f"train-{number}.tfrecord")
    return found


def test_names_are_expanded_in_order(url):
    for name in ("b-2", "b-10", "c", "b-1/x", "b-[1]"):
        Bucket(url).put(name, b"")
    assert expanded(f"{url}/b-*") == [f"{url}/{name}" for name in ("b-10", "b-2", "b-[1]")]
    assert expanded(f"{url}/c") == [f"{url}/c"]
    assert expanded("/local/*") == ["/local/*"]


@pytest.mark.parametrize("index", ["local", "bucket", None])
def test_records_are_those_of_local_files(url, tmp_path, server, index):
    expected = records_in(url, tmp_path, [7, 0, 5], 100)
    index_dir = {"local": tmp_path / "index", "bucket": f"{url}/index", None: None}[index]
    for _ in range(2):
        data = tfmw.data.from_records(f"{url}/train-*.tfrecord", index_dir=index_dir)
        assert list(data.as_numpy_iterator()) == expected
        bucket_files._listed.cache_clear()
    made = [r for r in server.requests if r.startswith("PUT") and f"[{index}]/index/" in r]
    assert len(made) == (3 if index == "bucket" else 0)  # once


def test_each_worker_fetches_its_own_records_only(url, tmp_path, server):
    expected = records_in(url, tmp_path, [10, 10], LARGE)
    data = Records(expanded(f"{url}/train-*.tfrecord"), "tfrecord", tmp_path / "index")
    server.sent.clear()
    mine = list(range(1, 20, 2))
    for batch in np.split(np.array(mine), 5):
        assert list(data.columns_at(batch)) == [expected[number] for number in batch]
    part = sum(len(expected[number]) for number in mine)
    assert part <= sum(server.sent.values()) <= 1.05 * part


def test_a_changed_object_is_refused_by_name(url, tmp_path):
    records_in(url, tmp_path, [3], LARGE)
    name = f"{url}/train-0.tfrecord"
    data = Records([name], "tfrecord", tmp_path / "index")
    assert len(data[0]) >= LARGE
    Bucket(url).put("train-0.tfrecord", bytes(3 * LARGE + 100))
    with pytest.raises(UsageError, match=rf"{name} has changed since this run began"):
        data[1]
    with pytest.raises(UsageError, match=rf"cannot read {name}-; expected an object"):
        tfmw.data.from_records(f"{name}-")


def test_the_index_of_a_changed_object_is_made_again(url, tmp_path):
    records_in(url, tmp_path, [3], 10)
    name = f"{url}/train-0.tfrecord"
    before = record_index.index_of(name, "tfrecord", tmp_path / "index")
    records_in(url, tmp_path, [4], 10)
    bucket_files._listed.cache_clear()
    assert len(record_index.index_of(name, "tfrecord", tmp_path / "index")) == len(before) + 1


@pytest.mark.parametrize("action", [503, "lost", "truncated"])
def test_ranges_survive_requests_that_fail(url, server, action):
    content = bytes(range(256)) * 1000
    Bucket(url).put("a", content)
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
