"""State on disk: whole or not at all, found damaged where it is, never trusted, never in the way.

Rows are those of docs/explain/failure-model.md.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import json
import logging
import os
import pickle
import random
import shutil
import signal
import stat
import subprocess
import sys
import threading
from concurrent import futures
from pathlib import Path
from typing import Any
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfmw
from tests.helpers.backup_points import failing, lacking, watched
from tests.helpers.cluster import ONE_THREAD, PROGRAMS, PYTHONPATH, run_command
from tests.helpers.records import reseal
from tfmw.cluster import membership
from tfmw.cluster.cluster import MAX_RESTARTS
from tfmw.cluster.group import Group
from tfmw.compat import models
from tfmw.errors import TfmwError, UsageError
from tfmw.train import plan
from tfmw.train.checkpoint import compatibility, resume, state
from tfmw.train.checkpoint.schedule import BackgroundWriter, Schedule
from tfmw.train.checkpoint.store import BackupStore, Damaged, verify

ENVIRON = {**os.environ, **ONE_THREAD, "PYTHONPATH": PYTHONPATH, "TF_CPP_MIN_LOG_LEVEL": "2"}


def tensors(value: float, size: int = 100) -> dict[str, np.ndarray]:
    return {"w": np.full(size, value, np.float32), "b": np.full((2, 3), value, np.float64)}


@pytest.fixture
def store(tmp_path):
    return BackupStore(tmp_path / "backups")


def written(store: BackupStore, *steps: int) -> list[Path]:
    return [Path(store.write(s, tensors(s), {"value": s})) for s in steps]


def value_of(backup: Any) -> int:
    """The one number that a backup was filled with, after comparing all that it has."""
    value: int = backup.record["value"]
    found = backup.tensors()
    for name, expected in tensors(value, found["w"].size).items():
        np.testing.assert_array_equal(found[name], expected)
    return value


# ---------------------------------------------------------------- what is written is read


@pytest.mark.parametrize("location", ["{}/backups", "file://{}/backups"])
def test_read_returns_what_was_written(tmp_path, location):
    store = BackupStore(location.format(tmp_path))
    arrays = {
        "float32/[2, 3]": np.arange(6, dtype=np.float32).reshape(2, 3),
        "int64/[]": np.int64(-(2**60)),
        "bool": np.array([True, False]),
        "uint32": np.array([2**32 - 1], np.uint32),
        "bfloat16": np.array([1.5, -2.0], tf.bfloat16.as_numpy_dtype),
        "empty": np.zeros([0, 4], np.float64),
        "a name with spaces, ä and %": np.float32(1.0),
    }
    record = {"epoch": 3, "rate": 0.1, "nested": [{"a": None, "b": "ü"}], "nan": None}
    path = store.write(12, arrays, record)
    assert path == f"{tmp_path}/backups/step_000000000012"
    backup = store.newest()
    assert backup is not None
    assert (backup.step, backup.record) == (12, record)
    found = backup.tensors()
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype, name
        np.testing.assert_array_equal(found[name], array)
    assert verify(store.path) == verify(path) == []


def test_empty_directory_has_no_backup(store):
    assert store.newest() is None
    assert verify(store.path) == [f"{store.path} is not a directory."]
    with store.locked():
        assert store.newest() is None
        assert verify(store.path) == [f"{store.path} holds no backup."]


def test_two_backups_are_kept_and_steps_order_them_not_clocks(store):
    """Row 29: file times run backwards, as on a machine whose clock was set back."""
    paths = written(store, 1, 10, 5_000_000_000)[1:]
    for age, path in enumerate(paths):
        os.utime(path, (1e9 - age * 1e6,) * 2)
        for file in path.iterdir():
            os.utime(file, (1e9 - age * 1e6,) * 2)
    assert store.steps() == [10, 5_000_000_000]
    assert value_of(store.newest()) == 5_000_000_000


def test_backups_of_an_abandoned_run_are_removed_by_the_next_write(store):
    written(store, 10, 20)
    written(store, 15)
    assert store.steps() == [10, 15]


def test_the_same_step_is_replaced(store):
    written(store, 10)
    store.write(10, tensors(7), {"value": 7})
    assert store.steps() == [10]
    assert value_of(store.newest()) == 7


def test_files_are_flushed_before_the_rename(store, monkeypatch):
    synced: list[str] = []
    rename = os.rename

    def note_rename(source, target):
        assert {*map(str, Path(source).rglob("*")), source} <= set(synced)
        synced.append("renamed")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")))
    monkeypatch.setattr(os, "rename", note_rename)
    written(store, 1)
    assert synced[synced.index("renamed") + 1 :] == [store.path]


# ---------------------------------------------------------------- rows 3 and 8: half a write


@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize(
    "error",
    [OSError(28, "No space left on device"), tf.errors.ResourceExhaustedError(None, None, "full")],
)
def test_failed_write_leaves_the_previous_backup(store, step, error):
    points = 0
    failed = True
    while failed:
        store = BackupStore(f"{store.path}_{points}")
        written(store, 1)
        failed = True
        with watched(failing(points, error)), contextlib.suppress(type(error)):
            store.write(step, tensors(22), {"value": 22})
            failed = False
        with store.locked():
            assert value_of(store.newest()) in ((1, 22) if failed else (22,))
        names = os.listdir(store.path)
        assert set(names) <= {"LOCK", "step_000000000001", "step_000000000002"}, names
        assert verify(store.path) == []
        written(store, 3)
        assert value_of(store.newest()) == 3
        points += 1
    assert points > 8, "the points of a write were not reached"


@pytest.mark.process
@pytest.mark.parametrize("step", ["same", pytest.param("other", marks=pytest.mark.nightly)])
def test_kill_during_a_write_leaves_a_complete_backup(tmp_path, step):
    """Row 3, with a real end of the process before each change of the disk."""
    status, output = run_command("python", PROGRAMS / "backup_crash.py", tmp_path, step)
    assert status == 0, output
    points = int(output.splitlines()[-1])
    assert points >= 8
    left, found = [], []
    for number in range(points):
        store = BackupStore(tmp_path / str(number))
        left += [name for name in os.listdir(store.path) if name.startswith(".")]
        with store.locked():
            backup = store.newest()
            assert backup is not None
            value = backup.record["value"]
            np.testing.assert_array_equal(backup.tensors()["w"], np.full(1000, float(value)))
            found.append(value)
            assert not [name for name in os.listdir(store.path) if name.startswith(".")]
            assert verify(store.path) == []
    assert left, "no kill came in the middle of a write"
    assert found == sorted(found)
    assert set(found) == {1, 2}


# ---------------------------------------------------------------- rows 9 and 10: damage


def fall_back(store: BackupStore, caplog: pytest.LogCaptureFixture) -> int:
    """The step that a run would resume from, as `resume.Backups` finds it."""
    caplog.clear()
    with caplog.at_level(logging.WARNING, "tfmw"):
        found = store.newest_intact(value_of)
    assert found is not None, "no backup is left"
    return found


FILES = ("record.json", "tensors.index", "tensors.data-00000-of-00001")


@pytest.mark.parametrize("name", FILES)
def test_truncated_file_is_detected_and_the_previous_backup_is_used(store, caplog, name):
    """Row 9."""
    _, newest = written(store, 1, 2)
    content = (newest / name).read_bytes()
    for length in {0, 1, len(content) // 2, len(content) - 1}:
        (newest / name).write_bytes(content[:length])
        with pytest.raises(Damaged):  # before its tensors are read
            store.read(2)
        assert fall_back(store, caplog) == 1
        assert "step_000000000002 is damaged" in caplog.text
        assert "the previous backup is used" in caplog.text
        assert len(verify(store.path)) == 1
        assert len(verify(newest)) == 1
    (newest / name).unlink()
    assert fall_back(store, caplog) == 1
    (newest / name).write_bytes(content)
    assert fall_back(BackupStore(store.path), caplog) == 2
    assert not caplog.text


@pytest.mark.parametrize("name", FILES)
def test_flipped_bit_in_any_file_is_detected(store, caplog, name):
    """Row 10."""
    _, newest = written(store, 1, 2)
    content = (newest / name).read_bytes()
    draw = random.Random(10)
    for position in range(0, len(content), 1 + len(content) // 400):
        damaged = bytearray(content)
        damaged[position] ^= 1 << draw.randrange(8)
        (newest / name).write_bytes(damaged)
        assert fall_back(store, caplog) == 1, f"byte {position}"
        assert "step_000000000002 is damaged" in caplog.text
    assert len(verify(store.path)) == 1


def test_damaged_backup_is_not_one_of_the_two_that_are_kept(store, caplog):
    _, newest = written(store, 1, 2)
    (newest / "record.json").write_text("{}")
    assert fall_back(store, caplog) == 1
    written(store, 3)
    assert store.steps() == [1, 3]


def test_without_an_intact_backup_nothing_starts_over_or_is_deleted(store, caplog):
    for path in written(store, 1, 2):
        (path / "tensors.index").write_bytes(b"")
    with pytest.raises(UsageError, match=r"no backup in .* is intact \(.*step_0+2.*step_0+1"):
        fall_back(store, caplog)
    assert store.steps() == [1, 2]


def test_backups_without_records_are_refused_and_not_deleted(store, caplog):
    """A copy that was interrupted or filtered may lack records; a local write always has them."""
    paths = written(store, 1, 2)
    for path in paths:
        (path / "record.json").unlink()
    with pytest.raises(
        UsageError, match=r"no backup in .* is intact \(.*step_0+2 .* has no record.json;.*step_0+1"
    ):
        fall_back(store, caplog)
    model = dense_model()
    x: np.ndarray = np.ones((4, 3), np.float32)
    with pytest.raises(UsageError, match="restore one from elsewhere, or delete them"):
        tfmw.fit(model, x, x[:, :1], verbose=0, backup_dir=store.path)
    assert store.steps() == [1, 2]
    assert all(len(os.listdir(path)) == 2 for path in paths)


@pytest.mark.parametrize("change", [(os, "rename"), (shutil, "rmtree")])
def test_an_interrupted_removal_leaves_no_damaged_backup(store, change):
    """A run that has ended removes its backups; the next one begins anew, and is not refused."""
    written(store, 1, 2)
    with (
        mock.patch.object(*change, side_effect=OSError("gone")),
        pytest.raises(OSError, match="gone"),
    ):
        store.clear()
    intact = [step for step in store.steps() if store.read(step)]
    assert intact == ([1, 2] if change[0] is os else [2])
    with store.locked():
        assert not [name for name in os.listdir(store.path) if name.startswith(".")]


def test_backup_of_another_format_is_refused_and_not_changed(store, caplog):
    _, newest = written(store, 1, 2)
    reseal(newest, format=2)
    with pytest.raises(UsageError, match="has format 2, this version reads 3"):
        fall_back(store, caplog)
    assert store.steps() == [1, 2]


# ---------------------------------------------------------------- row 33: hostile backups


def executed() -> None:
    raise AssertionError("what a backup holds was executed")


class Trap:
    def __reduce__(self):
        return executed, ()


@pytest.mark.parametrize("name", [*FILES, "more"])
def test_links_in_a_backup_are_never_followed(store, tmp_path, caplog, name):
    _, newest = written(store, 1, 2)
    secret = tmp_path / "secret"
    if name != "more":
        (newest / name).rename(secret)
    else:
        secret.write_bytes(b"secret")
    (newest / name).symlink_to(secret)
    assert fall_back(store, caplog) == 1
    assert "is not a plain file" in caplog.text
    store.clear()
    assert secret.exists()


def test_a_link_in_place_of_a_backup_is_never_followed_nor_emptied(store, tmp_path, caplog):
    outside = tmp_path / "outside"
    outside.mkdir()
    _, newest = written(store, 1, 2)
    newest.rename(outside / "real")
    newest.symlink_to(outside / "real")
    (Path(store.path) / ".step_000000000003.writing-0123456789ab").symlink_to(outside)
    nested = Path(store.path) / ".step_000000000004.writing-0123456789ab"
    nested.mkdir()
    (nested / "link").symlink_to(outside)
    with store.locked():
        assert fall_back(store, caplog) == 1
        assert "is not a directory" in caplog.text
        store.write(2, tensors(5), {"value": 5})
        assert value_of(store.newest()) == 5
        store.clear()
    assert os.listdir(store.path) == ["LOCK"]
    assert sorted(os.listdir(outside / "real")) == sorted(FILES)


@pytest.mark.parametrize(
    "changes",
    [
        {"sizes": {"../secret": 6}},
        {"sizes": {"..": 4096}},
        {"sizes": {"/etc/hostname": 1}},
        {"sizes": ["tensors.index"]},
        {"sizes": {"tensors.index": 10**30}},
        {"record": "text"},
        {"step": 99},
        {"index_sha256": None},
    ],
)
def test_record_with_invalid_content_is_damaged(store, tmp_path, caplog, changes):
    (tmp_path / "backups" / "secret").parent.mkdir()
    (tmp_path / "backups" / "secret").write_bytes(b"secret")
    _, newest = written(store, 1, 2)
    reseal(newest, **changes)
    assert fall_back(store, caplog) == 1
    assert "is damaged" in caplog.text


def test_huge_record_is_not_read(store, caplog):
    _, newest = written(store, 1, 2)
    (newest / "record.json").write_text("[" * 200_000)
    assert fall_back(store, caplog) == 1
    with open(newest / "record.json", "wb") as file:
        file.truncate(1 << 40)  # a hole: the disk holds nothing of it
    assert fall_back(store, caplog) == 1
    assert "too large" in caplog.text


def test_index_larger_than_the_files_allocates_no_memory(store, caplog):
    written(store, 1)
    newest = Path(store.write(2, {"w": np.zeros(1 << 20, np.float32)}, {"value": 2}))
    data = newest / "tensors.data-00000-of-00001"
    data.write_bytes(b"1234")
    reseal(newest, sizes={"tensors.index": (newest / "tensors.index").stat().st_size, data.name: 4})
    assert fall_back(store, caplog) == 1
    assert "its index lists 4194304 bytes, its files have 4" in caplog.text


def test_other_files_are_neither_read_nor_executed(store, tmp_path, caplog):
    trap = pickle.dumps(Trap())
    (newest,) = written(store, 1)
    for name in ("record.pkl", "checkpoint", "model.weights.h5", "tensors.pickle", "conftest.py"):
        (newest / name).write_bytes(trap)
        (Path(store.path) / name).write_bytes(trap)
    assert fall_back(store, caplog) == 1
    (newest / "record.json").write_bytes(trap)
    with pytest.raises(UsageError, match=r"no backup in .* is intact"):
        fall_back(store, caplog)


def test_named_pipe_in_a_backup_does_not_block(store, caplog):
    _, newest = written(store, 1, 2)
    (newest / "record.json").unlink()
    os.mkfifo(newest / "record.json")
    assert fall_back(store, caplog) == 1


@pytest.mark.parametrize("make", [os.mkdir, lambda path: os.symlink("/etc/hostname", path)])
def test_lock_that_is_not_a_file_is_refused(store, make):
    os.makedirs(store.path)
    make(os.path.join(store.path, "LOCK"))
    with pytest.raises(UsageError, match="cannot be locked"), store.locked():
        raise AssertionError("locked")


def test_a_file_in_place_of_the_directory_is_named(tmp_path):
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        store = BackupStore(str(path))
        with pytest.raises(UsageError, match=f"cannot create the directory {path}"), store.locked():
            raise AssertionError("locked")


def test_backup_restores_numbers_of_callbacks_not_paths_or_methods():
    log = keras.callbacks.CSVLogger("mine.csv")
    stop = keras.callbacks.EarlyStopping(patience=3)
    states, arrays = state.callback_states([log, stop])
    states[0]["values"].update(filename="/etc/passwd", on_epoch_end=1, __class__="x", sep=";")
    states[1]["values"].update(monitor="other", wait=2)
    state.restore_callbacks([log, stop], states, arrays, is_chief=True)
    assert (log.filename, log.sep) == ("mine.csv", ",")
    assert callable(log.on_epoch_end)
    assert stop.wait == 2


HEADER, ROW = "epoch,loss\r\n", "{},0.5\r\n"


@pytest.mark.parametrize(
    ("before", "epoch", "after"),
    [
        ([0, 1, 2, 3], 2, [0, 1]),
        ([0, 1], 2, [0, 1]),
        ([0, 1, 2, 3, 0, 1, 2], 1, [0, 1, 2, 3, 0]),  # an earlier run's rows come first
        ([5, 6, 7], 5, []),
        ([3], 0, []),
        ([], 0, []),
    ],
)
def test_rows_of_epochs_that_are_trained_again_are_removed(before, epoch, after, tmp_path):
    path = tmp_path / "log.csv"
    path.write_bytes((HEADER + "".join(map(ROW.format, before))).encode())
    log = keras.callbacks.CSVLogger(path)
    state.prepare_for_resume([log], epoch, 0)
    assert path.read_bytes().decode() == HEADER + "".join(map(ROW.format, after))
    assert log.append


@pytest.mark.parametrize(
    ("attempt", "written_ago_s", "rows"),
    [
        (0, 0, [0, 1, 0, 1]),  # of another run, as Keras does
        (1, 0, [0, 1]),  # of an attempt that was lost before its first backup
        (1, 1e9, [0, 1, 0, 1]),  # before this run began
    ],
)
def test_a_restart_without_a_backup_logs_each_epoch_once(
    attempt, written_ago_s, rows, tmp_path, monkeypatch
):
    monkeypatch.setenv("TFMW_ATTEMPT", str(attempt))
    path = tmp_path / "log.csv"
    path.write_text(HEADER + ROW.format(0) + ROW.format(1), newline="")
    at = path.stat().st_mtime - written_ago_s
    os.utime(path, (at, at))
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    x: Any = np.ones((4, 2), "float32")
    log = keras.callbacks.CSVLogger(path, append=True)
    tfmw.fit(model, x, x[:, :1], epochs=2, verbose=0, callbacks=[log])
    lines = path.read_text().splitlines()
    assert [line.partition(",")[0] for line in lines] == ["epoch", *map(str, rows)]


def test_resumed_run_keeps_its_own_settings():
    class Counter(keras.callbacks.Callback):
        def __init__(self, every):
            super().__init__()
            self.every = every
            self.count = 0

    def begun(every):
        callback = Counter(every)
        state.note_callbacks([callback])
        state.note_callbacks([callback])
        return callback

    first = begun(3)
    first.count = 7
    states, arrays = state.callback_states([first])
    assert states[0]["values"] == {"count": 7}
    second = begun(5)
    state.restore_callbacks([second], states, arrays, is_chief=True)
    assert (second.every, second.count) == (5, 7)
    assert state.callback_states([second])[0][0]["values"] == {"count": 7}
    # In the process where the run was interrupted, the callback has counted on since the backup.
    first.count = 9
    early, arrays = state.callback_states([begun(3)])
    for _ in ("before on_train_begin", "after it"):
        state.note_callbacks([first])
    state.restore_callbacks([first], early, arrays, is_chief=True)
    assert first.count == 0


# ---------------------------------------------------------------- row 12: one run at a time


@pytest.mark.process
def test_second_run_is_refused_until_the_first_has_ended(store, tmp_path):
    os.mkfifo(holder := tmp_path / "holder")
    command = ["python", PROGRAMS / "backup_lock.py", store.path, holder]
    with futures.ThreadPoolExecutor() as pool:
        run = pool.submit(run_command, *command)
        pid = int(holder.read_text())
        said = rf"in use by another run \(process {pid} on "
        try:
            with pytest.raises(UsageError, match=said), store.locked():
                raise AssertionError("two runs hold one directory")
        finally:
            os.kill(pid, signal.SIGKILL)
        assert run.result()[0] == -signal.SIGKILL
    with store.locked():
        assert value_of(store.read(written(store, 1) and 1)) == 1
    with store.locked():  # let go of by a run that has ended
        assert store.steps() == [1]


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP])
def test_backups_are_written_where_directories_cannot_be_flushed(store, monkeypatch, number):
    fsync = os.fsync

    def of_files(descriptor: int) -> None:
        (lacking(number) if stat.S_ISDIR(os.fstat(descriptor).st_mode) else fsync)(descriptor)

    monkeypatch.setattr(os, "fsync", of_files)
    written(store, 1, 2)
    assert value_of(store.newest()) == 2


def test_a_run_that_cannot_begin_releases_the_lock(store):
    """The next run in the same interpreter, such as a notebook's, gets the same error again."""
    for path in written(store, 1, 2):
        (path / "record.json").unlink()
    for _ in range(2):
        with (
            pytest.raises(UsageError, match=r"no backup in .* is intact"),
            resume.Backups(Group(0, 1), tfmw.callbacks.BackupAndRestore(store.path)),
        ):
            raise AssertionError("training begins anew")
    with store.locked():
        assert store.steps() == [1, 2]


