"""Trains by model.fit: lost_workers.py KIND [held] [kill|stop|machine:WORKER:EPOCH:STEP..].

KIND is arrays, dataset, plain, whose model has the same numbers on any number of workers, or local:
by DiLoCo. Workers end as told; with `machine` the files with copies of their state end, too. Each
of these happens once: a file says that it has. With `held` the chief's backups are on disk only
after a new worker has made a step. With `early:WORKER` this worker dies at its start in the second
and the third attempt.
"""

import functools
import hashlib
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

import tfmw
from tests.programs._result import write
from tfmw.compat import memory, models
from tfmw.train.checkpoint.store import BackupStore

folder, index = Path(os.environ["TFMW_RESULT"]), int(os.environ["TFMW_TASK"].split()[1])
ends_of_workers = [what for what in sys.argv[2:] if ":" in what]
is_new = any(folder.glob(f"*_{index}_*"))
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "machine": signal.SIGKILL}


if f"early:{index}" in sys.argv and os.environ["TFMW_ATTEMPT"] in ("1", "2"):
    os.kill(os.getpid(), signal.SIGKILL)


class Ends(keras.callbacks.Callback):
    """Ends this process in the middle of an epoch."""

    reads_optimizer = False  # so that its state may be in shards between steps

    def __init__(self) -> None:
        super().__init__()
        self.epoch = 0
        self.has_shards = False
        self.seen: list[float] = []  # state of a callback, which a new worker continues

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append(float(logs["loss"]))
        slots = map(models.native, self.model.optimizer.variables)
        self.has_shards = any(map(memory.is_freed, slots))
        if is_new:
            (folder / "continued").touch()
        for what in ends_of_workers:
            how, *when = what.split(":")
            done = folder / what.replace(":", "_")
            if when == [str(index), str(self.epoch), str(batch)] and not done.exists():
                done.touch()
                if how == "machine":
                    for copy in Path(os.environ["TFMW_STATE_FOLDER"]).glob(f"*-{index}-*"):
                        copy.unlink()
                os.kill(os.getpid(), SIGNALS[how])


def held(store, *written, **named):
    while not (folder / "continued").exists():
        time.sleep(0.02)
    return write_backup(store, *written, **named)


if "held" in sys.argv:
    write_backup = BackupStore.write
    mock.patch.object(BackupStore, "write", held).start()

traces = 0  # number of graphs of steps that contain the model


class Traced(keras.layers.Dense):
    """A layer that counts the traces of this process."""

    def call(self, inputs):
        global traces
        traces += tf.inside_function()
        return super().call(inputs)


keras.utils.set_random_seed(3)
layers = keras.layers
model = keras.Sequential([keras.Input((6,)), Traced(16)])
is_random = sys.argv[1] != "plain"
if is_random:
    model.add(layers.BatchNormalization())
if sys.argv[1] == "dataset":  # a layer whose state no step updates, which a first trace cannot know
    model.add(layers.Normalization())
if is_random:
    model.add(layers.Dropout(0.3))
model.add(layers.Dense(3))
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])
random = np.random.default_rng(0)
x, y = random.normal(size=(83, 6)).astype("f"), random.integers(0, 3, 83)
ends = Ends()
data: dict[str, Any] = {"x": x, "y": y, "batch_size": 12}
if sys.argv[1] == "dataset":
    data = {"x": tf.data.Dataset.from_tensor_slices((x, y)).shuffle(50).batch(12)}
# In a process without others, or restarts, model.fit is Keras's own.
is_keras = os.environ["TFMW_LOCAL_TASKS"] == "1" and "TFMW_STATE_FOLDER" not in os.environ
fit = functools.partial(tfmw.fit, model) if is_keras else model.fit
if sys.argv[1] == "local":
    fit = functools.partial(tfmw.fit, model, sync=tfmw.DiLoCo(every=3, compression="int8"))
validation = x[:20], y[:20]
history = fit(**data, epochs=4, verbose=0, callbacks=[ends], validation_data=validation)
score = tfmw.evaluate(model, x, y, verbose=0)
state = [*model.get_weights(), *(np.asarray(v.value) for v in model.optimizer.variables)]
write(
    {
        "pid": os.getpid(),
        "traces": traces,
        "state": hashlib.sha256(b"".join(value.tobytes() for value in state)).hexdigest(),
        "history": history.history,
        "seen": ends.seen,
        "has_shards": ends.has_shards,
        "state_folder": os.environ.get("TFMW_STATE_FOLDER"),
        "score": score,
    }
)
