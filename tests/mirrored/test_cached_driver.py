"""State that fit, evaluate and predict keep between calls, and causes of new traces."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfmw
from tests.helpers import cluster
from tests.helpers.cases import each, every
from tfmw.compat import objects
from tfmw.compat.kept import ATTRIBUTE, kept_with
from tfmw.train.mirrored import cached_driver

X: Any = np.random.default_rng(0).normal(size=(24, 4)).astype("float32")
Y = X[:, :1]


called: list[keras.layers.Layer] = []


class Noted(keras.layers.Layer):
    """Notes that it is called, which is while a step is traced."""

    factor = 1.0

    def call(self, x):
        called.append(self)
        return x * self.factor


def made(differs: bool = True) -> keras.Model:
    """A model that several replicas train otherwise than one, if `differs`."""
    keras.utils.set_random_seed(1)
    norm = keras.layers.BatchNormalization() if differs else keras.layers.LayerNormalization()
    layers = [Noted(), norm, keras.layers.Dropout(0.5 * differs)]
    model = keras.Sequential([keras.Input((4,)), *layers, keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
    return model


def fit(model: keras.Model, **more: Any) -> dict[str, list[float]]:
    logs: dict[str, list[float]] = tfmw.fit(model, X, Y, batch_size=8, verbose=0, **more).history
    return logs


def evaluate(model: keras.Model, **more: Any) -> dict[str, float]:
    logs: dict[str, float] = tfmw.evaluate(model, X, Y, verbose=0, return_dict=True, **more)
    return logs


def predict(model: keras.Model, **more: Any) -> Any:
    return tfmw.predict(model, X, verbose=0, **more)


def traces(model: keras.Model, call: Callable[[keras.Model], Any]) -> int:
    called.clear()
    call(model)
    return sum(layer is model.layers[0] for layer in called)


@pytest.mark.parametrize("call", [fit, evaluate, predict])
def test_traces_are_reused(call):
    model = made()
    assert traces(model, call) > 0
    assert traces(model, call) == 0


@pytest.mark.nightly
def test_traces_are_reused_after_other_calls():
    model = made()
    for call in (fit, evaluate, predict):
        call(model)
    assert [traces(model, call) for call in (evaluate, fit, predict, evaluate)] == [0, 0, 0, 0]


def test_results_equal_those_of_keras():
    ours, keras_own = made(), made()
    for _ in range(3):
        expected = keras_own.fit(X, Y, batch_size=8, verbose=0, shuffle=False).history
        for name, values in fit(ours, shuffle=False).items():
            assert values == pytest.approx(expected[name], rel=1e-5)
        scores = keras_own.evaluate(X, Y, verbose=0, return_dict=True)
        assert evaluate(ours) == pytest.approx(scores, rel=1e-5)
    np.testing.assert_allclose(predict(ours), keras_own.predict(X, verbose=0), rtol=1e-5)


CHANGES: dict[str, Callable[[keras.Model], Any]] = {
    "an attribute of a layer": lambda model: setattr(model.layers[0], "factor", 3.0),
    "dropout": lambda model: setattr(model.layers[2], "rate", 0.0),
    "the optimizer's clipping": lambda model: setattr(model.optimizer, "clipnorm", 1e-3),
    "a regularizer": lambda model: setattr(
        model.layers[3].kernel, "regularizer", keras.regularizers.L2(1.0)
    ),
    "compile": lambda model: model.compile("sgd", "mae"),
    "compile, the same": lambda model: model.compile(model.optimizer, model.loss),
}


@pytest.mark.parametrize("change", every(2, CHANGES))
def test_changes_have_effect_when_they_have_in_keras(change):
    ours, keras_own = made(), made()
    for _ in range(2):
        fit(ours, shuffle=False)
        keras_own.fit(X, Y, batch_size=8, verbose=0, shuffle=False)
        CHANGES[change](ours)
        CHANGES[change](keras_own)
    for a, b in zip(ours.get_weights(), keras_own.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    traced = traces(ours, functools.partial(fit, shuffle=False)) > 0
    assert traced == change.startswith("compile")


VARIABLES_CHANGE: dict[str, Callable[[keras.Model], Any]] = {
    "trainable": lambda model: setattr(model.layers[3], "trainable", False),
    "a schedule": lambda model: setattr(
        model.optimizer, "learning_rate", keras.optimizers.schedules.CosineDecay(0.01, 10)
    ),
}


@pytest.mark.parametrize("change", every(2, VARIABLES_CHANGE))
def test_changed_variables_are_retraced(change):
    kept, fresh = made(), made()
    fit(kept)
    fit(fresh)
    VARIABLES_CHANGE[change](kept)
    VARIABLES_CHANGE[change](fresh)
    kept_with(fresh).drivers = ()
    assert fit(kept) == fit(fresh)
    for a, b in zip(kept.get_weights(), fresh.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    assert traces(kept, fit) == 0


def test_new_seed_is_retraced():
    """Ops draw theirs when they are traced, and Keras's keep the generator of that moment."""
    model = made()
    fit(model)
    assert traces(model, functools.partial(fit, seed=4)) > 0
    keras.utils.set_random_seed(4)
    assert traces(model, evaluate) > 0
    assert traces(model, evaluate) == 0


