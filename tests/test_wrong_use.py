"""Wrong uses, each with one sentence: the received value, the expected one, and the remedy."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfmw
from tests.helpers.cluster import run_command
from tfmw.cluster.joining import require_collectives
from tfmw.compat import model_methods, models
from tfmw.errors import UsageError
from tfmw.train.checkpoint import resume
from tfmw.train.mirrored.sync_training import MirroredTraining


class MakesFunction(keras.Sequential):
    def make_train_function(self, force=False):
        return super().make_train_function(force)


def compiled_model(of: type[keras.Sequential] = keras.Sequential) -> keras.Model:
    model = of([keras.Input([3]), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def batches(rows: int = 8, batch_size: int = 4) -> tf.data.Dataset:
    x: np.ndarray = np.ones([rows, 3], np.float32)
    return tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(batch_size)


def fit_compiled_anew(moment: str) -> None:
    """Trains for two epochs, with a callback that compiles the model at each such moment."""
    model = compiled_model()
    callback = keras.callbacks.Callback()
    setattr(callback, moment, lambda *_, **__: model.compile("sgd", "mae"))
    tfmw.fit(model, batches(), epochs=2, verbose=0, callbacks=[callback])


CASES = {
    "an uncompiled model": (
        lambda: tfmw.fit(keras.Sequential([keras.layers.Dense(1)]), batches()),
        r"not compiled\. You must call `compile\(optimizer=\.\.\., loss=\.\.\.\)` before tfmw\.",
    ),
    "evaluate of an uncompiled model": (
        lambda: tfmw.evaluate(keras.Sequential([keras.layers.Dense(1)]), batches()),
        r"not compiled\. You must call `compile\(optimizer=\.\.\., loss=\.\.\.\)` before tfmw\.",
    ),
    "not a model": (
        lambda: tfmw.fit("model", batches()),
        r"received str as the model: expected a Keras model",
    ),
    "a model function that returns something else": (
        lambda: tfmw.fit(lambda: 3, batches()),
        r"the model function returned int: expected a Keras model",
    ),
    "a model that makes Keras's function of a batch": (
        lambda: tfmw.fit(compiled_model(MakesFunction), batches()),
        r"MakesFunction overrides make_train_function, and tfmw makes a function of its own",
    ),
    "an empty dataset": (
        lambda: tfmw.fit(compiled_model(), batches(rows=4).take(0)),
        r"the dataset is empty: expected at least one batch",
    ),
    "a dataset that turns out to be empty": (
        lambda: tfmw.fit(compiled_model(), batches().filter(lambda x, y: False), verbose=0),
        r"the dataset is empty: expected at least one batch",
    ),
    "an infinite dataset without steps_per_epoch": (
        lambda: tfmw.fit(compiled_model(), batches().repeat()),
        r"infinite and steps_per_epoch was not given: pass steps_per_epoch",
    ),
    "an infinite dataset in evaluate": (
        lambda: tfmw.evaluate(compiled_model(), batches().repeat(), verbose=0),
        r"infinite and steps was not given: pass steps",
    ),
    "y beside a dataset": (
        lambda: tfmw.fit(compiled_model(), batches(), np.ones([8, 1])),
        r"y was passed beside a dataset",
    ),
    "epochs as text": (
        lambda: tfmw.fit(compiled_model(), batches(), epochs="5"),  # type: ignore[arg-type]
        r"received epochs='5': expected an integer, such as 5",
    ),
    "a model that is compiled at the end of an epoch": (
        lambda: fit_compiled_anew("on_epoch_end"),
        r"a callback called model\.compile\(\) during fit",
    ),
    "a model that is compiled between two batches": (
        lambda: fit_compiled_anew("on_train_batch_end"),
        r"a callback called model\.compile\(\) during fit",
    ),
    "an unknown strategy": (
        lambda: tfmw.fit(compiled_model(), batches(), strategy="horovod"),
        r"unknown strategy 'horovod': expected one of 'auto'",
    ),
    "unknown collectives": (
        lambda: tfmw.init(collectives="mpi"),
        r"unknown collectives 'mpi': expected one of 'auto', 'tfmw', 'grpc', 'nccl'",
    ),
    "NCCL without GPUs": (
        lambda: tfmw.strategies.multi_worker_mirrored("nccl"),
        r'collectives="nccl" reduces between GPUs, and this machine has none',
    ),
    "devices that are not there": (
        lambda: tfmw.strategies.mirrored(["CPU:0", "GPU:7"]),
        r"unknown devices \['GPU:7'\]: this machine has CPU:0",
    ),
    "a dataset function that returns something else": (
        lambda: tfmw.fit(compiled_model(), lambda context: 3),
        r"the dataset function returned int: expected a tf\.data\.Dataset",
    ),
    "an unknown backup frequency": (
        lambda: tfmw.fit(compiled_model(), batches(), backup_dir="unused", backup_every="often"),
        r"unknown backup frequency 'often': expected a number of steps",
    ),
    "a parameter server strategy without servers": (
        lambda: tfmw.strategies.parameter_server({"cluster": {}, "task": {}}),
        r"parameter-server training needs at least one worker and one ps",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_one_sentence(name: str) -> None:
    use, sentence = CASES[name]
    with pytest.raises(UsageError) as caught:
        use()
    message = str(caught.value)
    assert re.search(sentence, message), message
    assert "\n" not in message


@pytest.mark.process
def test_init_after_the_first_op_raises() -> None:
    script = """
