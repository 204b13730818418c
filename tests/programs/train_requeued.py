"""Train as a job of Slurm that is told to leave the first time: train_requeued.py FOLDER.

After the second epoch of the first run the chief asks Slurm for the signal that precedes a time
limit, and waits for it. The chief ends last: `srun` ends it because of the other task's status.
"""

import atexit
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np

import tfmw

folder = Path(sys.argv[1])
cluster = tfmw.init()
restarts = os.environ.get("SLURM_RESTART_COUNT", "0")
if cluster.is_chief:
    with (folder / "restarts").open("a") as file:
        file.write(f"{restarts}\n")


def wait_until_srun_ends_this_task() -> None:
    # The signal is ignored by now, so the log, which srun writes, is all there is to go by.
    deadline = time.monotonic() + 60
    while "srun: launch/slurm: _step_signal: Terminating" not in (folder / "log").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)


class Told(keras.callbacks.Callback):
    chief_only = True

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if restarts != "0" or epoch != 1:
            return
        came = threading.Event()
        handle = signal.getsignal(signal.SIGTERM)
        assert callable(handle)

        def note(number: int, frame: Any) -> None:
            came.set()
            handle(number, frame)

        signal.signal(signal.SIGTERM, note)
        # Not checked: the signal is for all processes of the job, scancel among them.
        command = ["scancel", "--signal=TERM", os.environ["SLURM_JOB_ID"]]
        subprocess.run(command, check=False)
        assert came.wait(60)
        atexit.register(wait_until_srun_ends_this_task)


x: Any = np.random.default_rng(0).normal(size=(24, 3)).astype("float32")
model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
tfmw.fit(
    model,
    x,
    x[:, :1],
    batch_size=8,
    epochs=10,
    verbose=0,
    callbacks=[Told()],
    backup_dir=folder / "backups",
)
if cluster.is_chief:
    (folder / "done").write_text(json.dumps({"iterations": int(model.optimizer.iterations)}))