def test_no_other_user_can_open_the_lock_and_hold_it(store):
    os.makedirs(store.path)
    lock = Path(store.path, "LOCK")
    before = os.umask(0)
    try:
        for _ in range(2):
            with store.locked():
                assert stat.S_IMODE(lock.stat().st_mode) == 0o600
            lock.chmod(0o644)  # as older versions wrote it
    finally:
        os.umask(before)


# ---------------------------------------------------------------- row 8: disk full


@pytest.mark.nightly
@pytest.mark.process
def test_training_continues_on_a_full_disk_and_the_old_backup_is_kept(tmp_path):
    mount = f'mount -t tmpfs -o size=1m tmpfs {tmp_path} && cd {tmp_path} && exec "$@"'
    namespaces = "-m" if os.geteuid() == 0 else "-Urm"
    run = subprocess.run(
        [
            "unshare",
            namespaces,
            "sh",
            "-c",
            mount,
            "sh",
            sys.executable,
            PROGRAMS / "backup_disk_full.py",
        ],
        env=ENVIRON,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout.splitlines()[-1])
    seen, messages = result["seen"], result["messages"]
    assert seen["full"], "the disk did not fill up"
    assert seen["2"]["steps"] == [2, 4]
    for epoch in "34":  # the disk is full: the earlier backup is still there, and whole
        assert seen[epoch] == {"steps": [2, 4], "problems": []}
    assert seen["5"] == {"steps": [4, 10], "problems": []}  # there is space again
    assert seen["left"]["problems"] == []
    assert seen["left"]["names"] == ["LOCK", "step_000000000010", "step_000000000012"]
    begin = f"no backup could be written to {tmp_path}/backups ("
    warned = [m for m in messages if m.startswith(begin)]
    assert len(warned) == 2
    assert "training continues" in warned[0]


