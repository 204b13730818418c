"""Train on TFDS data sets through `tfmw.data.tfds`, noting the examples: tfds_epochs.py FOLDER.

FOLDER/many and FOLDER/one hold the data set "numbers", in several files and in one. Each task gets
a copy of the several files without those of the other task.
"""

import shutil
import sys
from pathlib import Path

import keras

import tfmw
from tests.programs import _result
from tests.programs.recording import NewEpoch, Recorder, seen

folder = Path(sys.argv[1])
cluster = tfmw.init()
own = folder / f"own {cluster.index}"
shutil.copytree(folder / "many", own)
for number, file in enumerate(sorted(own.rglob("*.tfrecord-*"))):
    if number % cluster.num_workers != cluster.index:
        file.unlink()


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
