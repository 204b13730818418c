"""Backups that two tasks write, each its part: here both are threads of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tfmw.storage import directories
from tfmw.tables.files import TensorSlice, slice_spec
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

    def posted(self, key: str, rank: int, wait_s: float) -> Any:
        if self._posts.gone:
            raise OSError(f"worker {rank} was lost")
        return self._posts.values.get(key)

    def forget(self, key: str) -> None:
        for name in [name for name in self._posts.values if name.startswith(key)]:
            del self._posts.values[name]


def pieces(begin: int, end: int) -> list[TensorSlice]:
    return [("slot", slice_spec([len(SLOT)], begin, end), tf.constant(SLOT[begin:end]))]


class Two:
    """The chief's store, and both tasks' view of the next backup."""

    def __init__(self, path: Path):
        self.store = BackupStore(path)
        self.posts = Posts()
        with self.store.locked():
            self.store.write(1, {"w": WEIGHTS}, {"n": 1})

    def begin(self) -> tuple[SharedWrite, SharedWrite]:
        directory = directories.name_beside(self.store.path_of(2))
        Path(directory).mkdir()
        chief, worker = (SharedWrite(Task(rank, self.posts), directory) for rank in (0, 1))  # type: ignore[arg-type]
        chief.pieces, worker.pieces = pieces(0, 4), pieces(4, 11)
        return chief, worker

    def write(self, chief: SharedWrite) -> None:
        self.store.write(2, {"w": WEIGHTS}, {"n": 2}, chief)

    def left(self) -> list[str]:
        return sorted(p.name for p in Path(self.store.path).iterdir() if p.name != "LOCK")


@pytest.fixture
def two(tmp_path: Path) -> Two:
    return Two(tmp_path)


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
    file = Path(two.store.path_of(2), "tensors.data-00001-of-00002")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    (problem,) = verify(two.store.path)
    assert "step_000000000002 is damaged" in problem


def full(two: Two, worker: SharedWrite) -> None:
    """The worker's disk takes nothing: there is a file in place of the directory."""
    directory, aside = Path(worker.directory), Path(worker.directory + "-aside")
    directory.rename(aside)
    directory.touch()
    worker.write_part()
    directory.unlink()
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
