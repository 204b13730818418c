"""Backups in a bucket: whole or not at all, one run at a time, after every kind of lost request."""

from __future__ import annotations

import contextlib
import logging
import os
import re

import numpy as np
import pytest

from tests.helpers.buckets import CREDENTIALS, NIGHTLY, opened, put
from tests.helpers.cases import cases
from tests.helpers.cluster import run_command
from tfmw.errors import TfmwError, UsageError
from tfmw.storage import bucket as bucket_module
from tfmw.storage import leased_object
from tfmw.storage.bucket import Bucket
from tfmw.storage.leased_object import Lost
from tfmw.train.checkpoint import evaluator
from tfmw.train.checkpoint.store import BackupStore, verify


@pytest.fixture(scope="module", params=["s3", *NIGHTLY])
def server(request):
    with pytest.MonkeyPatch.context() as patch, opened(request.param, patch) as found:
        yield found


@pytest.fixture
def url(server, request, monkeypatch, tmp_path):
    """A directory of backups in a bucket."""
    server.fault = lambda number, method, key: None
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    name = re.sub(r"\W", "-", request.node.name)
    yield f"{server.url}/{name}"
    server.fault = lambda number, method, key: None
    assert not list(tmp_path.iterdir()), "copies are left"


def write(store: BackupStore, step: int, value: int | None = None) -> None:
    value = step if value is None else value
    store.write(step, {"w": np.full(100, value, np.float32)}, {"value": value})


def newest(url: str) -> int | None:
    """The value of the newest backup, as another process sees it."""

    def read(backup):
        value: int = backup.record["value"]
        np.testing.assert_array_equal(backup.tensors()["w"], np.full(100, value, np.float32))
        return value

    store = BackupStore(url)
    found = store.newest_intact(read)
    store.files.forget()
    return found


def data_of(url: str) -> set[str]:
    """The directories that have objects."""
    return {name.split("/")[1].partition("-")[0] for name in Bucket(url).names("data")}


def test_two_backups_are_kept_and_a_step_is_replaced(url):
    store = BackupStore(url)
    assert newest(url) is None
    with store.locked():
        for step in (1, 2, 3):
            write(store, step)
            assert newest(url) == step
        write(store, 3, 33)
        assert newest(url) == 33
        assert store.steps() == [2, 3]
        assert verify(url) == verify(store.path_of(3)) == []
        assert data_of(url) == {"step_000000000002", "step_000000000003"}
        assert len(Bucket(url).names("data")) == 2 * 3
        write(store, 2, 22)  # the higher one is of an abandoned run
        assert newest(url) == 22
        store.clear()
        assert newest(url) is None
    assert Bucket(url).names().keys() == {"backups.json"}


@pytest.mark.parametrize("applied", [False, True])
@pytest.mark.parametrize("step", cases([1], [2]))
def test_a_writer_that_is_killed_at_any_request_leaves_a_whole_backup(
    url, server, monkeypatch, step, applied
):
    """The store refuses request N and all later ones, or loses the response of request N."""
    monkeypatch.setattr(leased_object, "TTL_S", 0.0)  # its lock stays; the next one waits so long
    points, failed = 0, True
    while failed:
        here = f"{url}/{points}"
        store = BackupStore(here)
        with store.locked():
            write(store, 1)
            first = len(server.requests) + 1 + points

            def fault(number, method, key, first=first):
                return None if number < first else "applied" if applied and number == first else 403

            server.fault = fault
            try:
                write(store, step, 22)
                failed = len(server.requests) >= first  # removals need not succeed
            except OSError:
                failed = True
            server.fault = lambda number, method, key: 403
        server.fault = lambda number, method, key: None
        successor = BackupStore(here)
        with successor.locked():
            assert newest(here) in ((1, 22) if failed else (22,))
            assert data_of(here) == {f"step_{n:012d}" for n in successor.steps()}
            write(successor, 3)
            assert newest(here) == 3
        assert verify(here) == []
        points += 1
    assert points > 4, "the requests of a write were not reached"


@pytest.mark.parametrize("action", [500, 503, "lost", "applied", "truncated"])
def test_requests_that_fail_once_are_repeated(url, server, action):
    failed = set()

    def fault(number, method, key):
        whole = action == "truncated" and not (method == "GET" and "/data/" in key)
        if whole or (method, key) in failed:
            return None
        failed.add((method, key))
        return action

    store = BackupStore(url)
    server.fault = fault
    with store.locked():
        for step in (1, 2, 3):
            write(store, step)
        assert newest(url) == 3
    assert len(failed) >= (3 if action == "truncated" else 9)
    assert data_of(url) == {"step_000000000002", "step_000000000003"}


def test_the_second_of_two_runs_is_refused(url, monkeypatch):
    monkeypatch.setattr(leased_object, "BEAT_S", 0.1)
    monkeypatch.setattr("tfmw.train.checkpoint.backup_files.BEAT_S", 0.1)
    first, second = BackupStore(url), BackupStore(url)
    with first.locked():
        write(first, 1)
        in_use = rf"is in use by another run \(process {os.getpid()} "
        with pytest.raises(UsageError, match=in_use), second.locked():
            pass
        write(first, 2)
    with second.locked():
        write(second, 3)
    assert newest(url) == 3


