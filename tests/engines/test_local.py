"""`tfmw.fit(..., workers=2)`: from this process's memory to a fresh cluster and back."""

from __future__ import annotations

import os
import pickle
import re
import signal
import subprocess
import sys
from types import SimpleNamespace
from typing import Any, NamedTuple

import cloudpickle
import keras
import numpy as np
import pytest
import tensorflow as tf

import tfmw
from tests.helpers import prepared as prepared_model
from tests.helpers.cases import every
from tests.helpers.cluster import ONE_THREAD, PROGRAMS, PYTHONPATH
from tests.helpers.prepared import prepared
from tests.helpers.threads import Exchange, in_threads
from tfmw.compat import models
from tfmw.compat.shuffles import ShuffleSeeds
from tfmw.errors import UsageError
from tfmw.launcher import call
from tfmw.train import on_workers, pickling, sent_data, worker_calls
from tfmw.train.checkpoint import state
from tfmw.train.checkpoint.store import BackupStore

X = np.random.default_rng(0).normal(size=(203, 12)).astype("float32")
Y = (X.sum(axis=1) > 0).astype("int32")


class Scale(keras.layers.Layer):
    """A layer that is not registered, has no get_config, and takes no keyword arguments."""

    def __init__(self, units):
        super().__init__()
        self.units = units
        self.inner = [keras.layers.Dense(units, kernel_regularizer="l2")]

    def build(self, shape):
        self.scale = self.add_weight(shape=(self.units,), initializer="ones")

    def call(self, x):
        return self.inner[0](x) * self.scale


class Network(keras.Model):
    def __init__(self, units):
        super().__init__()
        self.hidden = Scale(units)
        self.norm = keras.layers.BatchNormalization()
        self.out = keras.layers.Dense(2)

    def call(self, x, training=False):
        return self.out(self.norm(self.hidden(x), training=training))


class Backbone(keras.Model):
    """Functional by its call of super().__init__, as KerasHub's models are."""


class Classifier(Backbone):
    def __init__(self, units):
        inputs = keras.Input([12])
        super().__init__(inputs, keras.layers.Dense(units)(inputs))
        self.units = units


def own_loss(y, logits):
    return keras.losses.sparse_categorical_crossentropy(y, logits, from_logits=True)


def compiled(model):
    model.compile(keras.optimizers.AdamW(0.01), own_loss, metrics=["accuracy"])
    return model


def functional():
    inputs = keras.Input([12])
    hidden = Scale(3)(inputs)
    return keras.Model(inputs, keras.layers.Dense(2)(keras.layers.concatenate([hidden, inputs])))


@pytest.mark.process
@pytest.mark.parametrize(
    "make",
    every(
        2,
        [
            functional,
            lambda: Network(4),
            lambda: keras.Sequential([Scale(3), keras.layers.Dense(2)]),
            lambda: keras.Sequential([keras.layers.Rescaling(0.5), keras.layers.Dense(2)]),
        ],
    ),
)
def test_unpacked_model_equals_the_packed_one(make):
    model = compiled(make())
    model.fit(X, Y, verbose=0, batch_size=32)
    arrived = pickling.rebuilt(call.loads(pickling.Packer().dump(model)))
    np.testing.assert_array_equal(arrived.predict(X, verbose=0), model.predict(X, verbose=0))
    going_on = [
        m.fit(X, Y, epochs=2, batch_size=32, shuffle=False, verbose=0).history["loss"]
        for m in (model, arrived)
    ]
    assert going_on[0] == going_on[1]


