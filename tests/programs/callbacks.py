"""Callbacks on a cluster: `callbacks.py MODE FOLDER`. Each task writes what it saw."""

import hashlib
import sys
import warnings
from pathlib import Path
from typing import Any

import keras
import numpy as np

import tfmw
from tests.matrix.rows.common import classes, compiled, mlp
from tests.programs import _result

mode, folder = sys.argv[1], Path(sys.argv[2])
cluster = tfmw.init()

task = cluster.index


def sha(model: Any) -> str:
    return hashlib.sha256(b"".join(w.tobytes() for w in model.get_weights())).hexdigest()


keras.utils.set_random_seed(1)
model = compiled(mlp(), keras.optimizers.SGD(0.1))  # one for all calls: it is traced once
first_weights = model.get_weights()


def fit(callbacks: list[Any], epochs: int = 4, **options: Any) -> dict[str, Any]:
    """Trains the model anew; returns what must be the same on every task, and warnings."""
    model.set_weights(first_weights)
    model.optimizer.iterations.assign(0)
    model.optimizer.learning_rate = 0.1
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        history = tfmw.fit(
            model, classes(), epochs=epochs, verbose=0, callbacks=callbacks, **options
        )
    return {
        "epochs": history.epoch,
        "rate": float(model.optimizer.learning_rate.numpy()),
        "history": {k: np.asarray(v).tolist() for k, v in history.history.items()},
        "iterations": int(model.optimizer.iterations.numpy()),
        "sha": sha(model),
        "warnings": [str(w.message) for w in caught],
    }


class OwnClock(keras.callbacks.Callback):
    """Wants to stop on one task only."""

    def __init__(self, on: int, hook: str):
        super().__init__()
        self.on, self.hook = on, hook

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.hook == "batch" and task == self.on and batch == 2:
            self.model.stop_training = True

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self.hook == "epoch" and task == self.on and epoch == 1:
            self.model.stop_training = True


class OwnWeights(keras.callbacks.Callback):
    """Changes weights, and the learning rate, on one task only."""

    def __init__(self, on: int):
        super().__init__()
        self.on = on

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if task == self.on and epoch == 1:
            self.model.set_weights([w + 1 for w in self.model.get_weights()])
            self.model.optimizer.learning_rate = 0.05


class Shas(keras.callbacks.Callback):
    """Keeps the weights after each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.seen.append(sha(self.model))


class Breaks(keras.callbacks.Callback):
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if task == 1:
            raise ValueError("the callback of task 1 is broken")


class Counting(keras.callbacks.Callback):
    """Writes, through one writer, and counts its calls."""

    chief_only = True

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.calls += 1


class OwnClient:
    """A client of no known tracker."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def log_metric(self, step: int) -> None:
        self.rows.append(step)


class NeptuneRun:
    """A stand-in for the run of a known tracker."""

    __module__ = "neptune.metadata_containers.run"

    def __init__(self) -> None:
        self.rows: list[int] = []

    def append(self, step: int) -> None:
        self.rows.append(step)


class Logs(keras.callbacks.Callback):
    """Logs to a client that it was made with, as the callbacks of Comet, Neptune and Aim do."""

    def __init__(self, client: OwnClient | NeptuneRun, method: str) -> None:
        super().__init__()
        self.client = client
        self.method = method  # its code names no tracker

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        getattr(self.client, self.method)(epoch)


def decisions() -> dict[str, Any]:
    """Keras's callbacks that decide, and users' own."""
    best = keras.callbacks.EarlyStopping("loss", mode="max", patience=1, restore_best_weights=True)
    first = Shas()
    out = {"early": fit([first, best]), "first epoch": first.seen[0]}
    plateau = keras.callbacks.ReduceLROnPlateau("loss", mode="max", factor=0.5, patience=1)
    out["plateau"] = fit([plateau])
    schedule = keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.1 / (epoch + 1))
    out["schedule"] = fit([schedule])
    for on in (0, 1):
        for hook in ("batch", "epoch"):
            out[f"stop {on} {hook}"] = fit([OwnClock(on, hook)])
        out[f"weights {on}"] = fit([OwnWeights(on)])
    out["plain"] = fit([])
    without_numbers = compiled(mlp(), keras.optimizers.SGD(float("nan")))
    terminate = keras.callbacks.TerminateOnNaN()
    history = tfmw.fit(without_numbers, classes(), epochs=3, verbose=0, callbacks=[terminate])
    out["nan epochs"] = history.epoch
    return out


def writers() -> dict[str, Any]:
    """Each task writes to a folder of its own, so that it shows who writes."""
    mine = folder / str(task)
    mine.mkdir()
    calls: list[int] = []
    counting, third_party = Counting(), Counting()
    third_party.chief_only = None  # type: ignore[assignment]
    sent: list[Any] = []
    monitor = keras.callbacks.RemoteMonitor(root="http://192.0.2.1")
    monitor.on_epoch_end = lambda epoch, logs=None: sent.append(epoch)
    clients: list[OwnClient | NeptuneRun] = [NeptuneRun(), OwnClient()]
    runs: list[str] = []
    of_keras = keras.Model.fit

    def begins_a_run(model: keras.Model, *args: Any, **kwargs: Any) -> Any:
        runs.append(model.name)
        return of_keras(model, *args, **kwargs)

    keras.Model.fit = begins_a_run  # as autologging does
    out = fit(
        [
            keras.callbacks.ModelCheckpoint(
                str(mine / "{epoch}.weights.h5"), save_weights_only=True
            ),
            keras.callbacks.ModelCheckpoint(str(mine / "best.keras"), "loss", save_best_only=True),
            keras.callbacks.CSVLogger(str(mine / "log.csv")),
            keras.callbacks.TensorBoard(str(mine / "board")),
            keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: calls.append(epoch)),
            monitor,
            counting,
            tfmw.callbacks.ChiefOnly(third_party),
            *map(Logs, clients, ["append", "log_metric"]),
        ],
        epochs=2,
    )
    keras.Model.fit = of_keras
    files = sorted(str(p.relative_to(mine)) for p in mine.rglob("*") if p.is_file())
    again = None
    if "best.keras" in files:
        loaded = keras.models.load_model(mine / "best.keras")
        again = sha(loaded)
    return {
        "fit": out,
        "files": files,
        "csv": (mine / "log.csv").read_text() if "log.csv" in files else "",
        "calls": [calls, sent, counting.calls, third_party.calls],
        "logged": [client.rows for client in clients],
        "runs": len(runs),
        "loaded": again,
    }


if mode == "breaks":
    fit([Breaks()])
else:
    _result.write({"decisions": decisions, "writers": writers}[mode]())
