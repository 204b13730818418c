"""Runs on each source that are left, and continued by another launch on other workers.

resume_sources.py DIRECTORY leave|continue NAME...

`leave` tells the run of each source to leave after step 6, and kills a worker in the last one.
Sources: scenarios of resume_scenarios.py.
"""

import os
import signal
import sys

import keras

import tfmw
from tests.programs import _result
from tests.programs.resume_scenarios import SCENARIOS, Interrupt, cluster, counts_of, plain
from tfmw.errors import Preempted

STEPS = 6


class Die(keras.callbacks.Callback):
    """Kills the last worker."""

    def __init__(self, active: bool):
        super().__init__()
        self._active = lambda: active  # no attribute, which would be restored

    def on_train_batch_end(self, batch, logs=None):
        if self._active() and cluster.index == cluster.num_workers - 1:
            if int(self.model.optimizer.iterations) == STEPS + 1:
                os.kill(os.getpid(), signal.SIGKILL)


folder, phase, *names = sys.argv[1:]
found = {}
for name in names:
    keras.utils.set_random_seed(7)
    model = plain()
    leaves, dies = (phase == "leave" and (name == names[-1]) == last for last in (False, True))
    callbacks = [Interrupt(STEPS if leaves else None, lose=False), Die(dies)]
    try:
        history = tfmw.fit(
            model,
            **SCENARIOS[name].fit(),
            epochs=3,
            verbose=0,
            seed=7,
            callbacks=callbacks,
            backup_dir=f"{folder}/{name}",
            backup_every=2,
        )
        found[name] = {"losses": history.history["loss"], "counts": counts_of(model)}
    except Preempted:
        found[name] = {"left": int(model.optimizer.iterations)}
_result.write(found)
