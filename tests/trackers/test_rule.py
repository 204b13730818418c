"""Which callbacks log to a tracker; none of these trackers is imported."""

from __future__ import annotations

import types
from typing import Any

import keras
import pytest

from tfmw.trackers import logs_to_tracker


def module(name: str) -> Any:
    found: Any = types.ModuleType(name)
    found.Run = type("Run", (), {"__module__": f"{name}.sdk", "log": lambda self, logs: None})
    found.log = types.FunctionType((lambda logs: None).__code__, {}, "log")
    found.log.__module__ = name
    return found


wandb = module("wandb")
tracker = module("neptune")
send = tracker.log


class Plain(keras.callbacks.Callback):
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.last = dict(logs or {}, epoch=epoch)


class NamesModule(keras.callbacks.Callback):
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        wandb.log(logs)


class NamesFunction(keras.callbacks.Callback):
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        send(logs)


class ImportsInside(keras.callbacks.Callback):
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        import comet_ml  # type: ignore[import-not-found]

        comet_ml.log(logs)


class WithinHelper(keras.callbacks.Callback):
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        def each(name: str) -> None:
            wandb.log({name: (logs or {})[name]})

        list(map(each, logs or ()))


class Holds(keras.callbacks.Callback):
    def __init__(self) -> None:
        super().__init__()
        self.client = tracker.Run()


class Given(keras.callbacks.Callback):
    def __init__(self, client: Any) -> None:
        super().__init__()
        self.client = client

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.client.log(logs)


class Inherits(Holds):
    pass


def lambda_callback() -> keras.callbacks.Callback:
    run = tracker.Run()
    return keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: run.log(logs))


class OfPackage(keras.callbacks.Callback):
    __module__ = "aim.keras"


@pytest.mark.parametrize(
    "make",
    [
        NamesModule,
        NamesFunction,
        ImportsInside,
        WithinHelper,
        Holds,
        lambda: Given(tracker.Run()),
        Inherits,
        lambda_callback,
        OfPackage,
    ],
)
def test_callbacks_that_log(make: Any) -> None:
    assert logs_to_tracker(make())


@pytest.mark.parametrize(
    "make",
    [
        Plain,
        keras.callbacks.EarlyStopping,
        keras.callbacks.History,
        keras.callbacks.SwapEMAWeights,
        lambda: keras.callbacks.LearningRateScheduler(lambda epoch: 0.1),
        lambda: keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: print(epoch)),
    ],
)
def test_callbacks_that_do_not(make: Any) -> None:
    assert not logs_to_tracker(make())


class FakeRun:
    """A run of W&B, as far as the numbers of its rows are concerned."""

    id = "run7"
    step = 0

    def __init__(self, folder: Any) -> None:
        self.settings = types.SimpleNamespace(sync_dir=str(folder), mode="offline")


def test_a_chief_on_another_host_numbers_its_rows_as_the_first_one(tmp_path: Any) -> None:
    from tfmw.trackers.wandb_run import _Rows

    rows = _Rows(FakeRun(tmp_path / "offline-run-1-run7"))
    assert not rows.numbered  # W&B numbers them
    rows.go_on_at(40)  # from the backup
    assert [rows.place(None, None) for _ in range(2)] == [(40, True), (41, True)]
    assert rows.place(None, False) == (42, True)  # the row is not complete
    assert rows.place(None, True) == (42, True)
    assert rows.next_step == 43