@pytest.mark.parametrize(
    ("folders", "problem"),
    [
        (["shared", "shared", "shared"], None),
        (["gs://bucket/a", "gs://bucket/b", "gs://bucket/c"], None),
        (
            ["a", "a", "b"],
            r"^on this machine, backup_dir .*/b is not the same here as on worker 0 on .*: mount",
        ),
        (["file/a", "a", "a"], r"^backup_dir .*/file/a cannot be written \(Not a direc"),
    ],
)
def test_backup_dir_that_not_all_workers_share(folders, problem, tmp_path, monkeypatch):
    """Each worker of an engine may have other disks; all raise the same error."""
    (tmp_path / "file").touch()
    monkeypatch.setattr(worker_calls, "_MARKER_S", 0.0)
    exchange = Exchange(3)

    def check(rank):
        group: Any = SimpleNamespace(is_chief=rank == 0, from_all=exchange.of(rank))
        place = folders[rank] if "://" in folders[rank] else str(tmp_path / folders[rank])
        worker_calls.require_shared(place, group)

    raised = in_threads(3, check)
    assert len({str(error) for error in raised}) == 1
    if problem is None:
        assert raised == [None] * 3
    else:
        assert isinstance(raised[0], UsageError)
        assert re.search(problem, str(raised[0]))


