"""One run, killed where its flags say: resume_faults.py BACKUPS [PLACE@ATTEMPT:TASK...]

Places: "step N" after that training step; "restore" when the state is being restored; "part N" when
the task has written its part of its Nth backup, before the chief knows. "leave N" asks to leave
after that step instead. "apart": the task has another disk than the chief.

Workers shard the update of the weights: at each place each has its part of the optimizer's state.
They resume from the disk; with "copies" a worker is replaced alone, from copies in memory.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

import tfmw
from tests.programs import _result
from tests.programs._extremes import Extremes
from tests.programs.counting import Counts
from tfmw.cluster.cluster import REPLACES
from tfmw.train.checkpoint import resume, tensor_files
from tfmw.train.mirrored import sharded_update

N, BATCH, EPOCHS = 48, 12, 3  # 4 steps in an epoch; 12 can be sharded over 1, 2 and 3 workers

if "copies" not in sys.argv:
    os.environ.pop(REPLACES, None)
cluster = tfmw.init()
me = f"{os.environ.get('TFMW_ATTEMPT', '0')}:{cluster.index}"
places = [place for place, _, who in (f.partition("@") for f in sys.argv[2:]) if who == me]


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Die(keras.callbacks.Callback):
    made = 0
    reads_optimizer = False  # so its state may be in parts between steps

    def on_train_batch_end(self, batch, logs=None):
        step = int(self.model.optimizer.iterations)
        Die.made += 1
        if f"step {step}" in places:
            die()
        if f"leave {step}" in places:
            os.kill(os.getpid(), signal.SIGTERM)


class DiesInPart(tensor_files.SharedWrite):
    """The write of the task that dies there, not of the chief."""

    count = 0

    def write_part(self):
        with mock.patch.object(self._group, "post", self._die_or(self._group.post)):
            super().write_part()

    def _die_or(self, post):
        def posted(key, value):
            DiesInPart.count += 1
            if f"part {DiesInPart.count}" in places:
                die()
            post(key, value)

        return posted


mock.patch.object(tensor_files, "SharedWrite", DiesInPart).start()
mock.patch.object(resume, "SharedWrite", DiesInPart).start()  # a class whose method is called
directory = sys.argv[1] + (".of-this-host" if "apart" in places else "")
if "restore" in places:
    mock.patch.object(resume.Backups, "kept_by_replicas", side_effect=die).start()

rng = np.random.default_rng(0)
x: Any = rng.normal(size=(N, 4)).astype(np.float32)
x[:, 3] = np.arange(N)
y = x[:, :1] - 2 * x[:, 1:2]
keras.utils.set_random_seed(5)
model = keras.Sequential(
    [keras.Input((4,)), Counts(N), keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(1)]
)
model.compile(keras.optimizers.Adam(0.02), "mse", metrics=["mae", Extremes()])
history = tfmw.fit(
    model,
    tf.data.Dataset.from_tensor_slices((x, y)).shuffle(N).batch(BATCH),
    epochs=EPOCHS,
    verbose=0,
    seed=5,
    shard_optimizer=True,
    callbacks=[Die(), tfmw.callbacks.BackupAndRestore(directory, 3, delete_checkpoint=False)],
)
weights = [np.asarray(w) for w in model.get_weights()[1:]]
_result.write(
    {
        "bits": hashlib.sha256(b"".join(w.tobytes() for w in weights)).hexdigest(),
        "weights": [w.tolist() for w in weights],
        "counts": model.layers[0].counts.numpy().round(3).tolist(),
        "history": history.history,
        "made": Die.made,
        "update": sharded_update.description(model),
        "attempt": os.environ.get("TFMW_ATTEMPT"),
    }
)
