"""Trains on parameter servers and says how far it is, so that a test knows when to kill what.

ps_faulty.py [--epochs=8] [--steps=50] [--backup=DIR] [--result=FILE] [--pause=2,4]
             [--phases=both,any,one,free,both] [--validate]

After each epoch in --pause it waits for a line on its standard input. With --phases, each phase
lasts until an epoch to which so many workers have contributed, and a line is waited for after each.
"free" lasts until there is a line. With --say FILE these lines are in "FILE.<attempt>", as
supervised tasks have no standard input. With --validate an evaluator has something to evaluate.
"""

import argparse
import json
import logging
import os
import sys
import threading
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import tfmw

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=8)
parser.add_argument("--steps", type=int, default=50)
parser.add_argument("--backup")
parser.add_argument("--result")
parser.add_argument("--pause", default="")
parser.add_argument("--phases", default="")
parser.add_argument("--say")
parser.add_argument("--validate", action="store_true")
options = parser.parse_args()
phases = [
    p for p in options.phases.split(",") if p
]  # not the callback's: a backup would restore it
read_lines: list[str] = []


def line_is_there() -> bool:
    """Whether `next_line` with --say would not wait."""
    path = Path(f"{options.say}.{os.environ['TFMW_ATTEMPT']}")
    return path.exists() and len(path.read_text().splitlines()) > len(read_lines)


def next_line() -> None:
    """Waits for a line from the test."""
    if options.say is None:
        sys.stdin.readline()
        return
    while not line_is_there():
        tfmw.report_progress(0)
        threading.Event().wait(0.05)
    read_lines.append("")


print(f"{os.environ.get('TFMW_TASK')} is process {os.getpid()}", flush=True)
logging.basicConfig(level=logging.INFO, format="%(message)s")
logging.getLogger("tensorflow").setLevel(logging.WARNING)
cluster = tfmw.init()


class Say(keras.callbacks.Callback):
    def on_train_begin(self, logs=None):
        print(f"training begins at {int(self.model.optimizer.iterations)}", flush=True)

    def on_train_batch_end(self, batch, logs=None):
        print(f"batch {batch}", flush=True)

    def on_epoch_end(self, epoch, logs=None):
        print(f"epoch {epoch + 1} ends at {int(self.model.optimizer.iterations)}", flush=True)
        if str(epoch + 1) in options.pause.split(","):
            next_line()
        workers = "both" if 0 < logs["by_worker_1"] < 1 else "one"
        if phases and (phases[0] in (workers, "any") or (phases[0] == "free" and line_is_there())):
            print(f"phase over: {phases.pop(0)}, epoch {epoch}", flush=True)
            self.model.stop_training = not phases
            next_line()


def read(context):
    """This worker's pipeline; the last feature tells which worker it is."""
    mine = np.concatenate([x, np.full([len(x), 1], context.input_pipeline_id, "float32")], axis=1)
    return tf.data.Dataset.from_tensor_slices((mine, y)).shuffle(1000).batch(48)


class Model(keras.Sequential):
    """A model that reports the share of its batches that worker 1 processed."""

    def build(self, input_shape=None):
        super().build(input_shape)
        self.by_worker_1 = keras.metrics.Mean(name="by_worker_1")

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        self.by_worker_1.update_state(x[:, -1])
        return super().compute_metrics(x, y, y_pred, sample_weight)


rng = np.random.default_rng(0)
x = rng.normal(size=(960, 20)).astype(np.float32)
y = x[:, :3].argmax(axis=1).astype(np.int64)
keras.utils.set_random_seed(1)
model = Model(
    [
        keras.Input((21,)),
        keras.layers.Lambda(lambda t: t[:, :20]),
        keras.layers.Dense(64, activation="relu"),
        keras.layers.Dense(3),
    ]
)
model.compile(
    keras.optimizers.Adam(0.01),
    keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)
history = tfmw.fit(
    model,
    read,
    epochs=options.epochs,
    steps_per_epoch=options.steps,
    callbacks=[Say()],
    backup_dir=options.backup,
    verbose=0,
    validation_data=(np.pad(x, ((0, 0), (0, 1))), y) if options.validate else None,
)
if cluster.task == "evaluator":
    sys.exit()
result = {
    "iterations": int(model.optimizer.iterations.numpy()),
    "accuracy": history.history["accuracy"],
    "by_worker_1": history.history["by_worker_1"],
    "evaluated": tfmw.evaluate(model, np.pad(x, ((0, 0), (0, 1))), y, verbose=0, return_dict=True)[
        "accuracy"
    ],
}
print(json.dumps(result), flush=True)
if options.result:
    Path(options.result).write_text(json.dumps(result))