# ---------------------------------------------------------------- row 11: a backup of another run


def dense_model(**changes: Any) -> keras.Model:
    settings = {
        "activation": "relu",
        "optimizer": keras.optimizers.Adam(),
        "loss": "mse",
        "metrics": ["mae"],
        "units": 4,
        "rate": 0.5,
        "inputs": 3,
        **changes,
    }
    model = keras.Sequential(
        [
            keras.Input((settings["inputs"],)),
            keras.layers.Dense(settings["units"], activation=settings["activation"]),
            keras.layers.Dropout(settings["rate"]),
            keras.layers.Dense(1),
        ]
    )
    model.compile(settings["optimizer"], settings["loss"], metrics=settings["metrics"])
    return built(model, settings["inputs"], 1)


def built(model: keras.Model, inputs: int, outputs: int) -> keras.Model:
    spec = [tf.TensorSpec([2, size], tf.float32) for size in (inputs, outputs)]
    models.build_all(model, tuple(spec))
    return model


def refuse_other(
    saved: list[str], current: list[str], path: str, version: str | None = keras.__version__
) -> None:
    record = {"signature": saved, "versions": {"keras": version}}
    if version is None:
        del record["versions"]  # as of older versions
    compatibility.refuse_other(record, current, path)


class Subclassed(keras.Model):
    def __init__(self, units=4):
        super().__init__()
        self.dense = keras.layers.Dense(units)

    def call(self, x):
        return self.dense(x)


