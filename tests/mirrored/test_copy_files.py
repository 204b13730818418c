"""Copies of the state in files in memory, which their workers may leave in any condition."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

from tfmw.storage.fence import ATTEMPT
from tfmw.train.checkpoint.resume import CALL
from tfmw.train.mirrored.copy_files import CopyFiles
from tfmw.train.mirrored.state_copies import Copy, Layout, copy_shards

TENSORS = {
    "kernel": tf.constant([[1.5, 2.5], [3.5, float("nan")]]),
    "step": tf.constant(7, tf.int64),
    "half": tf.constant([1.0, 2.0], tf.bfloat16),
    "flags": np.array([True, False, True]),
    "none": np.zeros([0, 3], "float32"),
}


def copy_of(step: int, **fields: Any) -> Copy:
    return Copy({"step": step, "logs": {"loss": 0.1}}, TENSORS, **fields)


def steps_in(folder: Path) -> list[int]:
    return sorted(copy.held.step for copy in CopyFiles(str(folder), 9).found())


def test_a_copy_is_read_as_it_was_written(tmp_path: Path) -> None:
    layout = Layout.of([[["m", 0, 3]], [["m", 3, 2]]], {"m": ["float32", [5]]})
    shards: dict[int, list[np.ndarray]] = {
        1: [np.arange(8, dtype=np.uint8)],
        0: [np.arange(12, dtype=np.uint8)],
    }
    CopyFiles(str(tmp_path), 1).write(copy_of(7, layout=layout, shards=shards, attempt=3))
    (found,) = CopyFiles(str(tmp_path), 0).found()
    assert found.record == {"step": 7, "logs": {"loss": 0.1}}
    assert found.held == (7, 3, 2, [1, 0], False)
    assert list(found.tensors) == list(TENSORS)
    for name, tensor in TENSORS.items():
        expected = np.asarray(tensor)
        assert found.tensors[name].dtype == expected.dtype
        np.testing.assert_array_equal(found.tensors[name], expected)
    assert found.tensors["half"].dtype == ml_dtypes.bfloat16
    slots: dict[str, np.ndarray] = {"m": np.zeros(5, "float32")}
    for rank, arrays in found.shards.items():
        copy_shards(arrays, found.layout.shards_in(slots, rank))
    expected = np.concatenate([shards[0][0], shards[1][0]]).view("float32")
    np.testing.assert_array_equal(slots["m"], expected)


@pytest.mark.parametrize("of_last", ["header", "place", "nothing"])
def test_a_worker_killed_while_it_writes_leaves_the_copy_before(
    of_last: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = CopyFiles(str(tmp_path), 0)
    for step in (1, 2):
        files.write(copy_of(step))
    write = os.pwrite

    def killed(file: int, data: Any, offset: int) -> int:
        is_place = len(data) == 16 and any(bytes(data))
        is_header = bytes(data[:1]) == b"{"
        if (of_last == "place" and is_place) or (of_last == "header" and is_header):
            raise KeyboardInterrupt
        if of_last == "nothing" and offset:
            raise KeyboardInterrupt
        return write(file, data, offset)

    monkeypatch.setattr(os, "pwrite", killed)
    with pytest.raises(KeyboardInterrupt):
        files.write(copy_of(3))
    monkeypatch.undo()
    assert steps_in(tmp_path) == [2]
    # The worker in its place writes over what is not complete.
    CopyFiles(str(tmp_path), 0).write(copy_of(3))
    assert steps_in(tmp_path) == [2, 3]


def test_files_of_an_attempt_before_stay_until_all_workers_have_new_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank in range(3):
        CopyFiles(str(tmp_path), rank).write(copy_of(10))
    monkeypatch.setenv(ATTEMPT, "1")
    first, second = CopyFiles(str(tmp_path), 0), CopyFiles(str(tmp_path), 1, is_first=False)
    for step in (11, 12):
        first.write(copy_of(step, attempt=1))
        second.write(copy_of(step, attempt=1))
        assert steps_in(tmp_path)[:3] == [10, 10, 10]
    first.write(copy_of(13, attempt=1))
    assert steps_in(tmp_path) == [11, 12, 12, 13]
    second.remove()
    assert steps_in(tmp_path) == [12, 13]
    first.remove()
    assert not list(tmp_path.iterdir())


def test_copies_of_another_call_are_not_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CALL, "caller/1")
    CopyFiles(str(tmp_path), 0).write(copy_of(5))
    assert steps_in(tmp_path) == [5]
    monkeypatch.setenv(CALL, "caller/2")
    assert steps_in(tmp_path) == []


@pytest.mark.parametrize(
    ("tensors", "problem"),
    [
        ({"w": np.zeros(2000, "float32")}, "take too much memory"),
        ({"names": np.array(["a", "b"], object)}, "names has values of object"),
    ],
)
def test_what_cannot_be_written_is_an_error_of_the_system(
    tensors: dict[str, Any], problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = os.statvfs(tmp_path)
    small = os.statvfs_result([*free[:1], 1, 10_000, 10_000, 10_000, *free[5:10]])
    monkeypatch.setattr(os, "statvfs", lambda _: small)
    with pytest.raises(OSError, match=problem):
        CopyFiles(str(tmp_path), 0).write(Copy({"step": 1}, tensors))
    assert steps_in(tmp_path) == []
