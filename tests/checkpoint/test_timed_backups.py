"""Backups by time, wherever the time is up: between steps, in validations, after epochs."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import tfmw
from tfmw.callbacks import BackupAndRestore
from tfmw.cluster.group import Group
from tfmw.train.checkpoint.resume import Backups
from tfmw.train.checkpoint.schedule import BackgroundWriter
from tfmw.train.checkpoint.store import BackupStore


class EveryBatch(keras.callbacks.Callback):
    """Acts between batches, so that each is a call of its own."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        pass

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        pass


@pytest.fixture
def saved(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    """(step, "epoch" or "validation" if within one) of each backup, in order."""
    found: list[tuple[int, str]] = []
    write = BackupStore.write

    def noted(
        store: BackupStore, step: int, tensors: Any, record: dict[str, Any], *parts: Any
    ) -> Any:
        within = "validation" if record["logs"] else "epoch" if record["feed"]["begun"] else ""
        found.append((step, within))
        return write(store, step, tensors, record, *parts)

    monkeypatch.setattr(BackupStore, "write", noted)
    return found


TIMES = (datetime.timedelta(microseconds=1), "continuous")


@pytest.mark.parametrize("every", TIMES, ids=str)
def test_where_the_time_is_always_up_each_call_of_steps_is_followed_by_a_backup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved: list[tuple[int, str]], every: Any
) -> None:
    monkeypatch.setattr(BackgroundWriter, "busy", False)
    x: Any = np.random.default_rng(0).normal(size=(12, 3)).astype(np.float32)

    def trained(**backups: Any) -> Any:
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("adam", "mse")
        tfmw.fit(
            *(model, x, x[:, :1]),
            batch_size=4,
            epochs=2,
            verbose=0,
            validation_data=(x, x[:, :1]),
            validation_batch_size=4,
            callbacks=[EveryBatch()],
            **backups,
        )
        return model.get_weights()

    with_backups = trained(backup_dir=tmp_path, backup_every=every)
    np.testing.assert_equal(with_backups, trained())
    # Once in a validation, as it begins anew in a resumed run; at the end the run is done.
    epochs = [[(n, "epoch"), (n + 1, "epoch"), (n + 2, "validation"), (n + 2, "")] for n in (1, 4)]
    assert saved == [*epochs[0], *epochs[1]]


def test_time_is_counted_from_the_begin_of_the_last_backup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    backups = Backups(Group(0, 1), BackupAndRestore(tmp_path, "10 s"), clock=lambda: now[0])
    with backups:
        due = []
        for now[0] in (9.9, 10.0, 12.0):
            due.append(backups.signals()[1])
        monkeypatch.setattr(BackgroundWriter, "busy", True)
        due.append(backups.signals()[1])
    assert due == [0.0, 1.0, 1.0, 0.0], "not while the last backup is being written"


def test_continuous_backups_begin_when_the_last_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    backups = Backups(Group(0, 1), BackupAndRestore(tmp_path, "continuous"), clock=lambda: now[0])
    with backups:
        due = [backups.signals()[1]]
        monkeypatch.setattr(BackgroundWriter, "busy", True)
        due.append(backups.signals()[1])
        monkeypatch.setattr(BackgroundWriter, "busy", False)
        due.append(backups.signals()[1])
        backups._not_written(OSError("no space left"))
        for now[0] in (9.9, 10.0):  # a full disk is not tried, and logged, all the time
            due.append(backups.signals()[1])
    assert due == [1.0, 0.0, 1.0, 0.0, 1.0]