@pytest.mark.filterwarnings("ignore:__array__ implementation")  # Keras, when it quantizes
def test_backup_with_another_quantization_or_adapter_is_refused():
    def signature(*, quantized: bool, rank: int | None) -> list[str]:
        model = keras.Sequential([keras.Input([3]), keras.layers.Dense(4)])
        if quantized:
            model.layers[0].quantize("int8")
        if rank:
            model.layers[0].enable_lora(rank)
        model.compile("adam", "mse")
        return compatibility.signature(built(model, 3, 4), 32)

    plain = signature(quantized=False, rank=None)
    for quantized, rank, difference in [
        (True, None, "int8"),
        (False, 2, "lora_alpha: 2"),
        (True, 2, "int8"),
    ]:
        with pytest.raises(UsageError, match=rf"belongs to another model.*{difference}"):
            refuse_other(plain, signature(quantized=quantized, rank=rank), "backups")
    other = signature(quantized=True, rank=1)
    with pytest.raises(UsageError, match=r"lora_alpha: 2.*lora_alpha: 1"):
        refuse_other(signature(quantized=True, rank=2), other, "backups")


def test_signature_is_stable_over_instances_of_a_model():
    first = compatibility.signature(dense_model(), 32)
    keras.layers.Dense(1)  # counts on in the names that Keras makes up
    assert compatibility.signature(dense_model(), 32) == first
    other_rate = dense_model(optimizer=keras.optimizers.Adam(0.5))
    assert compatibility.signature(other_rate, 32) == first