@pytest.mark.process
@pytest.mark.nightly
def test_functional_subclass_unpacks_in_a_new_process(tmp_path):
    model = compiled(Classifier(2))
    model.fit(X, Y, verbose=0)  # builds the optimizer, as tfmw.fit does first
    (tmp_path / "parcel").write_bytes(pickling.Packer().dump(model))
    code = """
import sys, numpy, tfmw
from tfmw.train.checkpoint import state
from tfmw.train.checkpoint.store import BackupStore
from tfmw.train import on_workers, pickling, sent_data
from tfmw.launcher import call
from tests.engines import test_local
model = pickling.rebuilt(call.loads(open(sys.argv[1], "rb").read()))
assert type(model) is test_local.Classifier
numpy.save(sys.argv[2], model.predict(test_local.X, verbose=0))
tfmw.fit(model, test_local.X, test_local.Y, verbose=0)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "parcel", tmp_path / "predicted.npy"],
        env={**os.environ, "PYTHONPATH": PYTHONPATH},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    predicted = np.load(tmp_path / "predicted.npy")
    np.testing.assert_array_equal(predicted, model.predict(X, verbose=0))


def test_large_arrays_are_not_copied_into_the_pickle(monkeypatch):
    """The pickles of the model and of the call hold no copy of the arrays."""
    monkeypatch.setattr(call, "LARGE", 1000)
    sent = {"x": X, "y": Y[:10], "model": compiled(keras.Sequential([keras.layers.Dense(2)]))}
    large: list[pickle.PickleBuffer] = []
    packed = pickling.Packer(call.apart(large)).dump(sent)
    payload = call.pack(print, (packed, large))
    assert [len(part) for part in payload[1:]] == [X.nbytes]
    assert np.shares_memory(np.frombuffer(payload[1], np.uint8), X)
    assert X.tobytes()[:100] not in payload[0]
    _, blob, sizes = pickle.loads(payload[0])
    assert sizes == [X.nbytes]
    fn, (packed, large) = call.loads(blob, payload[1:])
    assert fn is print
    arrived = call.loads(packed, large)
    np.testing.assert_array_equal(arrived["x"], X)
    np.testing.assert_array_equal(arrived["y"], Y[:10])


def test_function_that_uses_tfmw_can_be_pickled():
    scope = {"__name__": "__main__", "tfmw": tfmw}
    exec("def of_a_notebook():\n    return tfmw", scope)
    assert pickle.loads(cloudpickle.dumps(scope["of_a_notebook"]))() is tfmw


class Named(NamedTuple):
    first: Any
    second: Any


def test_named_tuples_keep_their_type():
    for taken in (Named(X, [Named(Y, 1)]), (X, Named(Y, 1))):
        sent = sent_data.sent_data(taken, "x")
        assert type(sent) is type(taken)
        assert type(sent_data.opened_data(sent, {})) is type(taken)


def test_unpicklable_arguments_are_refused_with_an_alternative(monkeypatch):
    model = compiled(keras.Sequential([keras.Input([12]), keras.layers.Dense(2)]))
    dataset = tf.data.Dataset.from_tensor_slices((X, Y))
    python = dataset.map(lambda x, y: (tf.py_function(lambda v: v, [x], tf.float32), y)).batch(32)
    variable = tf.Variable(1.0)
    stateful = dataset.map(lambda x, y: (x * variable, y)).batch(32)
    for x, said in [
        (python, r"holds Python functions \(EagerPyFunc\).*pass a callable"),
        (stateful, r"uses state of this process.*pass a callable"),
        (iter([(X, Y)]), r"is a generator.*pass a callable"),
    ]:
        for on in ("local", "slurm"):  # before an engine is asked for anything
            with pytest.raises(UsageError, match=said):
                tfmw.fit(model, x, workers=2, on=on)
    table_of_rows = tf.constant(X)
    captured = tf.data.Dataset.range(9).map(lambda i: (table_of_rows[i], i)).batch(3)
    monkeypatch.setattr(sent_data, "_LARGEST_GRAPH", X.nbytes - 1)
    for x in (dataset.shuffle(9).batch(32), captured):
        with pytest.raises(UsageError, match=r"arrays of 0.0 GB.*pass the arrays themselves"):
            tfmw.fit(model, x, workers=2)
    table = compiled(keras.Sequential([keras.layers.StringLookup(vocabulary=["a"])]))
    with pytest.raises(UsageError, match=r"cannot be sent to other processes.*pass callables"):
        pickling.Packer().dump(table)
    with pytest.raises(UsageError, match=r"received workers=0: expected a number of processes"):
        tfmw.fit(model, dataset.batch(32), workers=0)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"ps": 2}, r"received ps=2: submit a .*submit\(train, workers=2, ps=2, on='ray'\)"),
        ({"evaluator": True}, r"evaluator=True: submit a .*workers=2, evaluator=True, on='ray'\)"),
        ({"strategy": "parameter_server"}, r"submit\(train, workers=2, ps=1\)"),
    ],
)
def test_other_roles_are_refused_with_the_call_that_starts_them(options, said):
    model = compiled(keras.Sequential([keras.Input([12]), keras.layers.Dense(2)]))
    for on in ("local", "ray"):  # before an engine is asked for anything
        with pytest.raises(UsageError, match=said):
            tfmw.fit(model, X, Y, workers=2, on=on, **options)


@pytest.mark.process
def test_result_is_copied_into_the_callers_model(monkeypatch):
    for name, value in ONE_THREAD.items():
        monkeypatch.setenv(name, value)
    keras.utils.set_random_seed(1)
    model, twin = compiled(Network(4)), compiled(Network(4))
    shuffles = [tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(203, seed=4) for _ in range(2)]
    dataset, same = (shuffle.batch(40) for shuffle in shuffles)
    for data in (dataset, same):
        next(iter(data))  # workers continue after this preview
    for each in (model, twin):
        models.build_all(each, dataset.element_spec)
    twin.set_weights(model.get_weights())
    # No moving averages in the comparison: they are the mean over replicas, not of the batch.
    for each in (model, twin):
        each.norm.trainable = False
    expected = twin.fit(same, epochs=2, shuffle=False, verbose=0, validation_data=same.take(3))
    history = tfmw.fit(
        model, dataset, epochs=2, verbose=0, validation_data=dataset.take(3), workers=2
    )
    assert history.history.keys() == expected.history.keys()
    for name, values in expected.history.items():
        np.testing.assert_allclose(history.history[name], values, rtol=1e-4, err_msg=name)
    for mine, theirs in zip(model.get_weights(), twin.get_weights(), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-3, atol=1e-5)
    assert int(model.optimizer.iterations) == 2 * 6
    assert model.history is history
    assert [ShuffleSeeds(shuffle).passes for shuffle in shuffles] == [1 + 2 * (2 + 2)] * 2
    # The caller's process is as free as before: its model trains on its own.
    model.fit(dataset, verbose=0, shuffle=False)
    assert int(model.optimizer.iterations) == 3 * 6


@pytest.fixture(scope="module")
def stay():
    """Two workers for several calls."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ONE_THREAD.items():
            patch.setenv(name, value)
        with tfmw.Workers(2) as workers:
            yield workers


