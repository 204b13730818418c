"""A cell that is interrupted: an endless fit on two workers, then a look at what is left.

With the argument "without" it has no `backup_dir`; with "stay" its workers stay, and train again.
"""

from __future__ import annotations

import os
import sys
import tempfile
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfmw
from tests.helpers.cluster import children, template_and_copies


class SayWhenBackedUp(keras.callbacks.Callback):
    """Prints once a backup is complete, which the parent waits for."""

    chief_only = True

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = folder

    def on_epoch_end(self, epoch, logs=None) -> None:
        if not self.folder or any(name.startswith("step_") for name in os.listdir(self.folder)):
            print("backed up", flush=True)


def main() -> None:
    x = np.random.default_rng(0).normal(size=(64, 3)).astype("float32")
    dataset = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(8)
    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    before = model.get_weights()[0].copy()
    stays = sys.argv[1:] == ["stay"]
    workers: Any = tfmw.Workers(2) if stays else 2
    processes = workers.run(os.getpid) if stays else []
    with tempfile.TemporaryDirectory() as folder:
        try:
            tfmw.fit(
                model,
                dataset,
                epochs=100_000,
                workers=workers,
                verbose=0,
                callbacks=[SayWhenBackedUp("" if sys.argv[1:] else folder)],
                backup_dir=None if sys.argv[1:] else folder,
                backup_every="epoch",
            )
        except (KeyboardInterrupt, SystemExit) as stopped:
            print(repr(stopped))
            changed = not np.array_equal(before, model.get_weights()[0])
            print(f"iterations {int(model.optimizer.iterations)} changed {changed}")
    if stays:
        steps = int(model.optimizer.iterations)
        workers.fit(model, dataset, verbose=0)
        print("same processes", workers.run(os.getpid) == processes)
        print("trained again", int(model.optimizer.iterations) == steps + 8)
        workers.close()
    left = children(os.getpid())
    waiting, _ = template_and_copies(left)  # for the next run
    print("no child left" if left == waiting else "children left")


if __name__ == "__main__":
    main()