DIFFERENCES = pytest.mark.parametrize(
    ("changes", "was", "now"),
    [
        ({"activation": "tanh"}, 'activation: "relu"', 'activation: "tanh"'),
        ({"units": 5}, "units: 4", "units: 5"),
        ({"rate": 0.4}, "rate: 0.5", "rate: 0.4"),
        ({"inputs": 4}, "[null, 3]", "[null, 4]"),
        ({"optimizer": keras.optimizers.AdamW()}, "optimizer: Adam", "optimizer: AdamW"),
        ({"optimizer": keras.optimizers.Adam(beta_1=0.8)}, "beta_1: 0.9", "beta_1: 0.8"),
        ({"loss": "mae"}, "loss: mse", "loss: mae"),
        ({"metrics": ["mse"]}, "mae", "mse"),
        ({"metrics": ["mae", "mse"]}, "[(), ()]", "[(), (), (), ()]"),
    ],
)


@DIFFERENCES
@pytest.mark.parametrize("version", [keras.__version__, "3.8.0", None])
def test_a_backup_of_another_model_is_refused_by_its_first_difference(changes, was, now, version):
    saved = compatibility.signature(dense_model(), 32)
    mine = compatibility.signature(dense_model(**changes), 32)
    with pytest.raises(UsageError) as said:
        refuse_other(saved, mine, "/b", version)
    message = str(said.value)
    assert "'/b' belongs to another model" in message
    assert message.index(was) < message.index(now)
    written_with = f"(written with Keras 3.8.0; this is {keras.__version__})"
    assert (written_with in message) == (version == "3.8.0")
    assert "Use another backup_dir, or delete that one" in message


