"""Predictions in files: the rows of Keras's `predict`, each once, also after a failure."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pyarrow.parquet
import pytest
import tensorflow as tf

import tfmw
from tests.helpers.cases import cases
from tests.programs import prediction_files as program
from tfmw.data import prediction_files
from tfmw.data.prediction_files import INDEX
from tfmw.errors import UsageError
from tfmw.storage import disk
from tfmw.train.mirrored import prediction_parts

X: Any = np.random.default_rng(0).normal(size=(31, 3)).astype("float32")


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prediction_parts, "PART_BYTES", 200)


def network(seed: int = 1) -> keras.Model:
    keras.utils.set_random_seed(seed)
    inputs = keras.Input((3,))
    scores = keras.layers.Dense(2)(inputs)
    return keras.Model(inputs, {"scores": scores, "first": scores[:, 0], "plus": scores > 0})


def batches(x: Any = X) -> tf.data.Dataset:
    texts = np.array([b"\x00", b"", "für".encode()] * 11, object)[:31]
    return tf.data.Dataset.from_tensor_slices((x, {"text": texts, "id": np.arange(31)})).batch(4)


def write(folder: Path, model: Any = None, x: Any = None, **more: Any) -> str:
    model, x = model or network(), batches() if x is None else x
    index: str = tfmw.predict(model, x, verbose=0, output_dir=folder, **more)
    return index


def read(folder: Path) -> dict[str, Any]:
    """The whole predictions by name."""
    groups = list(tfmw.data.read_predictions(folder))
    assert len(groups) > 1
    return {
        name: tf.concat([group[name] for group in groups], 0)
        if isinstance(groups[0][name], tf.RaggedTensor)
        else np.concatenate([group[name] for group in groups])
        for name in groups[0]
    }


def array(rows: list[Any]) -> Any:
    """An array of numbers or of bytes objects, without changes of the bytes."""
    first = rows[0][0] if isinstance(rows[0], list) else rows[0]
    return np.array(rows, object if isinstance(first, bytes) else None)


def by_parquet(folder: Path) -> dict[str, Any]:
    table = pyarrow.parquet.read_table(folder).sort_by("row")
    return {name: array(table[name].to_pylist()) for name in table.column_names}


def by_tfrecord(folder: Path) -> dict[str, Any]:
    rows = []
    for record in tf.data.TFRecordDataset(sorted(map(str, folder.glob("part-*.tfrecord")))):
        features = tf.train.Example.FromString(record.numpy()).features.feature
        rows.append({name: list(getattr(f, f.WhichOneof("kind")).value) for name, f in
                     features.items()})  # fmt: skip
    rows.sort(key=lambda row: row["row"])
    return {name: array([row[name] for row in rows]) for name in rows[0]}


READERS = {"npy": read, "parquet": by_parquet, "tfrecord": by_tfrecord}


@pytest.mark.parametrize("kind", READERS)
def test_files_have_the_rows_of_keras_with_their_keys(tmp_path: Path, kind: str) -> None:
    model = network()
    expected = keras.Model.predict(model, X, verbose=0)
    index = write(tmp_path, model, format=kind, keys=["id", "text"])
    assert index == str(tmp_path / INDEX)
    found = READERS[kind](tmp_path)
    assert sorted(found) == ["first", "id", "plus", "row", "scores", "text"]
    for name, rows in expected.items():
        np.testing.assert_allclose(found[name].reshape(rows.shape), rows, rtol=1e-6)
    assert found["row"].ravel().tolist() == found["id"].ravel().tolist() == list(range(31))
    assert list(found["text"].ravel()[:3]) == [b"\x00", b"", "für".encode()]


def test_outputs_of_changing_width_are_ragged(tmp_path: Path) -> None:
    layer = keras.layers.TextVectorization(vocabulary=list("abcdefg"))
    model = keras.Sequential([keras.Input((1,), dtype="string"), layer])
    texts = tf.data.Dataset.from_tensor_slices([["a"], ["b c"], ["d e f"], ["g"]]).batch(2)
    for kind in READERS:
        write(tmp_path / kind, model, texts, format=kind)
    expected = [[2, 0], [3, 4], [5, 6, 7], [8, 0, 0]]
    assert read(tmp_path / "npy")["predictions"].to_list() == expected
    table = pyarrow.parquet.read_table(tmp_path / "parquet").sort_by("row")
    assert table["predictions"].to_pylist() == expected


def test_small_floats_are_written_as_float32(tmp_path: Path) -> None:
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, dtype="bfloat16")])
    expected = np.asarray(keras.Model.predict(model, X, verbose=0), "float32")
    for kind, reader in READERS.items():
        write(tmp_path / kind, model, batches(), format=kind)
        np.testing.assert_array_equal(reader(tmp_path / kind)["predictions"], expected)


# ---- after a failure ---------------------------------------------------------------------------


class Killed(BaseException):
    pass


class Stops(keras.callbacks.Callback):
    """Notes the batches that begin; the process ends with one of them."""

    def __init__(self, batch: int | None = None) -> None:
        super().__init__()
        self.batch, self.begun = batch, list[int]()

    def on_predict_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self.batch is not None and batch >= self.batch:
            raise Killed
        self.begun.append(batch)


def shuffled() -> tf.data.Dataset:
    return batches().shuffle(31)


def generated() -> Iterator[Any]:
    for begin in range(0, 31, 4):
        yield X[begin : begin + 4], {"id": np.arange(begin, min(begin + 4, 31))}


def unknown() -> tf.data.Dataset:
    return batches().filter(lambda *_: True)


@pytest.mark.parametrize("make", [batches, shuffled, unknown, generated])
@pytest.mark.parametrize("stops", cases([0, 5], [1]))
def test_an_interrupted_call_continues_behind_its_last_part(
    tmp_path: Path, make: Any, stops: int
) -> None:
    """A part that was written and is not in the index is removed."""
    first, second, third = Stops(stops), Stops(), Stops()
    datasets = [make(), make(), make()]  # before the model has set a seed
    with pytest.raises(Killed):
        write(tmp_path, x=datasets[0], keys="id", callbacks=[first])
    with pytest.raises(UsageError, match="run the same script again"):
        next(tfmw.data.read_predictions(tmp_path))
    (tmp_path / "part-00000099-1-of-2").mkdir()
    write(tmp_path, x=datasets[1], keys="id", callbacks=[second])
    found = read(tmp_path)
    assert sorted(found["id"]) == list(range(31))
    assert found["row"].tolist() == list(range(31))
    rows = keras.Model.predict(network(), X, verbose=0)["scores"][found["id"]]
    np.testing.assert_allclose(found["scores"], rows, rtol=1e-6)
    assert second.begun[0] > 0 or stops < 1, "the first batch is not predicted again"
    assert not (tmp_path / "part-00000099-1-of-2").exists()
    write(tmp_path, x=datasets[2], keys="id", callbacks=[third])
    assert third.begun == [], "the files are complete"


def test_an_index_that_could_not_be_replaced_counts_no_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = prediction_files.write_index, itertools.count()

    def fails(*args: Any) -> None:
        if next(calls) == 2:
            raise Killed
        real(*args)

    monkeypatch.setattr(prediction_files, "write_index", fails)
    with pytest.raises(Killed):
        write(tmp_path, keys="id")
    committed = json.loads((tmp_path / INDEX).read_text())
    assert len(committed["parts"]) == 2
    assert len(list(tmp_path.glob("part-*"))) == 3
    write(tmp_path, keys="id")
    assert read(tmp_path)["id"].tolist() == list(range(31))


@pytest.mark.process
def test_a_killed_worker_leaves_each_row_once(run_cluster, tmp_path: Path) -> None:
    """Two workers continue on two, and others that were killed on one."""
    expected = keras.Model.predict(program.network(), program.dataset(), verbose=0)
    names = [text.decode() for _, y in program.dataset() for text in y["name"].numpy()]
    restarted, alone = tmp_path / "restarted", tmp_path / "alone"
    for folder in (restarted, alone):
        folder.mkdir()
    options = ["--max-restarts", "1"]
    chief, other = run_cluster("prediction_files.py", str(restarted), "9", options=options)
    assert chief == other
    assert 0 < chief["begun"][0] <= 9
    run_cluster("prediction_files.py", str(alone), "9", status=1)
    model = program.network()
    write(alone / "out", model, program.dataset(), keys=["name"])
    for folder in (restarted, alone):
        assert (folder / "killed").exists()
        found = read(folder / "out")
        np.testing.assert_allclose(found["dense"], expected["dense"], rtol=1e-6)
        assert found["ragged"].to_list() == expected["ragged"].to_list()
        assert found["text"].tolist() == expected["text"].tolist()
        assert [name.decode() for name in found["name"]] == names
    parts = json.loads((alone / "out" / INDEX).read_text())["parts"]
    assert {part["name"][-4:] for part in parts} == {"of-1", "of-2"}


@pytest.mark.nightly
@pytest.mark.process
def test_new_processes_write_the_files(tmp_path: Path) -> None:
    index = write(tmp_path, workers=2, keys="id")
    assert index == str(tmp_path / INDEX)
    assert read(tmp_path)["id"].tolist() == list(range(31))
    names = [part["name"] for part in json.loads((tmp_path / INDEX).read_text())["parts"]]
    assert {name[-6:] for name in names} == {"0-of-2", "1-of-2"}


# ---- what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "names"),
    [
        ({"model": network(2)}, "the weights differ"),
        ({"x": batches(X + 1)}, "the data differ"),
        ({"x": batches().unbatch().batch(5)}, "the data and the batch size differ"),
        ({"x": batches().shuffle(31, seed=4)}, "the data differ"),
        ({"keys": ["id"]}, "keys differ"),
        ({"format": "parquet"}, "format differ"),
        ({"steps": 2}, "steps differ"),
    ],
)
def test_another_call_does_not_continue_these_files(
    tmp_path: Path, changed: dict[str, Any], names: str
) -> None:
    with pytest.raises(Killed):
        write(tmp_path, callbacks=[Stops(3)])
    with pytest.raises(UsageError, match=f"has predictions of another call: {names}. Name anoth"):
        write(tmp_path, **changed)


def test_two_runs_do_not_write_to_one_directory(tmp_path: Path) -> None:
    with (
        disk.file_lock(str(tmp_path / "_lock")),
        pytest.raises(UsageError, match=r"the directory .* is in use by another run"),
    ):
        write(tmp_path)


class Doubled(keras.layers.Layer):
    def call(self, x: Any) -> Any:
        return tf.concat([x, x], 0)


class Sparse(keras.Model):
    def call(self, x: Any) -> Any:
        return tf.sparse.from_dense(x)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": Sparse()}, "'predictions' is a sparse tensor"),
        ({"model": keras.Sequential([Doubled()])}, "has 8 rows for 4 examples"),
        ({"keys": ["none"]}, r"no feature 'none': expected .* \['id', 'text'\]"),
        ({"x": tf.data.Dataset.from_tensor_slices(X).batch(4), "keys": ["id"]}, "has no dict"),
        ({"format": "csv"}, "unknown format 'csv': expected 'npy', 'parquet', 'tfrecord'"),
        ({"x": tfmw.data.at_most_once(batches())}, "tf.data's service, which has no positions"),
    ],
)
def test_what_cannot_be_written_is_refused(
    tmp_path: Path, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        write(tmp_path, **arguments)


def test_an_example_holds_no_float64(tmp_path: Path) -> None:
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, dtype="float64")])
    with pytest.raises(UsageError, match=r"'predictions' is float64, which a tf.train.Example"):
        write(tmp_path, model, format="tfrecord")


def test_a_url_is_refused() -> None:
    for url in ("s3://bucket/predictions", "gs://bucket/predictions"):
        with pytest.raises(UsageError, match=r"no prediction can be written .*storage.upload"):
            tfmw.predict(network(), X, output_dir=url)


def test_keys_and_formats_are_for_files() -> None:
    with pytest.raises(UsageError, match="without output_dir="):
        tfmw.predict(network(), X, keys=["id"])