def test_a_run_that_was_paused_writes_nothing_after_another_began(url, monkeypatch, caplog):
    """The other one has taken over and has not written yet: its resume is what counts."""
    monkeypatch.setattr("tfmw.train.checkpoint.backup_files.BEAT_S", 1e6)
    paused, other = BackupStore(url), BackupStore(url)
    with contextlib.ExitStack() as stack:
        stack.enter_context(paused.locked())
        write(paused, 1)
        monkeypatch.setattr(leased_object, "TTL_S", 0.0)
        stack.enter_context(other.locked())
        with pytest.raises(Lost, match="another process has taken over"):
            write(paused, 2)
        assert newest(url) == 1
        write(other, 3)
        with pytest.raises(Lost):
            write(paused, 4)
        with pytest.raises(Lost):
            paused.files.remove(1)
        assert newest(url) == 3
    assert other.steps() == [1, 3]
    with BackupStore(url).locked():  # removes what the paused one has uploaded
        assert data_of(url) == {"step_000000000001", "step_000000000003"}


def test_training_goes_on_while_a_bucket_is_away(url, server, monkeypatch):
    store = BackupStore(url)
    with store.locked():
        write(store, 1)
        server.fault = lambda number, method, key: "lost"
        with monkeypatch.context() as patch:
            patch.setattr(bucket_module, "_RETRY_S", 0.5)  # only here: it really gives up
            patch.setattr(store.files, "_bucket", Bucket(url))
            with pytest.raises(OSError, match=r"cannot be written: the store does not respond"):
                write(store, 2)
        server.fault = lambda number, method, key: None
        assert newest(url) == 1
        write(store, 3)
        assert newest(url) == 3


def test_a_bucket_that_cannot_be_read_is_no_damaged_backup(url, server):
    """A run that cannot read its backups now does not resume from an older one, nor begin anew."""
    store = BackupStore(url)
    with store.locked():
        write(store, 1)
        write(store, 2)
    server.fault = lambda number, method, key: 403 if "data" in key else None
    with pytest.raises(TfmwError, match=r"cannot be read: access is denied") as error:
        newest(url)
    assert not [secret for secret in CREDENTIALS.values() if secret in str(error.value)]
    server.fault = lambda number, method, key: 403
    unusable = r"the backup directory cannot be used: \w+://.*denied"
    with pytest.raises(UsageError, match=unusable), BackupStore(url).locked():
        pass


@pytest.mark.parametrize("name", ["tensors.index", "record.json", "tensors.data-00000-of-00001"])
@pytest.mark.parametrize("change", ["removed", "changed", "shorter"])
def test_a_damaged_object_is_detected_and_the_previous_backup_is_used(url, caplog, name, change):
    store = BackupStore(url)
    with store.locked():
        write(store, 1)
        write(store, 2)
        bucket = Bucket(url)
        (target,) = (n for n in bucket.names("data") if "0002-" in n and n.endswith(f"/{name}"))
        content = bytearray(bucket.read(target)[0])  # type: ignore[index]
        bucket.remove([target])
        content[len(content) // 2] ^= 1
        if change != "removed":
            put(bucket, target, bytes(content)[: None if change == "changed" else -1])
        with caplog.at_level(logging.WARNING, "tfmw"):
            assert newest(url) == 1
        assert f"backup {store.path_of(2)} is damaged" in caplog.text
        (problem,) = verify(url)
        assert problem.startswith(f"backup {store.path_of(2)} is damaged")


@pytest.mark.process
@pytest.mark.parametrize("delete", [True, False])
def test_a_run_that_ends_may_remove_its_backups(url, delete):
    """Removes them while the process exits, which can start no thread."""
    program = f"""
import keras, numpy as np, tfmw
model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
backup = tfmw.callbacks.BackupAndRestore({url!r}, delete_checkpoint={delete})
tfmw.fit(model, np.ones((4, 1)), np.ones((4, 1)), epochs=3, callbacks=[backup])
"""
    status, output = run_command("python", "-c", program)
    assert status == 0, output
    assert len(data_of(url)) == (0 if delete else 2)


@pytest.mark.parametrize("name", ["../../outside", "/outside", "a/b", ""])
def test_a_list_of_other_files_is_refused(url, name):
    store = BackupStore(url)
    with store.locked():
        write(store, 1)
        ((_, entry),) = store.files._known().items()  # type: ignore[union-attr]
        entry["files"][name] = ["record.json", 1]
        store.files._write({1: entry})  # type: ignore[union-attr]
        with pytest.raises(TfmwError, match="is damaged: it lists a file that is none of a backup"):
            newest(url)


def test_backups_of_another_layout_are_neither_removed_nor_ignored(url):
    put(Bucket(url), "step_000000000001/record.json", b"{}")
    other = "has backups of an earlier version of tfmw, or copies"
    with pytest.raises(UsageError, match=other), BackupStore(url).locked():
        pass
    assert "step_000000000001/record.json" in Bucket(url).names()


def test_an_evaluator_needs_a_directory(url):
    with pytest.raises(
        UsageError, match=r"and backup_dir '\w+://.*' is in a bucket: use a directory"
    ):
        evaluator.watch(None, dict, url)