import tensorflow as tf
tf.constant(1)
import tfmw
tfmw.init({"cluster": {"worker": ["127.0.0.1:40001", "127.0.0.1:40002"]},
           "task": {"type": "worker", "index": 0}})
"""
    status, output = run_command("python", "-c", script)
    assert status == 1
    last = output.strip().splitlines()[-1]
    assert "tfmw.init() came after TensorFlow had run its first op" in last
    assert "call it first in the script" in last


def test_importing_tfmw_imports_no_tensorflow() -> None:
    script = "import sys, tfmw; print(sorted(m for m in sys.modules if 'tensorflow' in m))"
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=600, check=True
    )
    assert run.stdout.strip() == "[]"


@pytest.mark.process
@pytest.mark.nightly
def test_functions_keep_their_names_when_their_modules_are_imported() -> None:
    script = """
import tfmw.train.calls, tfmw.train.saved_model, tfmw.launcher.run
from tfmw.train.calls import fit
assert tfmw.fit is fit and callable(tfmw.export) and callable(tfmw.launch)
"""
    subprocess.run([sys.executable, "-c", script], timeout=600, check=True)


@pytest.mark.process
def test_another_backend_of_keras_is_refused() -> None:
    script = """
import sys
import keras
keras.backend.backend = lambda: "jax"
for name in [name for name in sys.modules if name.partition(".")[0] == "tfmw"]:
    del sys.modules[name]
import tfmw
try:
    tfmw.fit
except tfmw.UsageError as e:
    print(e)
