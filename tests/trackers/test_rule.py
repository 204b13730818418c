"""Rule for callbacks that log to a tracker; none of these trackers is imported."""

from __future__ import annotations

import types
from typing import Any

import keras
import pytest
import tensorflow as tf

from tfmw.observe.trackers import logs_to_tracker


def module(name: str) -> Any:
    found: Any = types.ModuleType(name)
    found.Run = type("Run", (), {"__module__": f"{name}.sdk", "log": lambda self, logs: None})
    found.log = types.FunctionType((lambda logs: None).__code__, {}, "log")
    found.log.__module__ = name
    return found


wandb = module("wandb")
tracker = module("neptune")


class Plain(keras.callbacks.Callback):
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.last = dict(logs or {}, epoch=epoch)


class NamesModule(keras.callbacks.Callback):
    """W&B and MLflow are silent on the other tasks; of another tracker, `chief_only` says it."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        wandb.log(logs)


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


class OfPackage(keras.callbacks.Callback):
    __module__ = "aim.keras"


def trial(storage: str) -> Any:
    """A trial of Optuna, of a study in this kind of storage."""
    made = type("Trial", (), {"__module__": "optuna.trial._trial"})()
    made.storage = type(storage, (), {"__module__": "optuna.storages"})()
    return made


class OwnClient:
    """A client of no known library, recognized by its methods."""

    def log_metric(self, name: str, value: float) -> None: ...


class SummaryWriter:
    """A class named as in TensorFlow, tensorboardX and PyTorch."""


class OwnBoard(SummaryWriter):
    pass


class LogsItself(keras.callbacks.Callback):
    """A callback that has such a method, and holds no client."""

    def log_metric(self, name: str) -> None: ...


# As the libraries' own callbacks for Keras are made, in 2024 and 2025.


def of_comet() -> keras.callbacks.Callback:
    """comet_ml.integration.keras: a class of the package, which holds the experiment."""
    base = type("CometBaseKerasCallback", (keras.callbacks.Callback,), {"__module__": "comet_ml.k"})
    return type("Own", (base,), {"__module__": "__main__"})()


def of_neptune() -> keras.callbacks.Callback:
    """neptune_tensorflow_keras: of a package of its own, which holds a handler of the run."""

    class NeptuneCallback(keras.callbacks.Callback):
        __module__ = "neptune_tensorflow_keras.impl"

    return NeptuneCallback()


def of_aim() -> keras.callbacks.Callback:
    """aim.sdk.adapters.keras: a method makes the callback's class, which begins the run later."""

    def on_epoch_end(self: Any, epoch: int, logs: Any = None) -> None:
        self._run.track(logs)

    members = {"__module__": "aim.sdk.adapters.keras", "on_epoch_end": on_epoch_end}
    return type("KerasCallback", (keras.callbacks.Callback,), members)()


def of_dvclive() -> keras.callbacks.Callback:
    """dvclive.keras: holds a `Live`; users inherit from it."""

    class Live:
        __module__ = "dvclive.live"

    class Own(keras.callbacks.Callback):
        def __init__(self) -> None:
            super().__init__()
            self.live = Live()

    return Own()


@pytest.mark.parametrize(
    "make",
    [
        Holds,
        lambda: Given(tracker.Run()),
        Inherits,
        OfPackage,
        lambda: Given(OwnClient()),
        lambda: Given(OwnBoard()),
        lambda: Given(trial("_CachedStorage")),
        of_comet,
        of_neptune,
        of_aim,
        of_dvclive,
        lambda: Given(tf.summary.create_noop_writer()),
    ],
)
def test_callbacks_that_log(make: Any) -> None:
    assert logs_to_tracker(make())


@pytest.mark.parametrize(
    "make",
    [
        Plain,
        lambda: Given(trial("InMemoryStorage")),
        NamesModule,
        LogsItself,
        keras.callbacks.EarlyStopping,
        keras.callbacks.History,
        keras.callbacks.SwapEMAWeights,
        lambda: keras.callbacks.LearningRateScheduler(lambda epoch: 0.1),
        lambda: keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: print(epoch)),
    ],
)
def test_callbacks_that_do_not(make: Any) -> None:
    assert not logs_to_tracker(make())
