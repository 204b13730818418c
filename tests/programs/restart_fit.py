"""Trains a small model with backups and says each step: `restart_fit.py --backup_dir DIR`.

Each step prints "made step <n> <pid>", so that the parent can choose its moment; each result
carries the weights, bit for bit, and how often the model was trained on each example.

`--die worker:point:count,...` has one entry for each death, in order: that worker kills itself
(SIGKILL) when it reaches the point the count-th time since the last death. A point is a step, a
batch of validation, or the end of an epoch. It is also a backup or an export, written but not yet
in its place. With `:term` it sends itself SIGTERM there, with `:hold` it waits there for `--hold`
seconds. With `--hold_file` a worker waits at these points, and before it joins the cluster, while
the file names it (see `_hold.py`).
"""

import argparse
import functools
import hashlib
import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfmw
from tests.programs import _result
from tests.programs._hold import Hold
from tfmw.storage import directories, fence

EXAMPLES, BATCH = 96, 8


class SayStep(keras.callbacks.Callback):
    """Also counts validations, and each of its batches, in what is backed up."""

    def __init__(self):
        super().__init__()
        self.validations = [0, 0]

    def on_test_begin(self, logs=None):
        self.validations[0] += 1
        print(f"validation begins {os.getpid()}", flush=True)

    def on_test_batch_end(self, batch, logs=None):
        self.validations[1] = max(batch, self.validations[1])

    def on_train_batch_end(self, batch, logs=None):
        print(f"made step {int(self.model.optimizer.iterations)} {os.getpid()}", flush=True)


class Count(keras.layers.Layer):
    """Passes its input on, and counts each example in a variable that is backed up, too."""

    def build(self, shape):
        self.seen = self.add_weight(
            shape=(EXAMPLES,), initializer="zeros", trainable=False, name="seen"
        )

    def call(self, x, training=False):
        if training:
            self.seen.assign_add(keras.ops.sum(x[:, 4:], axis=0))
        return x[:, :4]


class Deaths:
    """The deaths of a plan; a file says of each in which attempt it has been."""

    def __init__(self, task: str, plan: str, hold_s: float):
        self.task = task
        self.plan = [f"{death}:kill".split(":")[:4] for death in plan.split(",") if death]
        self.hold_s = hold_s
        self.next, self.times = -1, 0  # the next death, and how often its point was reached

    def reached(self, point: str) -> None:
        folder = Path(os.environ["TFMW_RESULT"])
        done = len([*folder.glob("death_*")])
        if done != self.next:
            self.next, self.times = done, 0
        if done == len(self.plan) or [self.task, point] != self.plan[done][:2]:
            return
        attempt = int(os.environ.get("TFMW_ATTEMPT", 0))
        if done and self.plan[done - 1][3] == "term":  # all tasks are about to save and exit
            last = (folder / f"death_{done - 1}").read_text()
            if int(last or attempt) == attempt:
                return
        self.times += 1
        _, _, count, how = self.plan[done]
        if self.times == int(count):
            (folder / f"death_{done}").write_text(str(attempt))
            print(f"dies in {point}", flush=True)
            if how == "hold":
                threading.Event().wait(self.hold_s)
            else:
                os.kill(os.getpid(), signal.SIGTERM if how == "term" else signal.SIGKILL)


def before_each_replacement(at: Deaths | Hold) -> None:
    """Calls `at` before the directory of a backup or an export gets its name."""
    replace = directories.replace

    def watched(target: str, temporary: str) -> None:
        at.reached("backup" if os.path.basename(target).startswith("step_") else "export")
        replace(target, temporary)

    directories.replace = watched


def before_each_check(hold: Hold) -> None:
    """Holds before a written backup checks whether it may still get its name."""
    check = fence.check

    def watched() -> None:
        hold.reached("before backup")
        check()

    fence.check = watched


class Mortal(keras.callbacks.Callback):
    """The same callback in every process; a plan decides who dies."""

    def __init__(self, deaths: list[Deaths | Hold]):
        super().__init__()
        self._deaths = deaths

    def on_train_batch_end(self, batch, logs=None):
        for death in self._deaths:
            death.reached("step")

    def on_test_batch_end(self, batch, logs=None):
        for death in self._deaths:
            death.reached("validation")

    def on_epoch_end(self, epoch, logs=None):
        for death in self._deaths:
            death.reached("epoch")


