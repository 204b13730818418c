"""Calls that users leave in a script: `model.fit`, and saving a model on every worker.

model_fit.py fit|save FOLDER
"""

import sys
import warnings
from pathlib import Path
from typing import Any

import keras
import numpy as np

import tfmw
from tests.programs import _result

mode, folder = sys.argv[1], Path(sys.argv[2])
cluster = tfmw.init()
x: Any = np.arange(32, dtype="float32").reshape(16, 2)
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
if mode == "fit":
    model.fit(x, x[:, :1], verbose=0)
    _result.write({"trained": "alone"})


class Saving(keras.callbacks.Callback):
    """A callback as tuners have: saves on every worker, to one path."""

    def on_epoch_end(self, epoch, logs=None):
        self.model.save_weights(folder / "epoch.weights.h5")


class SavingOwn(keras.callbacks.Callback):
    chief_only = False

    def on_epoch_end(self, epoch, logs=None):
        self.model.save_weights(folder / f"own_{cluster.index}.weights.h5")


def warned(call):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(w.message) for w in caught if "tfmw" in str(w.message)]


def train(callback):
    tfmw.fit(model, x, x[:, :1], epochs=2, verbose=0, callbacks=[callback])


def save_and_load():
    """Saves and loads as scripts of one process do, on every worker and at one path."""
    for _ in range(5):
        model.save(folder / "all.keras")
        model.save_weights(folder / "all.weights.h5")
        loaded = keras.models.load_model(folder / "all.keras")
        loaded.load_weights(folder / "all.weights.h5")
        for mine, read in zip(model.get_weights(), loaded.get_weights(), strict=True):
            np.testing.assert_array_equal(read, mine)


_result.write(
    {
        "in fit": warned(lambda: train(Saving())),
        "own": warned(lambda: train(SavingOwn())),
        "after": warned(lambda: model.save(folder / f"{cluster.index}.keras")),
        "all": warned(save_and_load),
        "alone": warned(lambda: tfmw.fit(model, x, x[:, :1], verbose=0, strategy="default")),
        "files": sorted(p.name for p in folder.iterdir()),
    }
)