def test_memory_of_invalid_traces_is_freed_before_the_next_call():
    model = made()
    fit(model)
    gone = weakref.ref(model.optimizer)
    model.compile("sgd", "mse")
    held: list[bool] = []

    def look(logs: Any) -> None:
        gc.collect()
        held.append(gone() is not None)

    fit(model, callbacks=[keras.callbacks.LambdaCallback(on_train_begin=look)])
    assert held == [False]


def test_error_discards_the_cached_driver():
    model = made()
    evaluate(model)
    with pytest.raises(ZeroDivisionError):
        fit(model, callbacks=[keras.callbacks.LambdaCallback(on_train_begin=lambda _: 1 // 0)])
    assert traces(model, evaluate) > 0


@pytest.mark.nightly
def test_nested_call_has_its_own_driver():
    model = made()
    within: list[dict[str, float]] = []
    note = keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: within.append(evaluate(model)))
    fit(model, epochs=2, callbacks=[note])
    assert within[-1] == pytest.approx(evaluate(model), rel=1e-6)
    assert traces(model, fit) == 0


@pytest.mark.nightly
def test_precisions_have_separate_traces():
    model = made()
    lower = functools.partial(fit, precision="mixed_bfloat16")
    assert all(traces(model, call) > 0 for call in (fit, lower, evaluate))
    assert all(traces(model, call) == 0 for call in (lower, evaluate, lower, fit))


def test_unreferenced_model_is_freed():
    model = made()
    fit(model)
    evaluate(model)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_cached_driver_is_not_pickled():
    model = made()
    fit(model)
    assert kept_with(model).drivers
    assert ATTRIBUTE not in objects.saveable_state(model)


class OwnStep(keras.Model):
    """A step by hand that returns a loss, which is no metric's."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = [Noted(), keras.layers.Dense(1)]

    def call(self, x: Any) -> Any:
        return self.parts[1](self.parts[0](x))

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(x, training=True) - y))
        weights = self.trainable_weights
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return {"loss": loss}


def test_a_step_by_hand_is_traced_as_often_as_by_keras():
    """`tf.function` traces again what creates a variable."""

    def compiled() -> keras.Model:
        model = OwnStep()
        model.compile("adam")
        return model

    by_keras = traces(compiled(), lambda m: m.fit(X, Y, batch_size=8, verbose=0))
    assert traces(compiled(), fit) <= by_keras


@pytest.fixture(scope="module")
def on_devices() -> Any:
    """See `programs/traces_on_devices.py`."""
    (found,) = cluster.run_cluster("traces_on_devices.py", workers=1, env={"TFMW_NO_INIT": "1"})
    return found


@pytest.mark.process
@pytest.mark.nightly
def test_traces_are_reused_on_two_devices(on_devices):
    first, second = on_devices["traces"]
    assert len(first) == 3
    assert all(number > 0 for number in first)
    assert second == [0, 0, 0]
    assert on_devices["of the name"][0] > 0
    assert on_devices["of the name"][1:] == [0]
    assert on_devices["of another strategy"] > 0


@pytest.mark.process
@pytest.mark.nightly
def test_changes_have_effect_on_two_devices_when_they_have_in_keras(on_devices):
    for name, (got, expected, traced) in each(on_devices["changes"].items()):
        assert len(got) == len(expected) == 4, name
        for a, b in zip(got, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6, err_msg=name)
        assert (traced > 0) == (name.startswith("compile") or name in VARIABLES_CHANGE), name


@pytest.mark.process
@pytest.mark.nightly
def test_copies_of_variables_are_empty_between_calls(on_devices):
    assert on_devices["copies"] > 5
    assert on_devices["freed"] == on_devices["copies"]


@pytest.mark.process
@pytest.mark.nightly
def test_strategies_of_a_process_train_one_model_after_the_other(run_cluster):
    (task,) = run_cluster("two_strategies.py", workers=1, env={"TFMW_NO_INIT": "1"})
    assert len(task["losses"]) == 4
    assert np.isfinite(task["losses"]).all()


@pytest.mark.process
@pytest.mark.nightly
def test_models_made_in_the_scope_of_a_strategy_and_outside_of_it(run_cluster):
    """Copies of a metric's variable from a scope are parts of a sum: callbacks must keep it.

    A strategy of one device has no copies, and refuses to update variables from outside.
    """
    (task,) = run_cluster("scopes.py", workers=1, env={"TFMW_NO_INIT": "1"})
    assert len(task) == 4 * 4 + 2
    for name, found in task.items():
        _, _, every_batch = name.rsplit(", ", 2)
        expected = task[f"stock, False, {every_batch}"]
        assert len(found["batches"]) == 10 * (every_batch == "True"), name
        tf.nest.map_structure(
            lambda a, b, name=name: np.testing.assert_allclose(a, b, rtol=3e-6, err_msg=name),
            found,
            expected,
        )


def test_traces_are_kept_beside_a_new_worker_if_steps_update_all_state_of_layers():
    """A worker without a trace exchanges all moving averages; one with a trace, those updated."""
    mean, frozen = object(), object()

    def kept(updated: list[object]) -> Any:
        state = SimpleNamespace(variables=lambda: updated, all_variables=lambda: [mean, frozen])
        driver: Any = SimpleNamespace(updates=[SimpleNamespace(parted=None)], state=state)
        return cached_driver._CachedDriver([], [], driver, None)

    assert kept([mean, frozen]).suits_new_workers
    assert not kept([mean]).suits_new_workers
