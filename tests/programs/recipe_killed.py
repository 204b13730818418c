"""A recipe whose workers die, one after the other: recipe_killed.py RECIPE WORKER:STEP,... [FLAGS]

Each worker reads buckets under an id of its own, so that the test's store can tell them apart.
"""

import hashlib
import os
import runpy
import signal
import sys
from pathlib import Path
from unittest import mock

import keras

import tfmw
from tests.programs import _result

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
cluster = tfmw.init()
recipe, kills, *flags = sys.argv[1:]
folder = Path(os.environ["TFMW_RESULT"])
os.environ["AWS_ACCESS_KEY_ID"] = f"worker-{cluster.index}"
fit = tfmw.fit


class Dies(keras.callbacks.Callback):
    """Ends the process at its place."""

    reads_optimizer = False

    def on_train_batch_end(self, batch, logs=None):
        place = f"{cluster.index}:{int(self.model.optimizer.iterations)}"
        done = folder / f"killed_{place}"
        if place in kills.split(",") and not done.exists():
            done.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def fit_killed(model, data, **arguments):
    history = fit(model, data, callbacks=[Dies()], backup_every="2 steps", seed=3, **arguments)
    weights = b"".join(weight.tobytes() for weight in model.get_weights())
    digest = hashlib.sha256(weights).hexdigest()
    _result.write({"weights": digest, "history": history.history})
    return history


mock.patch.object(tfmw, "fit", fit_killed).start()
keras.utils.set_random_seed(3)
sys.path.insert(0, str(RECIPES))
sys.argv = [recipe, *flags]
runpy.run_path(str(RECIPES / recipe), run_name="__main__")