def paused(seconds: float, x: tf.Tensor, y: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """An element of a pipeline that takes its time."""

    def wait() -> np.int64:
        return np.int64(threading.Event().wait(seconds))

    with tf.control_dependencies([tf.numpy_function(wait, [], tf.int64)]):
        return tf.identity(x), tf.identity(y)


def main() -> None:
    flags = argparse.ArgumentParser()
    flags.add_argument("--backup_dir")
    flags.add_argument("--export_dir")
    flags.add_argument("--backup_every", default="4 steps")
    flags.add_argument("--die", default="")
    flags.add_argument("--hold", type=float, default=0.0)
    flags.add_argument("--hold_file")
    flags.add_argument("--validation_pause", type=float, default=0.0, help="seconds per batch")
    flags.add_argument("--epochs", type=int, default=3)
    flags.add_argument("--collectives", default="auto")
    flags.add_argument("--sync", type=json.loads, default={}, help="arguments of DiLoCo, as JSON")
    options = flags.parse_args()
    holds = [Hold(options.hold_file)] if options.hold_file else []
    for hold in holds:
        before_each_replacement(hold)
        before_each_check(hold)
        hold.reached("rendezvous")
    tfmw.init(collectives=options.collectives)
    keras.utils.set_random_seed(3)
    x = np.random.default_rng(0).normal(size=(EXAMPLES, 4)).astype("float32")
    y = x @ np.array([[1.0], [-2.0], [0.5], [3.0]], "float32")
    one_hot: np.ndarray[Any, Any] = np.eye(EXAMPLES, dtype="float32")
    inputs = keras.Input((4 + EXAMPLES,))
    hidden = keras.layers.Dense(8, activation="tanh")(Count()(inputs))
    if not options.sync:  # with sync= a table is refused
        table = tfmw.layers.HashTableEmbedding(
            8, capacity=32, min_count=2, max_age=20, name="table"
        )
        hidden += table(keras.ops.argmax(inputs[:, 4:], axis=-1))
    hidden = keras.layers.Dropout(0.1)(hidden)
    model = keras.Model(inputs, keras.layers.Dense(1)(hidden))
    model.compile(keras.optimizers.Adam(0.02), "mse")
    dataset = tf.data.Dataset.from_tensor_slices((np.hstack([x, one_hot]), y))
    dataset = dataset.shuffle(EXAMPLES).batch(BATCH)
    everything = tf.data.Dataset.from_tensor_slices((np.hstack([x, one_hot]), y)).batch(24)
    deaths: list[Deaths | Hold] = [*holds]
    if options.die:
        task = os.environ["TFMW_TASK"].removeprefix("worker ")
        deaths.append(Deaths(task, options.die, options.hold))
        before_each_replacement(deaths[-1])
    if options.validation_pause:
        everything = everything.map(functools.partial(paused, options.validation_pause))
    say_step = SayStep()
    history = tfmw.fit(
        model,
        dataset,
        epochs=options.epochs,
        verbose=0,
        validation_data=everything,
        callbacks=[say_step, Mortal(deaths)],
        backup_dir=options.backup_dir,
        export_dir=options.export_dir,
        backup_every=options.backup_every,
        seed=11,
        sync=tfmw.DiLoCo(**options.sync) if options.sync else None,
    )
    digest = hashlib.sha256(b"".join(w.tobytes() for w in model.get_weights())).hexdigest()
    _result.write(
        {
            "weights": digest,
            "seen": [round(float(n), 3) for n in model.layers[1].seen.numpy()],
            "iterations": int(model.optimizer.iterations),
            "known_ids": 0 if options.sync else len(model.get_layer("table").known_ids()),
            "history": history.history,
            "validations": say_step.validations,
            "attempt": int(os.environ.get("TFMW_ATTEMPT", 0)),
        }
    )


if __name__ == "__main__":
    main()