"""
    assert run_command("python", "-c", script) == (
        0,
        "the Keras backend is 'jax', and tfmw trains on TensorFlow: set KERAS_BACKEND=tensorflow "
        "before Keras is imported.\n",
    )


@pytest.mark.process
@pytest.mark.parametrize(("workers", "ps"), [(2, 0), (1, 1)])
def test_model_fit_in_a_cluster_is_refused(run_cluster, tmp_path, workers, ps) -> None:
    run = run_cluster("model_fit.py", "fit", str(tmp_path), workers=workers, ps=ps, status=2)
    assert "model.fit() was called in Cluster(" in run.output
    assert "Write tfmw.fit(model, ...) with the same arguments" in run.output
    assert "or call tfmw.init(keras=True) first, with which model.fit does" in run.output
    assert run.by_task == {}, "nobody trained"


def test_backups_of_plain_calls_in_a_script_that_calls_init(monkeypatch) -> None:
    monkeypatch.setenv("TFMW_BACKUP_DIR", "/backups")
    with pytest.raises(UsageError, match=r"received --backup-dir, which is for scripts of plain"):
        tfmw.init(keras=False)


@pytest.mark.process
def test_every_worker_saves_whole_files_and_in_callbacks_only_the_chief_saves(
    run_cluster, tmp_path
):
    chief, other = run_cluster("model_fit.py", "save", str(tmp_path))
    assert [chief[k] for k in ("in fit", "own", "after", "all", "alone")] == [[]] * 5
    assert [len(other[k]) for k in ("in fit", "own", "after", "all", "alone")] == [2, 0, 0, 0, 0]
    assert "nothing is written here, the chief writes it" in other["in fit"][0]
    assert not [name for name in other["files"] if name.startswith(".")], "no leftovers"
    assert {"0.keras", "1.keras", "own_0.weights.h5", "own_1.weights.h5"} <= set(other["files"])
    assert "epoch.weights.h5" in other["files"]


def test_fit_of_a_guarded_process_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise UsageError("refused")

    guarded = [(keras.Model, name) for name in ("save", "save_weights", "export")]
    for owner, name in [*guarded, (keras.saving, "save_model"), (keras.models, "save_model")]:
        monkeypatch.setattr(owner, name, getattr(owner, name))  # the guards are removed in the end
    monkeypatch.setattr(model_methods._now, "refuse_fit", None)
    model_methods.guard_models(refuse, is_chief=False, after_export=lambda: None)
    with pytest.raises(UsageError, match="refused"):
        compiled_model().fit(batches(), shuffle=False, verbose=0)
    monkeypatch.undo()
    compiled_model().fit(batches(), shuffle=False, verbose=0)


@pytest.mark.parametrize("strategy", ["auto", "mirrored"])
def test_a_model_of_another_scope_is_refused(strategy: str) -> None:
    own = tf.distribute.MirroredStrategy(["CPU:0"])
    with own.scope():
        model = compiled_model()
    x: np.ndarray = np.ones([8, 3], np.float32)
    calls = {
        "fit": lambda: tfmw.fit(model, batches(), strategy=strategy, verbose=0),
        "evaluate": lambda: tfmw.evaluate(model, batches(), strategy=strategy, verbose=0),
        "predict": lambda: tfmw.predict(model, x, strategy=strategy, verbose=0),
    }
    unseeded = models.unseeded_state()
    for call in calls.values():
        with pytest.raises(UsageError) as caught:
            call()
        message = str(caught.value)
        assert "was made in the scope of a MirroredStrategy of your own" in message
        assert "make the model outside of any scope" in message
        assert "\n" not in message
        assert models.unseeded_state() is unseeded, "nothing stays entered"
    before = own.experimental_local_results(model.weights[0].value)[0].numpy()
    tfmw.fit(model, batches(), strategy=own, verbose=0)
    after = own.experimental_local_results(model.weights[0].value)[0].numpy()
    assert not np.array_equal(before, after), "it trains in its own scope"


def test_states_of_examples_on_one_replica_are_those_of_keras() -> None:
    x = np.random.default_rng(0).normal(size=[12, 5, 3]).astype(np.float32)
    found = []
    for train in (keras.Model.fit, tfmw.fit):
        keras.utils.set_random_seed(0)
        layers = [keras.layers.GRU(2, stateful=True), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input(batch_shape=(4, 5, 3)), *layers])
        model.compile("sgd", "mse")
        train(model, x, x[:, 0, :1], batch_size=4, epochs=2, shuffle=False, verbose=0)
        found.append([np.asarray(v) for v in [*model.weights, *model.non_trainable_variables]])
    for keras_has, tfmw_has in zip(*found, strict=True):
        np.testing.assert_allclose(tfmw_has, keras_has, rtol=1e-6)


def test_a_backup_of_parameter_servers_is_refused_in_synchronous_training(tmp_path, monkeypatch):
    # A backup as a training on parameter servers writes it, with its position in the data.
    backup = tfmw.callbacks.BackupAndRestore(tmp_path, delete_checkpoint=False)
    with monkeypatch.context() as patch:
        patch.setattr(resume, "_run", lambda: "another process")
        state = MirroredTraining.state
        there = {"done": 0, "begun": False}
        patch.setattr(
            MirroredTraining,
            "state",
            lambda *a, **kw: dataclasses.replace(state(*a, **kw), position=there),
        )
        tfmw.fit(compiled_model(), batches(), verbose=0, callbacks=[backup])
    with pytest.raises(UsageError, match=r"the backup is of a training on parameter servers, and"):
        tfmw.fit(compiled_model(), batches(), epochs=2, verbose=0, callbacks=[backup])


def test_the_former_name_of_a_transport_warns_and_works() -> None:
    with pytest.warns(FutureWarning, match='collectives="ring" is now "grpc"'):
        assert require_collectives("ring") == "grpc"
