"""Train on TFDS data sets through `tfmw.data.tfds`, noting the examples: tfds_epochs.py FOLDER.

FOLDER/many and FOLDER/one hold the data set "numbers", in several files and in one. Of the several
files each task gets a copy without those that are not its own.
"""

import shutil
import sys
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

import tfmw
from tests.programs import _result

folder = Path(sys.argv[1])
cluster = tfmw.init()
own = folder / f"own {cluster.index}"
shutil.copytree(folder / "many", own)
for number, file in enumerate(sorted(own.rglob("*.tfrecord-*"))):
    if number % cluster.num_workers != cluster.index:
        file.unlink()

seen: list[list[int]] = []


class Recorder(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.head = keras.layers.Dense(1)

    def call(self, x: Any) -> Any:
        return self.head(tf.cast(x, tf.float32)[:, None])

    def train_step(self, data: Any) -> Any:
        x, y = data  # 0 is the example of a replica that has none
        tf.py_function(lambda v: seen[-1].extend(v.numpy()[v.numpy() > 0].tolist()), [x], [])
        return super().train_step((x, tf.cast(y, tf.float32)))


class NewEpoch(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        seen.append([])


def train(data_dir: Path, split: str = "train", shuffle: int = 50) -> list[list[int]]:
    """Examples that this task saw, by epoch."""
    seen.clear()
    model = Recorder()
    model.compile(keras.optimizers.SGD(1e-6), loss="mse")
    data = tfmw.data.tfds("numbers", split, 10, shuffle=shuffle, data_dir=data_dir)
    tfmw.fit(model, data, epochs=2, verbose=0, callbacks=[NewEpoch()])
    return list(seen)


_result.write(
    {
        "own files": train(own),
        "in order": train(own, shuffle=0),
        "one file": train(folder / "one"),
        "part of one file": train(folder / "one", "train[10:40]"),
        "one example": train(folder / "one", "train[:1]"),
    }
)