def test_a_backup_of_another_batch_size_or_class_is_refused():
    saved = compatibility.signature(dense_model(), 32)
    with pytest.raises(UsageError, match=r"\[global batch size: 32\], this run has \[.*64\]"):
        refuse_other(saved, compatibility.signature(dense_model(), 64), "/b")
    other = Subclassed()
    other.compile("adam", "mse", metrics=["mae"])
    built(other, 3, 4)
    with pytest.raises(UsageError, match=r"\[model: Sequential\], this run has \[model: Subclass"):
        refuse_other(saved, compatibility.signature(other, 32), "/b")


OF_ANOTHER_KERAS = [  # files of Keras 3.8, 3.12 and 3.14, and the format of 3.15
    (
        '"config": {"input_axes": null, "output_axes": null, "seed": null}',
        '"config": {"seed": null}',
    ),
    ("l2: 0.01", "l2: 0.009999999776482582"),
    ("variable sgd/", "variable SGD/"),
    ("variable sgd/", "variable "),
    ("layer 0: Dense, quantization_config: null", "layer 0: Dense, use_gate: false"),
    ("; object: Huber, delta: 1.0", ""),
]


@pytest.mark.parametrize(("now", "then"), OF_ANOTHER_KERAS)
def test_another_release_of_keras_describes_the_same_model(now, then):
    current = [
        "model: Sequential",
        "layer 0: Dense",
        'layer 0: Dense, kernel_initializer: {"class_name": "GlorotUniform", "config": '
        '{"input_axes": null, "output_axes": null, "seed": null}}',
        "layer 0: Dense, l2: 0.01",
        "layer 0: Dense, quantization_config: null",
        "variable dense/kernel: float32 (3, 4)",
        "variable sgd/dense_kernel_momentum: float32 (3, 4)",
        'loss: object: Huber; object: Huber, delta: 1.0; object: Huber, reduction: "sum"',
        "global batch size: 32",
    ]
    saved = [line.replace(now, then) for line in current]
    assert saved != current
    for version in ("3.14.0", None):
        refuse_other(saved, current, "/b", version)
        refuse_other(current, saved, "/b", version)
    with pytest.raises(UsageError, match="belongs to another model"):
        refuse_other(saved, current, "/b")
    for was, other in [("float32 (3, 4)", "float32 (4, 3)"), ("Huber", "MeanAbsoluteError")]:
        with pytest.raises(UsageError, match="belongs to another model"):
            refuse_other([line.replace(was, other) for line in saved], current, "/b", "3.14.0")


def test_variables_are_restored_by_their_place_if_a_release_renames_them():
    model, other = dense_model(), dense_model()
    for variable in [*model.variables, *model.optimizer.variables]:
        drawn = 9 * np.random.default_rng(1).uniform(size=variable.shape)
        variable.assign(np.asarray(drawn, variable.dtype))
    tensors = state.Snapshots().take(model, tf.distribute.get_strategy())
    renamed = {name.replace("/adam/", "/Adam/"): tensors[name] for name in tensors}
    assert renamed.keys() != tensors.keys()
    state.restore(other, renamed)
    slots = [v for v in other.optimizer.variables if "momentum" in v.path]
    assert len(slots) == 4
    assert all(np.any(slot) for slot in slots)
    for slot, expected in zip(other.optimizer.variables, model.optimizer.variables, strict=True):
        np.testing.assert_array_equal(slot, expected)


# ---------------------------------------------------------------- how often


