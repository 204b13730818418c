"""Every character that a file system allows: in backups, exports, tables and logs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfmw
from tests.checkpoint.test_sharded_backups import SLOT, Two
from tests.checkpoint.test_tensor_files import Run
from tests.helpers.cluster import tfmw_command
from tests.tables.test_row_files import looked_up, one_process, table_of  # noqa: F401
from tfmw.callbacks import BackupAndRestore
from tfmw.cluster.group import Group
from tfmw.errors import UsageError
from tfmw.tables.row_files import RowFiles
from tfmw.train.checkpoint import resume
from tfmw.train.checkpoint.resume import Backups
from tfmw.train.checkpoint.store import BackupStore, Damaged, verify
from tfmw.train.saved_model import check_path, export, verify_export

LOADABLE = [
    "a space",
    "ünïcödé 日本\u2028",
    "50% %s %(name)s {a,b}",
    "a new\nline",
    "tab\t, return\r, bell\a",
    "'one' and \"two\"",
    "st*r and **",
    "what?",
    "[open",
    "#;&|<>$HOME`~=@10!",
    "-leading",
]
PATTERNS = ["[draft]", "back\\slash", "[[]"]
EVERY = "-a %s [draft] '\"*?\\日\n"


@pytest.fixture
def model():
    return keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])


class ChangesDirectory(keras.callbacks.Callback):
    def __init__(self, to: Path):
        super().__init__()
        self.to = to

    def on_train_batch_end(self, batch, logs=None):
        os.chdir(self.to)


def test_a_callback_may_change_the_working_directory(tmp_path, monkeypatch, model):
    """Relative paths are those of the directory in which they were received."""
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    monkeypatch.chdir(here)
    (here / "records.txt").write_text("1 2\n3 4\n5 6\n")

    def parsed(line):
        row = tf.strings.to_number(tf.strings.split(line))
        return tf.reshape(row, [2]), row[:1]

    data = (
        tfmw.data.from_records("records.txt", kind="text", index_dir="index").map(parsed).batch(1)
    )
    model.compile("sgd", "mse")
    tfmw.fit(
        model,
        data,
        epochs=2,
        verbose=0,
        callbacks=[
            ChangesDirectory(there),
            BackupAndRestore("backups", save_freq=1, delete_checkpoint=False),
        ],
        export_dir="export",
    )
    assert list(there.iterdir()) == []
    assert sorted(path.name for path in (here / "backups").glob("step_*"))[-1].endswith("06")
    assert verify_export(here / "export") == []


@pytest.mark.parametrize("name", [*LOADABLE, *PATTERNS])
def test_what_is_written_is_read(tmp_path, name, model):
    folder = tmp_path / name
    if name in LOADABLE:
        run = Run(folder)
        for _ in range(3):
            run.write()
        np.testing.assert_array_equal(run.newest().tensors()["table"], run.files.rows)
        assert verify(run.store.path) == []

    parts = Two(folder / "parts")
    chief, worker = parts.begin()
    worker.write_part()
    parts.write(chief)
    found = parts.store.newest()
    assert found is not None
    np.testing.assert_array_equal(found.tensors()["slot"], SLOT)

    values = tf.random.stateless_normal([500, 4], [1, 2])
    files = RowFiles({"table": table_of(values, [0, 201, 500])})
    files.write(str(folder))
    np.testing.assert_array_equal(looked_up(files, folder, [0, 499]), values.numpy()[[0, 499]])


def test_backups_that_servers_could_not_read_are_refused(tmp_path, monkeypatch, model):
    for name in PATTERNS:
        backups = Backups(Group(0, 1), BackupAndRestore(tmp_path / name))
        backups.restore(model, 4)
        with monkeypatch.context() as patched:
            patched.setattr("tfmw.train.checkpoint.resume.is_table", lambda variable: True)
            with pytest.raises(UsageError, match="on parameter servers takes for a pattern"):
                backups.restore(model, 4)
        run = Run(tmp_path / name)
        run.write()
        with pytest.raises(Damaged, match="Failed to find any matching files"):
            run.newest().tensors()  # the limit is that of TensorFlow's RestoreV2


def test_leftovers_are_removed(tmp_path):
    """A killed process leaves files beside an export of any name."""
    for name in ("new\nline", "star*"):
        leftover = tmp_path / f".{name}.writing-0123456789ab"
        leftover.mkdir()
        export(keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]), tmp_path / name)
        assert not leftover.exists(), name


@pytest.mark.parametrize("name", LOADABLE)
def test_tensorflow_loads_an_export(tmp_path, name, model):
    check_path(tmp_path / name)
    export(model, tmp_path / name)
    assert verify_export(tmp_path / name) == []
    served = tf.saved_model.load(str(tmp_path / name))
    np.testing.assert_allclose(served.serve(tf.ones([1, 2])), model(np.ones([1, 2])))


@pytest.mark.parametrize("name", PATTERNS)
def test_export_that_tensorflow_could_not_load_is_refused(tmp_path, name, model):
    with pytest.raises(UsageError, match=r"for a pattern.*Name a directory without them"):
        export(model, tmp_path / name)
    x: Any = np.ones([4, 2], "f")
    model.compile("sgd", "mse")
    before = model.get_weights()
    with pytest.raises(UsageError, match="for a pattern"):
        tfmw.fit(model, x, x[:, :1], verbose=0, export_dir=tmp_path / name)
    np.testing.assert_equal(model.get_weights(), before)
    assert not (tmp_path / name).exists()

    tf.saved_model.save(tf.train.Checkpoint(v=tf.Variable(1.0)), str(tmp_path / name))
    with pytest.raises(Exception, match="Failed to find any matching files"):
        tf.saved_model.load(str(tmp_path / name))  # the limit is TensorFlow's


def test_names_that_tensorflow_cannot_open_are_refused(tmp_path):
    with pytest.raises(UsageError, match="is not UTF-8"):
        BackupStore(tmp_path / "\udcff")
    with pytest.raises(UsageError, match=r"expected a local directory, or s3://, gs:// or az://"):
        BackupStore("hdfs://host/backups")
    with pytest.raises(UsageError, match="is not UTF-8"):
        check_path(tmp_path / "\udcff")


@pytest.mark.filterwarnings("ignore:__array__ implementation")  # Keras, of a variable
def test_fit_resumes_from_any_directory(tmp_path, model, monkeypatch):
    """One run with everything that it writes below a directory of every odd character."""
    folder = tmp_path / EVERY
    model.compile("adam", "mse")
    x: Any = np.ones([8, 2], "f")

    def fit(epochs: int, model: keras.Model) -> dict[str, list[float]]:
        board = keras.callbacks.TensorBoard(str(folder / "board"))
        trace = tfmw.callbacks.Trace(str(folder / "trace"))
        history = tfmw.fit(
            model,
            x,
            x[:, :1],
            batch_size=4,
            epochs=epochs,
            verbose=0,
            callbacks=[board, trace],
            backup_dir=folder / "backups",
        )
        logs: dict[str, list[float]] = history.history
        return logs

    first = fit(1, model)
    again = keras.models.clone_model(model)
    again.compile("adam", "mse")
    monkeypatch.setattr(resume, "_run", lambda: "another process")
    second = fit(2, again)
    assert second["loss"][:1] == first["loss"], "it resumed"
    assert len(second["loss"]) == 2
    assert list((folder / "board").rglob("events.*"))
    assert any((folder / "trace").iterdir())
    assert verify(folder / "backups") == []


def test_logs_of_a_run(tmp_path):
    program = tmp_path / EVERY / "a program [1].py"
    program.parent.mkdir()
    program.write_text("print('it ran', __file__.endswith('[1].py'))")
    logs = tmp_path / "logs" / EVERY
    options = ["run", "--workers", "1", "--log-dir", str(logs)]
    with tfmw_command(*options, str(program), env={"TFMW_NO_INIT": "1"}) as run:
        output, _ = run.communicate(timeout=600)
    assert run.returncode == 0, output
    assert "it ran True" in output
    (log,) = logs.rglob("output.log")
    assert "it ran True" in Path(log).read_text()
