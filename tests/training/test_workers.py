"""`tfmw.Workers`: parts that stay in the workers between calls, and changes that reach them."""

from __future__ import annotations

import copy
import os
import pickle
import signal
import sys
from typing import Any
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfmw
from tests.helpers.cases import cases, every
from tests.helpers.cluster import ONE_THREAD
from tfmw.compat import datasets
from tfmw.errors import TaskFailed, UsageError
from tfmw.launcher import call
from tfmw.train import pickling, worker_calls, workers

X = np.random.default_rng(0).normal(size=(4096, 8)).astype("float32")  # above `SHARED`
Y = X[:, :1] * 2
TRACES: list[str] = []


class Network(keras.Model):
    """Notes when Python runs its layers: once for each trace."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = keras.layers.Dense(4, activation="relu")
        self.drop = keras.layers.Dropout(0.2, seed=3)
        self.out = keras.layers.Dense(1)
        self.factor = 1.0

    def call(self, x, training=False):
        if not isinstance(x, keras.KerasTensor):
            TRACES.append("train" if training else "test")
        return self.out(self.drop(self.hidden(x), training=training)) * self.factor


def made() -> Network:
    keras.utils.set_random_seed(5)
    model = Network()
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    return model


class Here:
    """Takes the place of the processes: one worker, in this process, after a pickle."""

    stopped, alive = 0, True

    def __init__(self, count: int) -> None:
        self.scratch = None  # the usual place of temporary files
        self.requests: list[worker_calls.Request] = []
        worker_calls._models.clear()
        worker_calls._arrays.clear()

    def call(self, fn: Any, args: Any) -> list[Any]:
        payload = call.pack(fn, args)
        fn, args = call.loads(pickle.loads(payload[0])[1], payload[1:])
        self.requests += args
        return [fn(*args)]

    def close(self) -> None:
        pass


@pytest.fixture
def here(monkeypatch):
    monkeypatch.setattr(workers, "StandingWorkers", Here)
    # This process has the caller's seeds.
    monkeypatch.setattr(datasets, "set_seed_state", lambda *_: None)
    TRACES.clear()
    # Calls change the variables of their worker, which is this process.
    with mock.patch.dict(os.environ), tfmw.Workers(1) as made_here:
        yield made_here


def last(here: tfmw.Workers) -> worker_calls.Request:
    request: worker_calls.Request = here._standing.requests[-1]  # type: ignore[union-attr]
    return request


def trained(here: tfmw.Workers, model: keras.Model, **arguments: Any) -> list[Any]:
    history = here.fit(model, X, Y, batch_size=512, epochs=2, verbose=0, shuffle=False, **arguments)
    return [history.history, model.get_weights(), [v.numpy() for v in model.optimizer.variables]]


def test_an_unchanged_model_is_not_sent_and_not_traced_again(here):
    model, twin = made(), made()
    trained(here, model)
    here.evaluate(model, X, Y, verbose=0)
    assert TRACES
    TRACES.clear()
    for _ in range(2):
        trained(here, model)
        assert (last(here).model, len(last(here).values) < 6) == (None, True)
        assert [content for _, content in last(here).arguments.arrays] == [None]
        here.evaluate(model, X, Y, verbose=0)
    assert TRACES == []
    for _ in range(3):
        twin.fit(X, Y, batch_size=512, epochs=2, verbose=0, shuffle=False)
    for mine, theirs in zip(model.get_weights(), twin.get_weights(), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-7)


class WritesConfig(keras.callbacks.Callback):
    def __init__(self, path: Any) -> None:
        super().__init__()
        self.path = path

    def on_epoch_end(self, epoch, logs=None):
        self.path.write_text(self.model.to_json())


def made_deep() -> keras.Model:
    """A model with a layer that is called again and again, and layers of another graph, too."""
    keras.utils.set_random_seed(5)
    last_one = inputs = keras.Input((8,))
    shared = keras.layers.Dense(8, kernel_initializer="zeros")
    for _ in range(sys.getrecursionlimit() // 20):
        last_one = keras.layers.Activation("linear")(last_one) + shared(last_one)
    inner = keras.Sequential([keras.layers.Dense(4, "relu"), keras.layers.Dense(2)])
    whole = inner(last_one)
    model = keras.Model(inputs, inner.layers[1](inner.layers[0](inputs)) - whole)
    model.compile(keras.optimizers.SGD(0.001), "mse")
    return model


def test_models_deeper_than_the_recursion_limit_are_sent(here, tmp_path):
    """Layers refer to those before and after them; the chief can save the model that it has got."""
    model, twin = made_deep(), made_deep()
    trained(here, model, callbacks=[WritesConfig(tmp_path / "model.json")])
    assert (tmp_path / "model.json").read_text() == model.to_json()
    sent = here._standing.requests[0].model.data
    assert b"CodeType" not in sent, "functions of Keras are referred to"
    twin.fit(X, Y, batch_size=512, epochs=2, verbose=0, shuffle=False)
    for mine, theirs in zip(model.get_weights(), twin.get_weights(), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-6)


def test_a_function_of_exec_is_sent():
    made_by_exec: dict[str, Any] = {}
    exec("def twice(x): return 2 * x", made_by_exec)
    sent = pickling.Packer().dump(made_by_exec["twice"])
    assert pickling.Unpacker(sent, []).load()(21) == 42


def set_values(model):
    """Changes a weight, the learning rate, a slot and the seed of a layer."""
    model.hidden.kernel.assign(model.hidden.kernel * 2)
    model.optimizer.learning_rate = 0.5
    model.optimizer.variables[2].assign(model.optimizer.variables[2] + 1)
    model.drop.seed_generator.state.assign(model.drop.seed_generator.state + 7)


def freeze(model):
    model.hidden.trainable = False


def compile_again(model):
    model.compile(keras.optimizers.SGD(0.1), "mae", metrics=["mse"])


def set_attribute(model):
    model.factor = 3.0


def set_rate_of_dropout(model):
    model.drop.rate = 0.7


def set_eager(model):
    model.run_eagerly = True


def set_policy(model):
    model.hidden.dtype_policy = "mixed_bfloat16"


CHANGES = [freeze, compile_again, set_attribute, set_rate_of_dropout, set_eager, set_policy]


@pytest.mark.parametrize("change", every(3, [set_values, *CHANGES]))
def test_every_change_of_a_model_reaches_workers_that_stay(here, change):
    """The results are those of a worker that has nothing yet."""
    model = made()
    trained(here, model)
    change(model)
    twin = pickling.rebuilt(call.loads(pickling.Packer().dump(model)))
    found = trained(here, model)
    assert (last(here).model is None) == (change is set_values)
    with tfmw.Workers(1) as new:
        expected = trained(new, twin)
        assert last(new).model is not None
    tf.nest.map_structure(np.testing.assert_array_equal, found, expected)


class Changes(keras.callbacks.Callback):
    def on_train_end(self, logs=None):
        self.model.hidden.trainable = False


def test_a_model_that_a_worker_has_changed_is_sent_again(here):
    model = made()
    trained(here, model, callbacks=[Changes()])
    assert model.hidden.trainable
    trained(here, model)
    assert last(here).model is not None


class Reads(keras.callbacks.Callback):
    """A callback with a part of the model, and an array that it changes."""

    def __init__(self, layer, array):
        super().__init__()
        self.layer, self.array = layer, array

    def on_train_begin(self, logs=None):
        assert self.layer is self.model.hidden
        assert self.array[0] == 0
        self.array[:] = 1


def test_arguments_refer_to_the_parts_of_a_kept_model(here):
    model = made()
    array: np.ndarray = np.zeros(worker_calls.SHARED // 4, "float32")
    for _ in range(3):
        trained(here, model, callbacks=[Reads(model.hidden, array)])
    assert last(here).model is None
    assert last(here).arguments.arrays[-1][1] is None, "the array is not sent again"


def test_what_is_sent_may_refer_to_the_workers(here):
    """A tuner's callback holds the model's builder, which holds the workers."""
    assert copy.deepcopy([here])[0] is here
    there = pickle.loads(pickle.dumps(here))
    with pytest.raises(tfmw.UsageError, match="these workers are closed"):
        there.predict(made(), X)
    there.close()


def test_a_changed_array_is_sent(here):
    model, x = made(), X.copy()
    first = here.predict(model, x, verbose=0)
    x[:] = 0
    second = here.predict(model, x, verbose=0)
    assert not np.array_equal(first, second)
    np.testing.assert_allclose(second, model.predict(x, verbose=0), rtol=1e-5, atol=1e-7)


def test_seeds_set_again_trace_again(here):
    model = made()
    here.predict(model, X, verbose=0)
    assert last(here).settings["anew"]
    here.predict(model, X, verbose=0)
    assert not last(here).settings["anew"]
    keras.utils.set_random_seed(5)
    here.predict(model, X, verbose=0)
    assert last(here).settings["anew"]


def test_another_setting_of_keras_sends_the_model_again(here):
    model = made()
    here.predict(model, X, verbose=0)
    keras.config.set_epsilon(1e-5)
    try:
        here.predict(model, X, verbose=0)
        assert last(here).model is not None
    finally:
        keras.config.set_epsilon(1e-7)


def test_workers_forget_models_that_the_caller_no_longer_has(here):
    models = [made() for _ in range(workers._MOST_MODELS + 2)]
    for model in models:
        here.predict(model, X, verbose=0)
    assert len(worker_calls._models) == workers._MOST_MODELS
    here.predict(models[0], X, verbose=0)
    assert last(here).model is not None


def test_an_edited_module_starts_new_workers(here, monkeypatch):
    before = here._standing
    here.predict(made(), X, verbose=0)
    assert here._standing is before
    name = next(iter(here._modules))
    here._modules[name] = ("of an earlier version", 0)
    here.predict(made(), X, verbose=0)
    assert here._standing is not before


def test_wrong_uses_are_refused(here):
    with pytest.raises(UsageError, match=r"received workers=0: expected a number"):
        tfmw.Workers(0)
    with pytest.raises(UsageError, match=r"not compiled.*tfmw.evaluate\(\)"):
        here.evaluate(keras.Sequential([keras.layers.Dense(1)]), X, Y)
    here.close()
    with pytest.raises(UsageError, match="these workers are closed"):
        here.predict(made(), X)


# ---- real processes ----------------------------------------------------------------------------


def own_process() -> tuple[int, str]:
    return os.getpid(), os.environ["TFMW_TASK"]


def die() -> None:
    if os.environ["TFMW_TASK"] == "worker 1":
        os.kill(os.getpid(), signal.SIGKILL)


def results_on(two: Any) -> list[Any]:
    """Results of calls on a model that changes between them."""
    model, results = made(), []
    data = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(4096, seed=1).batch(512)
    for change in (lambda model: None, set_values, freeze):
        change(model)
        history = tfmw.fit(model, data, verbose=0, workers=two)
        results += [history.history, model.get_weights()]
    results.append(tfmw.evaluate(model, X, Y, verbose=0, workers=two))
    results.append(tfmw.predict(model, X, verbose=0, workers=two))
    np.testing.assert_allclose(results[-1], model.predict(X, verbose=0), rtol=1e-5, atol=1e-6)
    return results


@pytest.mark.process
@pytest.mark.parametrize("others", cases([[]], [[2]]), ids=["another model", "new processes"])
def test_calls_in_workers_that_stay_equal_those_in_new_processes(monkeypatch, others):
    for name, value in ONE_THREAD.items():
        monkeypatch.setenv(name, value)
    with tfmw.Workers(2) as stay:
        processes = stay.run(own_process)
        assert [task for _, task in processes] == ["worker 0", "worker 1"]
        model = made()
        results = results_on(stay)
        for two in (stay, *others):
            tf.nest.map_structure(np.testing.assert_array_equal, results, results_on(two))
        assert stay.run(own_process) == processes
        with pytest.raises(TaskFailed, match="worker 1"):
            stay.run(die)
        renewed = stay.run(own_process)
        assert not {pid for pid, _ in renewed} & {pid for pid, _ in processes}
        tfmw.evaluate(model, X, Y, verbose=0, workers=stay)