@pytest.mark.parametrize(
    ("every", "steps", "epochs", "seconds"),
    [
        (7, 7, None, None),
        ("7 steps", 7, None, None),
        ("epoch", None, 1, None),
        ("3 epochs", None, 3, None),
        ("10 s", None, None, 10.0),
        ("10s", None, None, 10.0),
        ("0.5 s", None, None, 0.5),
        ("90 seconds", None, None, 90.0),
        ("5 min", None, None, 300.0),
        ("2 minutes", None, None, 120.0),
        ("1.5 h", None, None, 5400.0),
        ("1 hour", None, None, 3600.0),
        (datetime.timedelta(minutes=2), None, None, 120.0),
        ("continuous", None, None, 0.0),
    ],
)
def test_schedule(every, steps, epochs, seconds):
    schedule = Schedule(every)
    assert (schedule.steps, schedule.epochs, schedule.seconds) == (steps, epochs, seconds)


@pytest.mark.parametrize(
    "every",
    [
        0,
        -1,
        True,
        False,
        None,
        "",
        "s",
        "fortnight",
        "continuously",
        "5 parsecs",
        "0 s",
        "steps",
        "-3 epochs",
        "10",
        2.5,
        "1.5 epochs",
        "2.5 steps",
        datetime.timedelta(0),
    ],
)
def test_invalid_schedule_is_refused(every):
    with pytest.raises(UsageError, match="unknown backup frequency"):
        Schedule(every)


# ---------------------------------------------------------------- beside training


def test_writes_run_in_the_background_one_at_a_time():
    began, may_end = threading.Event(), threading.Event()
    order: list[Any] = []

    def write(number: int) -> None:
        began.set()
        assert may_end.wait(30)
        order.append(number)

    writer = BackgroundWriter(write, on_error=order.append)
    assert not writer.busy
    writer.submit(1)
    assert began.wait(30)  # and submit has returned: the write is under way
    assert writer.busy
    assert order == []
    may_end.set()
    writer.submit(2)
    assert order[:1] == [1]  # never two at a time
    writer.wait()
    assert order == [1, 2]
    assert not writer.busy


@pytest.mark.parametrize("error", [OSError(28, "full"), tf.errors.UnknownError(None, None, "x")])
def test_disk_error_is_reported_and_training_continues(error):
    told: list[Exception] = []

    def write() -> None:
        raise error

    writer = BackgroundWriter(write, told.append)
    writer.submit()
    writer.wait()
    assert told == [error]


def test_other_errors_are_raised_in_the_training_thread():
    told: list[Exception] = []

    def write() -> None:
        raise ZeroDivisionError

    writer = BackgroundWriter(write, told.append)
    writer.submit()
    with pytest.raises(ZeroDivisionError):
        writer.wait()
    writer.wait()
    assert told == []


# ---------------------------------------------------------------- row 25: a loss that is not finite


class Spoil(keras.callbacks.Callback):
    """Makes the weights NaN before a step, as too high a learning rate would."""

    def __init__(self, before):
        super().__init__()
        self.before = before

    def on_train_batch_begin(self, batch, logs=None):
        if int(self.model.optimizer.iterations) == self.before:
            kernel = self.model.trainable_variables[0]
            kernel.assign(np.full(kernel.shape, np.nan))


def train(folder: Path, spoil_before: int, **options: Any) -> keras.Model:
    # No ReLU: oneDNN, which some processors get, makes 0 of a NaN in it.
    activation = options.pop("activation", "linear")
    optimizer = keras.optimizers.SGD(0.01)
    model = dense_model(activation=activation, optimizer=optimizer, rate=0.0)
    x: np.ndarray = np.ones((12, 3), np.float32)
    tfmw.fit(
        model,
        x,
        x[:, :1],
        batch_size=4,
        epochs=4,
        verbose=0,
        callbacks=[
            Spoil(spoil_before),
            tfmw.callbacks.BackupAndRestore(folder, 2, delete_checkpoint=False, **options),
        ],
    )
    return model


def test_row_25_nan_loss_ends_the_run_and_keeps_the_previous_backup(tmp_path):
    with pytest.raises(TfmwError, match=r"the loss is nan in epoch 3 at step 2: training ends"):
        train(tmp_path / "b", spoil_before=7)
    store = BackupStore(tmp_path / "b")
    newest = store.newest()
    assert newest is not None
    assert newest.step == 6
    assert all(np.isfinite(v).all() for v in newest.tensors().values())
    # Nothing has to be removed by hand: the next run resumes from the repaired model.
    model = train(tmp_path / "b", spoil_before=-1)
    assert int(model.optimizer.iterations) == 12
    assert all(np.isfinite(w).all() for w in model.get_weights())


