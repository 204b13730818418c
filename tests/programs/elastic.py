"""One member of elastic rounds; writes its weights, the examples of ended rounds, and its logs.

    elastic.py sync                  # rounds after each step: as one process
    elastic.py lose [with-backups [every=2,5 saved=14,11]] 1:25:steps 0:40:round

Members kill themselves: number of the member, its step of the run, and where: between two "steps";
in a "round", before anything is sent; or "after" one, before the record of it is sent. At "stop" it
is stopped, and at "leave" it gets SIGTERM.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfmw
from tests.programs._result import write
from tfmw.train.checkpoint.store import BackupStore
from tfmw.train.local_sgd import round_client
from tfmw.train.local_sgd.round_client import RoundClient

MEMBER = int(os.environ.get("TFMW_MEMBER", "0"))
RANDOM = np.random.default_rng(0)
# 7 batches of 17 and one of two examples: of three members one has none in the last step.
X = RANDOM.normal(size=(121, 6)).astype("float32")
Y = (X @ RANDOM.normal(size=(6, 1))).astype("float32") + 0.1
NUMBERS = np.arange(len(X))
EPOCHS = 5


def made(optimizer: Any = "adam", **compiled: Any) -> keras.Model:
    keras.utils.set_random_seed(3)
    layers = [keras.Input((6,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile(optimizer, "mse", **compiled)
    return model


class Noting(keras.Model):
    """Takes (number, x) in each row, and notes the numbers of its training steps."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = made()
        self.numbers: list[int] = []
        self.lost_at: list[tuple[int, str]] = []
        self.steps = 0
        self.all_present = False  # in the last round: never are all lost, unless at once
        self.backups: str | None = None
        self.saved_first = 1  # step of the backup that is on disk when it is lost

    def call(self, x: Any) -> Any:
        return self.inner(x)

    def train_step(self, data: Any) -> Any:
        (numbers, x), y = data
        if tf.executing_eagerly():
            self.die("steps")
            self.die("stop", signal.SIGSTOP)
            self.die("leave", signal.SIGTERM)
            self.numbers += numbers.numpy().tolist()
            self.steps += 1
        return super().train_step((x, y))

    def saved(self) -> int:
        newest = BackupStore(self.backups or "").newest()
        return 0 if newest is None else newest.step

    def die(self, where: str, by: int = signal.SIGKILL) -> None:
        if any(self.steps >= step and where == w for step, w in self.lost_at) and self.all_present:
            while self.backups and self.saved() < self.saved_first:
                time.sleep(0.05)  # it is still being written
            os.kill(os.getpid(), by)


def lose(losses: list[str]) -> dict[str, Any]:
    folder = Path(os.environ["TFMW_RESULT"]).parent
    first = not (folder / f"began_{MEMBER}").exists()
    (folder / f"began_{MEMBER}").touch()
    model = Noting()
    model.compile("adam", "mse", run_eagerly=True)
    chosen = [loss.split(":") for loss in losses if ":" in loss]
    model.lost_at = [(int(s), where) for m, s, where in chosen if first and int(m) == MEMBER]
    exchange = RoundClient.round

    def noted(client: RoundClient, *args: Any, **options: Any) -> Any:
        model.die("round")
        mean = exchange(client, *args, **options)
        model.all_present = mean.members == client.members
        with open(folder / f"ended_{MEMBER}", "a") as file:
            file.write(json.dumps([mean.members, mean.examples, model.numbers]) + "\n")
        model.numbers = []
        model.die("after")
        return mean

    round_client.RoundClient.round = noted  # type: ignore[assignment,method-assign]
    data = tf.data.Dataset.from_tensor_slices(((NUMBERS, X), Y))
    data = data.shuffle(len(X)).batch(17)  # one order for all members
    model.build((None, 6))
    backups = None
    if losses[:1] == ["with-backups"]:
        backups = folder / "backups"
        model.backups = str(backups / f"member_{MEMBER}")
    epochs = next((int(a[7:]) for a in losses if a.startswith("epochs=")), EPOCHS)
    # "every=2,5": steps between two backups of members 0 and 1.
    every = next((int(a[6:].split(",")[MEMBER]) for a in losses if a.startswith("every=")), "epoch")
    model.saved_first = next(
        (int(a[6:].split(",")[MEMBER]) for a in losses if a.startswith("saved=")), 1
    )
    history = tfmw.fit(
        model, data, epochs=epochs, sync=tfmw.LocalSGD(3), backup_dir=backups, backup_every=every
    )
    ended = [json.loads(line) for line in (folder / f"ended_{MEMBER}").read_text().splitlines()]
    return {
        "weights": [w.tolist() for w in model.get_weights()],
        "ended": ended,
        "epochs": history.epoch,
    }


def sync() -> dict[str, Any]:
    found = {}
    for name, options in {
        "numpy": {"x": X, "y": Y, "batch_size": 17},
        "dataset": {"x": tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(121).batch(17)},
    }.items():
        model = made(keras.optimizers.SGD(0.05))
        history = tfmw.fit(
            model,
            **options,
            epochs=3,
            shuffle=False,
            sync=tfmw.LocalSGD(1),
            validation_data=(X[:30], Y[:30]),
            verbose=0,
        )
        found[name] = {
            "weights": [w.tolist() for w in model.get_weights()],
            "val_loss": history.history["val_loss"],
        }
    compressed = made()
    tfmw.fit(compressed, X, Y, batch_size=17, epochs=3, sync=tfmw.LocalSGD(3, compression="int8"))
    found["int8"] = {"weights": [w.tolist() for w in compressed.get_weights()]}
    compiled = made(jit_compile=True)
    options = {
        "batch_size": 17,
        "epochs": 2,
        "sync": tfmw.LocalSGD(3),
        "precision": "mixed_bfloat16",
    }
    history = tfmw.fit(compiled, X, Y, **options)
    found["XLA, bf16"] = {
        "weights": [w.tolist() for w in compiled.get_weights()],
        "loss": history.history["loss"],
    }
    timed = made(run_eagerly=True)
    slow = keras.callbacks.LambdaCallback(on_train_batch_end=_pause)
    tfmw.fit(
        timed,
        X,
        Y,
        batch_size=17,
        epochs=6,
        sync=tfmw.LocalSGD("0.2 s", elastic=True),
        callbacks=[slow],
    )
    found["by time"] = {"weights": [w.tolist() for w in timed.get_weights()]}
    return found


def _pause(batch: int, logs: Any = None) -> None:
    """Member 0 is the slow one."""
    time.sleep(0.05 if MEMBER == 0 else 0.0)


if __name__ == "__main__":
    mode, *losses = sys.argv[1:]
    write(sync() if mode == "sync" else lose(losses))
