"""Trains slowly, on any number of hosts, and reports each step: `hosts_fit.py --backup_dir DIR`.

The results do not depend on the number of workers, except to rounding. The means of the ids of all
examples and of their squares, over an epoch, show that each was trained on as often.

With `--go FILE` steps are slow, and the last epoch does not begin, before the file exists.
"""

import argparse
import contextlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np

import tfmw
from tests.programs import _result

EXAMPLES, BATCH = 96, 12


class Report(keras.callbacks.Callback):
    """Prints each step, and takes its time."""

    def __init__(self, pause_s: float, go: str | None):
        super().__init__()
        self._pause_s = pause_s
        self._go = go

    def on_epoch_begin(self, epoch, logs=None):
        while self._go and epoch == self.params["epochs"] - 1 and not Path(self._go).exists():
            tfmw.report_progress(int(self.model.optimizer.iterations))
            threading.Event().wait(0.05)

    def on_train_batch_end(self, batch, logs=None):
        print(f"step {int(self.model.optimizer.iterations)} at {time.monotonic()}", flush=True)
        if not (self._go and Path(self._go).exists()):
            threading.Event().wait(self._pause_s)


def loss(y, predicted):
    return keras.ops.mean(keras.ops.square(y[:, :1] - predicted), axis=-1)


def ids(y, predicted):
    return y[:, 1]


def squares(y, predicted):
    return y[:, 1] ** 2


@contextlib.contextmanager
def tracked(store: str | None) -> Iterator[list[Any]]:
    """Callbacks that log to a run of MLflow; none without a store."""
    if store is None:
        yield []
        return
    import mlflow

    mlflow.set_tracking_uri(f"sqlite:///{store}")
    with contextlib.suppress(mlflow.MlflowException):  # another worker has made it
        mlflow.create_experiment("hosts", (Path(store).parent / "artifacts").as_uri())
    mlflow.set_experiment("hosts")
    with mlflow.start_run():
        yield [mlflow.keras.MlflowCallback()]


def main() -> None:
    flags = argparse.ArgumentParser()
    flags.add_argument("--backup_dir")
    flags.add_argument("--log", help="folder of files by CSVLogger")
    flags.add_argument("--board", help="TensorBoard's folder")
    flags.add_argument("--mlflow", help="MLflow's store in SQLite")
    flags.add_argument("--export_dir")
    flags.add_argument("--epochs", type=int, default=3)
    flags.add_argument("--pause", type=float, default=0.0, help="seconds after each step")
    flags.add_argument("--go")
    flags.add_argument("--local", action="store_true", help="by local SGD")
    options = flags.parse_args()
    tfmw.init()
    keras.utils.set_random_seed(3)
    x = np.random.default_rng(0).normal(size=(EXAMPLES, 4)).astype("float32")
    y = np.hstack([x @ np.array([[1.0], [-2.0], [0.5], [3.0]]), np.arange(EXAMPLES)[:, None]])
    hidden = keras.layers.Dense(8, activation="tanh")(inputs := keras.Input((4,)))
    model = keras.Model(inputs, keras.layers.Dense(1)(hidden))
    model.compile(keras.optimizers.Adam(0.02), loss, metrics=[ids, squares])
    report = Report(options.pause, options.go)
    callbacks: list[Any] = [report]
    for name in ("anew", "append") if options.log else ():
        logger = keras.callbacks.CSVLogger(f"{options.log}/{name}.csv", append=name == "append")
        callbacks.append(logger)
    if options.board:
        callbacks.append(keras.callbacks.TensorBoard(options.board, write_graph=False))
    with tracked(options.mlflow) as loggers:
        history = tfmw.fit(
            model,
            x,
            y.astype("float32"),
            batch_size=BATCH,
            epochs=options.epochs,
            verbose=0,
            callbacks=[*callbacks, *loggers],
            backup_dir=options.backup_dir,
            export_dir=options.export_dir,
            backup_every=6,  # so that steps are made again across the end of an epoch of 8
            seed=11,
            sync=tfmw.LocalSGD(3) if options.local else None,
        )
    _result.write(
        {
            "weights": [w.tolist() for w in model.get_weights()],
            "history": history.history,
            "attempt": int(os.environ.get("TFMW_ATTEMPT", 0)),
            "run": os.environ["TFMW_RUN_ID"],
        }
    )


if __name__ == "__main__":
    main()