def test_row_25_nan_weights_are_not_backed_up_while_the_loss_is_finite(tmp_path, caplog):
    class SpoilAfter(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if int(self.model.optimizer.iterations) == 6:
                self.model.trainable_variables[0].assign(np.full((3, 4), np.inf))

    model = dense_model(optimizer=keras.optimizers.SGD(0.01), rate=0.0)
    x: np.ndarray = np.ones((12, 3), np.float32)
    with caplog.at_level(logging.WARNING, "tfmw"), pytest.raises(TfmwError, match="the loss is"):
        tfmw.fit(
            model,
            x,
            x[:, :1],
            batch_size=4,
            epochs=4,
            verbose=0,
            backup_dir=tmp_path / "b",
            backup_every=2,
            callbacks=[SpoilAfter()],
        )
    assert BackupStore(tmp_path / "b").steps() == [2, 4]
    assert "no backup at step 6: " in caplog.text
    assert "is not finite; the previous backup is kept" in caplog.text


def zero_for_nan(x):
    return keras.ops.where(keras.ops.isnan(x), 0.0, x)


@pytest.mark.parametrize(("before", "since", "newest"), [(6, 8, 6), (11, 12, 10)])
def test_row_25_nan_weights_end_the_run_even_if_the_loss_is_finite(tmp_path, before, since, newest):
    expected = f"dense/kernel has not been finite since step {since} or before, though the loss is"
    with pytest.raises(TfmwError, match=expected):
        train(tmp_path / "b", spoil_before=before, activation=zero_for_nan)
    assert BackupStore(tmp_path / "b").steps()[-1] == newest


def test_row_25_save_nan_continues(tmp_path):
    model = train(tmp_path / "b", spoil_before=7, save_nan=True)
    assert int(model.optimizer.iterations) == 12
    newest = BackupStore(tmp_path / "b").newest()
    assert newest is not None
    assert newest.step == 12
    assert not all(np.isfinite(v).all() for v in newest.tensors().values() if v.dtype.kind == "f")


def trained(folder: Path, epochs: int, **settings: Any) -> tuple[int, keras.Model, dict[str, Any]]:
    """(steps made, model, history) of a program that trains from its beginning."""
    keras.utils.set_random_seed(3)
    model = dense_model()
    steps: list[int] = []
    count = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: steps.append(1))
    x = np.arange(24, dtype=np.float32).reshape(8, 3) / 24
    data = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(4)
    callbacks = [count, *settings.pop("callbacks", [])]
    history = tfmw.fit(
        model, data, epochs=epochs, verbose=0, backup_dir=folder, callbacks=callbacks, **settings
    )
    return len(steps), model, history.history


def test_a_complete_run_says_so_and_goes_on_with_more_epochs(tmp_path, monkeypatch, capsys):
    _, whole, all_epochs = trained(tmp_path / "whole", 3)
    _, first, history = trained(tmp_path / "run", 2)
    # The same command, in another process.
    monkeypatch.setattr(resume, "identity", lambda: "another process")
    steps, again, repeated = trained(tmp_path / "run", 2)
    assert (steps, repeated) == (0, history)
    for a, b in zip(first.get_weights(), again.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    said = f"complete: 2 epochs; delete {tmp_path}/run to train anew, or raise epochs= to train on"
    assert said in capsys.readouterr().err
    monkeypatch.setattr(resume, "identity", lambda: "a third one")
    steps, longer, longer_history = trained(tmp_path / "run", 3)
    assert (steps, longer_history) == (2, all_epochs)
    for a, b in zip(whole.get_weights(), longer.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    # A cell that is run again trains again.
    assert trained(tmp_path / "run", 3)[0] == 6


def test_a_run_that_has_stopped_early_is_complete(tmp_path, monkeypatch, capsys):
    def stop() -> keras.callbacks.Callback:
        return keras.callbacks.EarlyStopping("loss", patience=0, min_delta=9.0)

    assert trained(tmp_path, 4, callbacks=[stop()])[0] == 4
    monkeypatch.setattr(resume, "identity", lambda: "another process")
    assert trained(tmp_path, 6, callbacks=[stop()])[0] == 0
    assert (
        f"complete: training stopped early; delete {tmp_path} to train anew\n"
        in capsys.readouterr().err
    )


def test_restarts_without_backups_are_said_once(tmp_path, monkeypatch, caplog):
    plan._warn_of_restarts.cache_clear()
    monkeypatch.setenv(MAX_RESTARTS, "3")
    trained(tmp_path, 1)
    assert "this run may restart" not in caplog.text
    for _ in range(2):
        tfmw.fit(dense_model(), np.ones((4, 3)), np.ones((4, 1)), verbose=0)
    assert caplog.text.count("this run may restart, up to 3 times, and fit saves no backups") == 1


def test_a_call_on_new_processes_is_complete_for_its_restarts_only(tmp_path, monkeypatch):
    made = []
    for call in ("caller/0", "caller/0", "caller/1", "another/0"):
        monkeypatch.setenv(resume.CALL, call)
        made.append(trained(tmp_path, 1)[0])
    assert made == [2, 0, 2, 0]


def test_backups_are_removed_at_exit_except_those_of_other_runs(tmp_path, monkeypatch):
    """A process that has finished must not remove what another run has written there since."""
    at_end: list[Any] = []
    monkeypatch.setattr(membership, "on_success", at_end.append)
    model = dense_model()
    x: np.ndarray = np.ones((4, 3), np.float32)
    for name in ("mine", "others"):
        callback = tfmw.callbacks.BackupAndRestore(tmp_path / name, delete_checkpoint=True)
        tfmw.fit(model, x, x[:, :1], verbose=0, callbacks=[callback])
    others = BackupStore(tmp_path / "others")
    newest = others.newest()
    assert newest is not None
    others.write(50, newest.tensors(), {**newest.record, "run": "another"})
    for end in at_end:
        end()
    assert BackupStore(tmp_path / "mine").steps() == []
    assert others.steps()[-1] == 50
