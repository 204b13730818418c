"""SavedModels: equal predictions elsewhere, their names, and whole directories only."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfmw
from tests.helpers.cluster import LEAN, PROGRAMS, run_cluster, run_command
from tfmw import Cluster, UsageError
from tfmw.train.saved_model import MANIFEST, check_path, export
from tfmw.train.saved_model import verify_export as verify

ENVIRON = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2", "PYTHONPATH": str(LEAN)}

A = [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]
B = [[0.5, 1.0], [1.5, 2.0]]


class Subclassed(keras.Model):
    """No get_config, no training argument, a single output without a name."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(2)

    def call(self, pixels):
        return self.dense(pixels)


class SubclassedDict(keras.Model):
    """A dict in, a dict out, and layers that act otherwise in training."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(2)
        self.norm = keras.layers.BatchNormalization()
        self.dropout = keras.layers.Dropout(0.5)

    def call(self, inputs, training=False):
        hidden = self.norm(self.dense(inputs["a"]), training=training)
        return {"score": self.dropout(hidden, training=training), "seen": inputs["b"]}


def sequential():
    return keras.Sequential(
        [keras.Input((3,), name="a"), keras.layers.Dense(2, activation="tanh", name="logits")]
    )


def functional(inputs, outputs):
    a, b = keras.Input((3,), name="a"), keras.Input((2,), name="b")
    hidden = keras.layers.Concatenate()([a, b])
    u = keras.layers.Dense(1, name="u")(hidden)
    v = keras.layers.Dense(2, name="v")(hidden)
    return keras.Model(inputs(a, b), outputs(u, v))


def as_list(*items):
    return list(items)


def lists():
    return functional(as_list, as_list)


def dicts():
    return functional(lambda a, b: {"a": a, "b": b}, lambda u, v: {"left": u, "right": v})


def subclassed():
    model = Subclassed()
    model(tf.constant(A))
    return model


def subclassed_dict():
    model = SubclassedDict()
    model({"a": tf.constant(A), "b": tf.constant(B)})
    model.norm.set_weights(np.array([[2, 3], [1, -1], [0.5, 0.25], [4, 9]], np.float32))
    return model


# model, its inputs by name, whether it takes them by position, its outputs' names
MODELS = {
    "sequential": (sequential, {"a": A}, True, ["logits"]),
    "lists": (lists, {"a": A, "b": B}, True, ["u", "v"]),
    "dicts": (dicts, {"a": A, "b": B}, False, ["left", "right"]),
    "subclassed": (subclassed, {"pixels": A}, True, ["output_0"]),
    "subclassed_dict": (subclassed_dict, {"a": A, "b": B}, False, ["score", "seen"]),
}
WAYS = ["signature", "serve", "layer:serve", "layer:serving_default"]


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory):
    """Every model, exported here and run in one fresh process: {(model, way): outputs}."""
    directory = tmp_path_factory.mktemp("exports")
    requests: dict[tuple[str, str], dict[str, Any]] = {}
    expected: dict[str, dict[str, np.ndarray]] = {}
    for name, (make, inputs, positional, outputs) in MODELS.items():
        model = make()
        path = export(model, directory / name)
        tensors = {key: tf.constant(value) for key, value in inputs.items()}
        if len(tensors) == 1:
            (x,) = tensors.values()
        else:
            x = list(tensors.values()) if positional else tensors
        results = model(x, training=False)
        if isinstance(results, dict):
            expected[name] = {key: value.numpy() for key, value in results.items()}
        else:
            leaves = results if isinstance(results, list) else [results]
            expected[name] = {k: v.numpy() for k, v in zip(outputs, leaves, strict=True)}
        for way in WAYS:
            by_position = positional if way.endswith("serve") else len(inputs) == 1
            requests[name, way] = {
                "path": path,
                "how": way,
                "inputs": inputs,
                "positional": by_position and way != "signature",
            }
    passed = export(
        sequential(), directory / "keyed", pass_through={"key": tf.TensorSpec([None], tf.string)}
    )
    for way in ("signature", "layer:serving_default"):
        requests["keyed", way] = {
            "path": passed,
            "how": way,
            "inputs": {"a": A, "key": ["x", "y"]},
            "positional": False,
        }
    (directory / "requests.json").write_text(json.dumps(list(requests.values())))
    subprocess.run(  # a process without tfmw
        [sys.executable, PROGRAMS / "load_export.py", "requests.json", "results.json"],
        cwd=directory,
        env=ENVIRON,
        check=True,
        timeout=600,
    )
    results = json.loads((directory / "results.json").read_text())
    return expected, dict(zip(requests, results, strict=True))


@pytest.mark.process
@pytest.mark.parametrize("way", ["signature", "layer:serving_default"])
@pytest.mark.parametrize("name", MODELS)
def test_serving_default_predicts_by_name_what_the_model_predicts(elsewhere, name, way):
    expected, results = elsewhere
    assert sorted(results[name, way]) == sorted(MODELS[name][3])
    for output, values in expected[name].items():
        np.testing.assert_allclose(results[name, way][output], values, rtol=1e-6)


@pytest.mark.process
@pytest.mark.parametrize("way", ["serve", "layer:serve"])
@pytest.mark.parametrize("name", MODELS)
def test_serve_keeps_the_structures_of_the_model(elsewhere, name, way):
    expected, results = elsewhere
    found = results[name, way]
    if name in ("sequential", "subclassed"):
        found = {MODELS[name][3][0]: found}
    elif name == "lists":
        found = dict(zip(MODELS[name][3], found, strict=True))
    assert found.keys() == expected[name].keys()
    for output, values in expected[name].items():
        np.testing.assert_allclose(found[output], values, rtol=1e-6)


@pytest.mark.process
@pytest.mark.parametrize("way", ["signature", "layer:serving_default"])
def test_pass_through_returns_a_key_with_each_prediction(elsewhere, way):
    _, results = elsewhere
    assert sorted(results["keyed", way]) == ["key", "logits"]
    assert results["keyed", way]["key"] == ["x", "y"]
    assert np.shape(results["keyed", way]["logits"]) == (2, 2)


def test_any_batch_size_and_the_types_of_the_input_signature(tmp_path):
    model = Subclassed()
    model(tf.constant(A))
    export(model, tmp_path / "m", input_signature=tf.TensorSpec([64, 3], tf.uint8, name="raw"))
    signature = tf.saved_model.load(str(tmp_path / "m")).signatures["serving_default"]
    (spec,) = signature.structured_input_signature[1].values()
    assert (spec.name, spec.dtype, spec.shape.as_list()) == ("raw", tf.uint8, [None, 3])


@pytest.mark.parametrize("location", ["file://{}/deep/er/m", "{}/deep/er/m"])
def test_export_replaces_the_previous_one(tmp_path, location):
    path = location.format(tmp_path)
    for scale in (1.0, 2.0):
        model = sequential()
        model.set_weights([np.full((3, 2), scale, np.float32), np.zeros(2, np.float32)])
        assert export(model, path) == str(tmp_path / "deep" / "er" / "m")
        assert verify(path) == []
        loaded = tf.saved_model.load(path)
        predicted = loaded.serve(tf.constant([[0.1, 0, 0]]))
        np.testing.assert_allclose(predicted, [[np.tanh(0.1 * scale)] * 2], rtol=1e-6)
        assert os.listdir(tmp_path / "deep" / "er") == ["m"]


def test_only_the_chief_writes(tmp_path):
    worker = Cluster(workers=("h0:2222", "h1:2222"), index=1)
    assert export(sequential(), tmp_path / "m", cluster=worker) is None
    assert os.listdir(tmp_path) == []
    chief = Cluster(workers=("h0:2222", "h1:2222"), index=0)
    assert export(sequential(), tmp_path / "m", cluster=chief) == str(tmp_path / "m")
    assert os.listdir(tmp_path) == ["m"]


def test_files_are_flushed_before_the_rename(tmp_path, monkeypatch):
    synced: list[str] = []
    rename = os.rename

    def note_rename(source, target):
        written = {str(p) for p in Path(source).rglob("*")} | {source}
        assert written <= set(synced), "renamed before it was flushed"
        synced.append("renamed")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")))
    monkeypatch.setattr(os, "rename", note_rename)
    export(sequential(), tmp_path / "m")
    assert synced[synced.index("renamed") + 1 :] == [str(tmp_path)]


def crash(path, when):
    return run_command("python", PROGRAMS / "export_crash.py", path, when)[0]


def y_of(path):
    loaded = tf.saved_model.load(str(path))
    return loaded.serve(tf.constant([[1.0, 0.0]])).numpy().item()


@pytest.mark.process
@pytest.mark.parametrize(
    ("when", "left"),
    [
        pytest.param("before_the_manifest", 1.0, marks=pytest.mark.nightly),
        ("between_the_renames", None),
        pytest.param("after_them", 2.0, marks=pytest.mark.nightly),
    ],
)
def test_crash_leaves_the_old_export_the_new_one_or_none(tmp_path, when, left):
    path = tmp_path / "m"
    old = keras.Sequential([keras.Input((2,), name="x"), keras.layers.Dense(1, name="y")])
    old.set_weights([np.array([[1.0], [0.0]]), np.array([0.0])])
    export(old, path)

    assert crash(path, when) == 77

    assert path.exists() == (left is not None)
    if left is not None:
        assert verify(path) == []
        assert y_of(path) == left
    assert all(name == "m" or name.startswith(".m.") for name in os.listdir(tmp_path))

    export(old, path)
    assert os.listdir(tmp_path) == ["m"]
    assert verify(path) == []
    assert y_of(path) == 1.0


def test_an_export_that_fails_leaves_the_old_one(tmp_path, monkeypatch):
    path = tmp_path / "m"
    export(sequential(), path)
    before = (path / MANIFEST).read_bytes()
    rename = os.rename

    def fail(source, target):
        if ".writing-" in source:
            raise tf.errors.PermissionDeniedError(None, None, "no")
        rename(source, target)

    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises(tf.errors.PermissionDeniedError):
        export(sequential(), path)
    assert os.listdir(tmp_path) == ["m"]
    assert (path / MANIFEST).read_bytes() == before
    assert verify(path) == []


def test_other_directories_are_not_deleted(tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "one.jpg").write_bytes(b"irreplaceable")
    (tmp_path / "file").write_bytes(b"irreplaceable")
    for name in ("photos", "file"):
        with pytest.raises(UsageError, match="is not a SavedModel"):
            check_path(tmp_path / name)
        with pytest.raises(UsageError, match="is not a SavedModel"):
            export(sequential(), tmp_path / name)
    assert (tmp_path / "photos" / "one.jpg").read_bytes() == b"irreplaceable"
    assert (tmp_path / "file").read_bytes() == b"irreplaceable"


@pytest.mark.parametrize(
    "path",
    ["/proc/no/model", "{}/file/model", "s3://bucket/model", "gs://b/model", "{}/nul\0/model"],
)
def test_an_impossible_path_is_refused_before_the_training(tmp_path, path):
    (tmp_path / "file").write_bytes(b"")
    path = path.format(tmp_path)
    model = sequential()
    model.compile("sgd", "mse")
    before = [v.numpy() for v in model.weights]
    with pytest.raises(
        UsageError, match=r"no export can be written to .*: (name a directory|write to a local)"
    ):
        tfmw.fit(model, np.ones((4, 3)), np.ones((4, 2)), verbose=0, export_dir=path)
    np.testing.assert_array_equal(before[0], model.weights[0].numpy())
    with pytest.raises(UsageError, match="no export can be written to"):
        export(model, path)
    assert os.listdir(tmp_path) == ["file"]


def test_empty_directory_is_accepted(tmp_path):
    (tmp_path / "m").mkdir()
    export(sequential(), tmp_path / "m")
    assert verify(tmp_path / "m") == []


def largest_file(path):
    return max(path.rglob("variables.data*"), key=lambda file: file.stat().st_size)


def flip_a_bit(path):
    file = largest_file(path)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def cut_short(path):
    file = largest_file(path)
    file.write_bytes(file.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (flip_a_bit, r"^variables/variables\.data-\S+ is damaged"),
        (cut_short, r"^variables/variables\.data-\S+ has \d+ bytes; \d+ were written"),
        (lambda path: (path / "saved_model.pb").unlink(), r"^saved_model\.pb is missing"),
        (lambda path: (path / MANIFEST).write_text("{"), r"is damaged"),
        (lambda path: (path / MANIFEST).write_text('{"format": 2}'), r"has format 2"),
        (lambda path: (path / MANIFEST).unlink(), r"has no tfmw_manifest"),
    ],
)
def test_verify_finds_damage(tmp_path, damage, message):
    export(sequential(), tmp_path / "m")
    damage(tmp_path / "m")
    problems = verify(tmp_path / "m")
    assert len(problems) == 1
    assert re.search(message, problems[0]), problems


def test_verify_of_a_missing_export(tmp_path):
    assert verify(tmp_path / "m") == [f"{tmp_path / 'm'} is not a directory."]


def several_arguments():
    class Several(keras.Model):
        def build(self, left_shape, right_shape):
            self.dense = keras.layers.Dense(1)
            self.dense.build(left_shape)

        def call(self, left, right):
            return self.dense(left) + right

    model = Several()
    model(tf.constant(A), tf.constant(B)[:, :1])
    return model


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: keras.Sequential([keras.layers.Dense(1)]), "before it is built"),
        (Subclassed, "before it is built"),
        (several_arguments, "Pass input_signature="),
        (lambda: "model", "export takes a Keras model; received: str"),
    ],
)
def test_unsupported_models_are_refused(tmp_path, make, message):
    with pytest.raises(UsageError, match=message):
        export(make(), tmp_path / "m")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(("name", "what"), [("a", "inputs"), ("logits", "outputs")])
def test_pass_through_name_in_use_is_refused(tmp_path, name, what):
    with pytest.raises(UsageError, match=f"two {what} of .* have the same name, '{name}'"):
        export(sequential(), tmp_path / "m", pass_through={name: tf.TensorSpec([None], tf.string)})
    assert os.listdir(tmp_path) == []


def test_wrong_value_of_tables_is_refused(tmp_path):
    wrong: Any = "rows"
    with pytest.raises(
        UsageError, match="unknown tables 'rows': expected one of 'whole', 'sharded'"
    ) as e:
        export(sequential(), tmp_path / "model", tables=wrong)
    assert len(str(e.value).splitlines()) == 1
    assert not (tmp_path / "model").exists()


def test_sharded_has_no_effect_on_a_model_without_tables(tmp_path):
    model = sequential()
    export(model, tmp_path / "whole")
    export(model, tmp_path / "sharded", tables="sharded")
    files = [
        sorted(str(path.relative_to(tmp_path / tables)) for path in (tmp_path / tables).rglob("*"))
        for tables in ("whole", "sharded")
    ]
    assert files[0] == files[1]


@pytest.fixture(scope="module")
def on_two_workers(tmp_path_factory):
    directory = tmp_path_factory.mktemp("two_workers")
    return directory, run_cluster("export_cluster.py", str(directory), workers=2)


@pytest.mark.process
def test_only_one_of_two_workers_writes(on_two_workers):
    directory, run = on_two_workers
    assert [worker["wrote"] for worker in run] == [[True, True], [False, False]]
    assert [worker["returned"] for worker in run] == [str(directory / "export_0"), None]
    assert sorted(os.listdir(directory)) == ["export_0", "fit_0"]


@pytest.mark.process
@pytest.mark.parametrize("name", ["export_0", "fit_0"])
def test_export_of_a_cluster_does_not_name_it(on_two_workers, name):
    directory, run = on_two_workers
    path = directory / name
    assert verify(path) == []
    content = (path / "saved_model.pb").read_bytes()
    for trace in (b"/job:", b"/task:", b"worker", b"coordination", b"standalone"):
        assert trace not in content
    loaded = tf.saved_model.load(str(path))
    inputs = tf.constant(run.chief["inputs"])
    scores = loaded.signatures["serving_default"](features=inputs)["scores"]
    np.testing.assert_allclose(scores, run.chief["scores"], rtol=1e-5)
    assert run[1]["scores"] == run[0]["scores"]
