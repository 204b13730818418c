"""Train with backups on a disk of 1 MB that fills up in between, and is cleared later.

backup_disk_full.py     its current directory is that disk
"""

import errno
import json
import logging
import os
from pathlib import Path
from typing import Any
from unittest import mock

import keras
import numpy as np

import tfmw
from tfmw.train.checkpoint import resume
from tfmw.train.checkpoint.store import BackupStore, verify

messages: list[str] = []


class Heard(logging.Handler):
    def emit(self, record):
        messages.append(record.getMessage())


logging.getLogger("tfmw").addHandler(Heard())

store = BackupStore("backups")
filler = Path("filler")
seen: dict[str, Any] = {}


class Disk(keras.callbacks.Callback):
    def __init__(self, backups):
        super().__init__()
        self._backups = backups

    def on_epoch_begin(self, epoch, logs=None):
        self._backups().wait()  # for the write that began at the end of the epoch before
        seen[str(epoch)] = {"steps": store.steps(), "problems": verify("backups")}
        if epoch == 2:
            with open(filler, "wb", buffering=0) as file:
                try:
                    while True:
                        file.write(bytes(4096))
                except OSError as e:
                    seen["full"] = e.errno == errno.ENOSPC
        if epoch == 4:
            filler.unlink()


# The run's own Backups, to await its writes.
made: list[resume.Backups] = []
init = resume.Backups.__init__


def noted_init(self, *args, **kwargs):
    made.append(self)
    init(self, *args, **kwargs)


mock.patch.object(resume.Backups, "__init__", noted_init).start()

keras.utils.set_random_seed(0)
model = keras.Sequential([keras.Input((50,)), keras.layers.Dense(200), keras.layers.Dense(1)])
model.compile("adam", "mse")
x: Any = np.ones((8, 50), np.float32)
tfmw.fit(
    model,
    x,
    x[:, :1],
    batch_size=4,
    epochs=6,
    verbose=0,
    callbacks=[
        Disk(lambda: made[0]),
        tfmw.callbacks.BackupAndRestore("backups", delete_checkpoint=False),
    ],
)
seen["left"] = {"names": sorted(os.listdir("backups")), "problems": verify("backups")}
print(json.dumps({"seen": seen, "messages": messages}))