@pytest.mark.nightly
@pytest.mark.process
@pytest.mark.filterwarnings("ignore:__array__ implementation")  # of Keras's scheduler of rates
def test_a_cache_above_a_shuffle_then_a_loss_that_is_no_number(stay):
    """The third epoch's learning rate makes weights that are no numbers, too."""

    def trained(fit, **options):
        keras.utils.set_random_seed(1)
        order = tf.data.Dataset.from_tensor_slices((X, X.sum(axis=1))).shuffle(203, seed=4)
        train, held_out = order.take(120).cache().batch(40), order.skip(120).cache().batch(40)
        model = keras.Sequential([keras.Input([12]), keras.layers.Dense(1)])
        model.compile("sgd", "mse", metrics=["mae"])
        rate = keras.callbacks.LearningRateScheduler(lambda epoch: 0.01 if epoch < 2 else 1e30)
        named = {"validation_data": held_out, "epochs": 3, "verbose": 0, "callbacks": [rate]}
        return fit(model, train, shuffle=False, **named, **options), model

    expected, twin = trained(keras.Model.fit)
    history, model = trained(tfmw.fit, workers=stay)
    assert history.history.keys() == expected.history.keys()
    assert np.isnan(expected.history["loss"]).tolist() == [False, False, True]
    for name, values in expected.history.items():
        np.testing.assert_allclose(history.history[name], values, rtol=1e-4, err_msg=name)
    assert np.isnan(model.get_weights()[0]).all()
    assert np.isnan(twin.get_weights()[0]).all()


@pytest.mark.process
@pytest.mark.nightly
def test_workers_run_the_fit_of_the_models_class(stay, recwarn):
    """The caller's model has no optimizer yet: its variables are those of the prepared data."""
    model, twin = prepared(), prepared()
    few = prepared_model.X[:5], prepared_model.Y[:5]
    expected = twin.fit(prepared_model.X, prepared_model.Y, validation_data=few, verbose=0)
    history = tfmw.fit(
        model, prepared_model.X, prepared_model.Y, validation_data=few, verbose=0, workers=stay
    )
    assert history.epoch == [0, 1], "the class's own number of epochs"
    assert history.history.keys() == expected.history.keys()
    for name, values in expected.history.items():
        np.testing.assert_allclose(history.history[name], values, rtol=1e-4, err_msg=name)
    for mine, theirs in zip(model.get_weights(), twin.get_weights(), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-6)
    assert [w for w in recwarn if str(w.message).startswith("tfmw")] == []


def narrow():
    """A model whose first weights are drawn where it is made."""
    model = keras.Sequential([keras.Input([12]), keras.layers.Dense(4), keras.layers.Dense(2)])
    model.compile(keras.optimizers.SGD(0.1), own_loss)
    return model


@pytest.mark.process
@pytest.mark.nightly
def test_workers_go_on_from_the_random_state_of_the_caller(monkeypatch):
    for name, value in ONE_THREAD.items():
        monkeypatch.setenv(name, value)
    arguments = {"x": X.astype("float64"), "y": Y, "batch_size": 40, "epochs": 2, "verbose": 0}
    policy = keras.config.dtype_policy()
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    try:
        keras.utils.set_random_seed(3)
        expected = narrow().fit(**arguments)
        keras.utils.set_random_seed(3)
        history = tfmw.fit(narrow, **arguments, workers=2)
    finally:
        keras.config.set_floatx("float32")
        keras.config.set_dtype_policy(policy)
    # As exactly as float64 sums: float32 weights, or another order of the arrays, would differ.
    np.testing.assert_allclose(history.history["loss"], expected.history["loss"], rtol=1e-12)


