"""Backups that two tasks write, each its part: here both are threads of one process.

Each test writes to a directory, and to a bucket.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.helpers.buckets import put, s3
from tfmw.storage.bucket import Bucket
from tfmw.tables.files import TensorSlice, slice_spec
from tfmw.train.checkpoint.backup_files import files_of
from tfmw.train.checkpoint.store import BackupStore, verify
from tfmw.train.checkpoint.tensor_files import SharedWrite

SLOT: np.ndarray = np.arange(11, dtype="f")
WEIGHTS: np.ndarray = np.arange(6, dtype="f").reshape(2, 3)


class Posts:
    """Values that tasks post, and whether worker 1 is lost."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.gone = False


class Task:
    """A `Group` of two, as one of them sees it."""

    size = 2

    def __init__(self, rank: int, posts: Posts):
        self.rank, self._posts = rank, posts

    def post(self, key: str, value: Any) -> None:
        self._posts.values[key] = value

    def posted(self, key: str, wait_s: float) -> Any:
        if self._posts.gone:
            raise OSError("worker 1 was lost")
        return self._posts.values.get(key)

    def forget(self, key: str) -> None:
        for name in [name for name in self._posts.values if name.startswith(key)]:
            del self._posts.values[name]


def pieces(begin: int, end: int) -> list[TensorSlice]:
    return [("slot", slice_spec([len(SLOT)], begin, end), tf.constant(SLOT[begin:end]))]


class Two:
    """The chief's store, and both tasks' view of the next backup."""

    def __init__(self, path: str):
        self.store = BackupStore(path)
        self.posts = Posts()

    def begin(self) -> tuple[SharedWrite, SharedWrite]:
        begun = self.store.files.begin(2)
        chief, worker = (
            SharedWrite(Task(rank, self.posts), begun, files)  # type: ignore[arg-type]
            for rank, files in enumerate((self.store.files, files_of(self.store.path)))
        )
        chief.pieces, worker.pieces = pieces(0, 4), pieces(4, 11)
        return chief, worker

    def write(self, chief: SharedWrite) -> None:
        self.store.write(2, {"w": WEIGHTS}, {"n": 2}, chief)

    def left(self) -> list[str]:
        """The backups, complete or not."""
        if self.store.path.startswith("s3:"):
            names = Bucket(self.store.path).names("data")
            return sorted({name.split("/")[1].partition("-")[0] for name in names})
        return sorted(p.name for p in Path(self.store.path).iterdir() if p.name != "LOCK")


@pytest.fixture(params=["directory", "bucket"])
def two(
    tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Two]:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    with s3(monkeypatch) as server:
        two = Two(f"{server.url}/run7" if request.param == "bucket" else str(tmp_path / "run7"))
        with two.store.locked():
            two.store.write(1, {"w": WEIGHTS}, {"n": 1})
            yield two
    two.store.files.forget()
    assert not list((tmp_path / "temporary").iterdir())


ONE, BOTH = ["step_000000000001"], ["step_000000000001", "step_000000000002"]


@pytest.mark.parametrize("chief_first", [True, False])
def test_parts_become_one_backup(two: Two, chief_first: bool) -> None:
    chief, worker = two.begin()
    writing = threading.Thread(target=lambda: two.write(chief))
    if chief_first:
        writing.start()
    worker.write_part()
    if not chief_first:
        writing.start()
    writing.join()
    found = two.store.newest()
    assert found is not None
    assert found.record == {"n": 2}
    tensors = found.tensors()
    np.testing.assert_array_equal(tensors["slot"], SLOT)
    np.testing.assert_array_equal(tensors["w"], WEIGHTS)
    assert verify(two.store.path) == []
    assert two.left() == BOTH
    assert sorted(p.name for p in Path(found.path).iterdir()) == [
        "record.json", "tensors.data-00000-of-00002", "tensors.data-00001-of-00002",
        "tensors.index",
    ]  # fmt: skip
    assert two.posts.values == {}


def test_a_worker_without_a_part_writes_no_file(two: Two) -> None:
    chief, worker = two.begin()
    chief.pieces, worker.pieces = pieces(0, 11), []
    worker.write_part()
    two.store.write(2, {"w": WEIGHTS}, {}, chief)
    found = two.store.newest()
    assert found is not None
    np.testing.assert_array_equal(found.tensors()["slot"], SLOT)


def test_a_damaged_part_is_detected(two: Two) -> None:
    chief, worker = two.begin()
    worker.write_part()
    two.write(chief)
    if two.store.path.startswith("s3:"):
        bucket = Bucket(two.store.path)
        (name,) = (n for n in bucket.names("data") if "/part-00001.data" in n)
        found = bucket.read(name)
        assert found is not None
        content = bytearray(found[0])
        content[-1] ^= 1
        put(bucket, name, bytes(content))
    else:
        file = Path(two.store.path_of(2), "tensors.data-00001-of-00002")
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    (problem,) = verify(two.store.path)
    assert "step_000000000002 is damaged" in problem


def full(two: Two, worker: SharedWrite) -> None:
    """The worker's disk takes nothing: there is a file in place of the directory."""
    directory = Path(worker._files.directory_of(worker.begun))
    aside = Path(f"{directory}-aside")
    directory.rename(aside)
    directory.touch()
    worker.write_part()
    directory.unlink()
    if two.store.path.startswith("s3:"):
        shutil.rmtree(aside)  # it was the worker's own
    else:
        aside.rename(directory)


def lost(two: Two, worker: SharedWrite) -> None:
    two.posts.gone = True


@pytest.mark.parametrize(
    ("happens", "why"),
    [(full, "worker 1 could not write its part: "), (lost, "worker 1 was lost")],
)
def test_without_a_part_the_backup_before_stays_the_newest(
    two: Two, happens: Callable[[Two, SharedWrite], None], why: str
) -> None:
    chief, worker = two.begin()
    happens(two, worker)
    with pytest.raises(OSError, match=why):
        two.write(chief)
    assert two.left() == ONE
    found = two.store.newest()
    assert found is not None
    assert found.step == 1


def test_a_chief_that_ends_waits_for_nobody(two: Two) -> None:
    chief, _ = two.begin()
    chief.give_up()
    with pytest.raises(OSError, match="worker 1 has not written its part"):
        two.write(chief)
    assert two.left() == ONE


def test_an_abandoned_backup_leaves_nothing(two: Two) -> None:
    chief, worker = two.begin()
    worker.write_part()
    chief.abandon()
    assert two.left() == ONE
