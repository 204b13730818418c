"""Files that a script makes, which two tasks run: `script_files.py ADDRESS FOLDER`.

The events of the server let each task come to a line at the worst moment.
"""

from __future__ import annotations

import os
import shutil
import sys
import zipfile
from pathlib import Path
from typing import Any

import h5py
import keras
import numpy as np

import tfmw
from tests.programs import _result
from tests.programs._events import add, meet, wait_briefly_for, wait_for

FOLDER = Path(sys.argv[2])
IS_FIRST = os.environ["TFMW_TASK"] == "worker 0"
NAME = os.environ["TFMW_TASK"].replace(" ", "_")


def asked_for() -> Any:
    """Worker 1 finds the directory half-made, if it may."""
    data = FOLDER / "asked_for"
    if not IS_FIRST:
        wait_for("begins")
        add("asks")
    if not data.exists():
        data.mkdir()
        add("begins")
        wait_for("asks")
        wait_briefly_for("has read")
        (data / "a.txt").write_text("a")
    files = os.listdir(data)
    add("has read")
    return files


def removed_by_both() -> Any:
    """Worker 1 comes with an old answer, and finds the new directory of worker 0."""
    logs = FOLDER / "old_logs"
    if os.path.exists(logs):
        meet("found")
        if not IS_FIRST:
            wait_for("made")
        shutil.rmtree(logs)
    os.makedirs(logs)
    (logs / NAME).touch()
    add("made")
    wait_for("made", 2)
    return sorted(os.listdir(logs))


def removed_if_there() -> Any:
    """One task has made the directory that another one would remove."""
    logs = FOLDER / "logs"
    if os.path.exists(logs):
        shutil.rmtree(logs)
    os.makedirs(logs)
    (logs / NAME).touch()
    model.train_on_batch(x, y)
    return sorted(os.listdir(logs))


def file_removed() -> Any:
    """Both have found the file."""
    history = FOLDER / "history.csv"
    if history.exists():
        meet("found the file")
        history.unlink()
    return history.exists()


def used_for_a_while() -> Any:
    """Each task makes and removes the same directory, again and again."""
    found = []
    for _ in range(3):
        if not IS_FIRST:
            wait_for("worker 0 has removed it")
        os.mkdir(FOLDER / "work")
        shutil.rmtree(FOLDER / "work")
        found.append((FOLDER / "work").exists())
    add("worker 0 has removed it")
    return found


def extracted() -> Any:
    """Worker 1 comes to the archive when worker 0 has removed one of its files."""
    data = FOLDER / "extracted"
    if not IS_FIRST:
        wait_for("extracted")
    with zipfile.ZipFile(FOLDER / "files.zip") as archive:
        archive.extractall(data)
    if IS_FIRST:
        (data / "b.txt").unlink()
    add("extracted")
    return sorted(os.listdir(data))


def copied() -> Any:
    """Worker 1 comes to the copy when worker 0 has it."""
    if not IS_FIRST:
        wait_for("copied")
    returned = shutil.copytree(FOLDER / "archive", FOLDER / "copy")
    add("copied")
    return [str(returned), sorted(os.listdir(returned))]


def moved() -> Any:
    """Worker 1 chooses files when worker 0 has moved some."""
    if not IS_FIRST:
        wait_for("moves")
    for name in sorted(os.listdir(FOLDER / "archive"))[:2]:
        shutil.move(FOLDER / "archive" / name, FOLDER / "validation" / name)
        add("moves")
    return [sorted(os.listdir(FOLDER / name)) for name in ("archive", "validation")]


def moved_its_own() -> Any:
    """Each task writes a file and renames it."""
    (FOLDER / f".{NAME}").touch()
    os.replace(FOLDER / f".{NAME}", FOLDER / NAME)
    return (FOLDER / NAME).exists()


def written_with_a_lock() -> Any:
    """A file of HDF5 that another task has open cannot be opened."""
    if not IS_FIRST:
        wait_for("opened")
    with h5py.File(FOLDER / "numbers.h5", "w") as file:
        add("opened")
        if IS_FIRST:
            wait_briefly_for("opened", 2)
        file["x"] = [1, 2]
    return True


def directory_alone() -> Any:
    """No task waits for the next call of another one."""
    if not os.path.exists(FOLDER / "directory"):
        os.makedirs(FOLDER / "directory")
    meet("has a directory")
    return True


def made_by_another() -> Any:
    """Worker 1 waits for a file, which worker 0 makes only then."""
    flag = FOLDER / "flag"
    if IS_FIRST:
        wait_for("asks again")
        if not flag.exists():
            flag.write_text("set")
    else:
        while not flag.exists():
            add("asks again")
    return flag.exists()


class Stop(keras.callbacks.Callback):
    """Ends the training when somebody has made a file."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if (FOLDER / "stop").exists():
            self.model.stop_training = True


def asked_in_callbacks() -> Any:
    """Tasks that train wait for each other's gradients, and for nothing else."""
    arguments: Any = {"batch_size": 2, "epochs": 2, "verbose": 0, "callbacks": [Stop()]}
    trained = model.fit(x, y, **arguments), tfmw.fit(model, x, y, **arguments)
    return [len(history.epoch) for history in trained]


def exported() -> Any:
    """The chief writes the export, for which worker 1 waits."""
    if not os.path.exists(FOLDER / "export"):
        add("exports")
    model.export(FOLDER / "export", verbose=False)
    return os.path.exists(FOLDER / "export/saved_model.pb")


x: Any = np.ones((8, 2), "float32")
y: Any = np.ones((8, 1), "float32")
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
results = {}
for kind in (
    asked_for,
    removed_by_both,
    removed_if_there,
    file_removed,
    used_for_a_while,
    extracted,
    copied,
    moved,
    moved_its_own,
    written_with_a_lock,
    directory_alone,
    made_by_another,
    asked_in_callbacks,
    exported,
):
    results[kind.__name__] = kind()
    model.train_on_batch(x, y)
_result.write(results)