@pytest.mark.process
@pytest.mark.parametrize(
    ("number", "arguments", "said"),
    [
        pytest.param(signal.SIGINT, (), "KeyboardInterrupt()", marks=pytest.mark.nightly),
        pytest.param(signal.SIGINT, ("stay",), "KeyboardInterrupt()", marks=pytest.mark.nightly),
        (signal.SIGTERM, (), "the same command resumes the run"),
        pytest.param(signal.SIGTERM, ("without",), "SystemExit(143)", marks=pytest.mark.nightly),
    ],
)
@pytest.mark.nightly
def test_a_signal_ends_the_workers_and_keeps_their_weights(number, arguments, said):
    process = subprocess.Popen(
        [sys.executable, PROGRAMS / "interrupted_fit.py", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **ONE_THREAD, "PYTHONPATH": PYTHONPATH, "PYTHONUNBUFFERED": "1"},
    )
    lines = []
    try:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if "backed up" in line:
                break
        process.send_signal(number)
        rest, _ = process.communicate(timeout=600)
    finally:
        process.kill()
    output = "".join(lines) + rest
    assert process.returncode == 0, output
    assert said in output
    assert ("starts anew" in output) == ("without" in arguments), output
    for said in ("same processes True", "trained again True") if "stay" in arguments else ():
        assert said in output
    assert "resumes" not in output or not arguments
    kept = re.search(r"stopped; the model has the weights of step (\d+)", output)
    assert kept, output
    assert f"iterations {kept[1]} changed True" in output
    assert "no child left" in output


class DieOnce(keras.callbacks.Callback):
    """Kills a worker once, in the middle of the second epoch.

    Args:
        task: the worker's name.
        died: a file that the worker leaves.
    """

    chief_only = False

    def __init__(self, task, died):
        super().__init__()
        self.task, self.died = task, died

    def on_train_batch_end(self, batch, logs=None):
        here = os.environ["TFMW_TASK"] == self.task and not self.died.exists()
        if here and self.model.optimizer.iterations == 10:
            self.died.touch()
            os.kill(os.getpid(), signal.SIGKILL)


class WritesPids(keras.callbacks.Callback):
    """Leaves the process of each task in a folder."""

    chief_only = False

    def __init__(self, folder):
        super().__init__()
        self.folder = folder

    def on_train_begin(self, logs=None):
        (self.folder / f"{os.environ['TFMW_TASK']} {os.getpid()}").touch()


@pytest.mark.process
@pytest.mark.parametrize("task", ["worker 1", pytest.param("worker 0", marks=pytest.mark.nightly)])
def test_a_killed_worker_of_a_fit_is_replaced_alone(task, tmp_path, capfd):
    """The other one's process stays, and the results are those of one process."""
    data = tf.data.Dataset.from_tensor_slices((X[:56], Y[:56])).batch(8)
    weights = []
    for callbacks in ([], [DieOnce(task, tmp_path / "died"), WritesPids(tmp_path)]):
        keras.utils.set_random_seed(5)
        model = compiled(functional())
        tfmw.fit(
            model,
            data,
            epochs=3,
            verbose=0,
            callbacks=callbacks,
            backup_dir=tmp_path / f"{len(callbacks)}",
            backup_every=4,
            workers=2 if callbacks else None,
            on=tfmw.engines.Local(max_restarts=1) if callbacks else "local",
        )
        assert model.optimizer.iterations == 21
        weights.append(model.get_weights())
    assert (
        f"tfmw: {task} is replaced (not counted as a restart): it failed" in capfd.readouterr().out
    )
    starts = [path.name.rpartition(" ")[0] for path in tmp_path.glob("worker *")]
    assert sorted(starts) == sorted([task, "worker 0", "worker 1"])
    for alone, restarted in zip(*weights, strict=True):
        np.testing.assert_allclose(alone, restarted, rtol=1e-4, atol=1e-6)


def test_a_stopped_model_gets_the_backup_before_a_damaged_one(tmp_path):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    store = BackupStore(str(tmp_path))
    for step in (1, 2):
        values = {n: np.full(v.shape, step, np.float32) for n, v in state.named(model).items()}
        path = store.write(step, values, {})
    with open(os.path.join(path, "tensors.data-00000-of-00001"), "r+b") as file:
        file.write(b"\xff")
    on_workers._restore_newest_backup(model, str(tmp_path))
    for weight in model.get_weights():
        np.testing.assert_array_equal(weight, 1)
