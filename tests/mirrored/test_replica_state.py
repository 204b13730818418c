"""Per-replica state, restored on another number of replicas."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfmw
from tests.helpers.cases import each
from tests.programs._extremes import FIRST, LARGE, Extremes
from tfmw.compat.metric_variables import metric_variables, packed
from tfmw.train.mirrored.sync_driver import SyncDriver
from tfmw.train.mirrored.synchronization import EachStep

X = np.random.default_rng(0).normal(size=(24, 4)).astype("float32")


@pytest.fixture
def driver() -> SyncDriver:
    """A driver of one replica, after a step of a model with moving averages."""
    layers = [keras.Input((4,)), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile("sgd", "mse", metrics=["mae", Extremes()])
    tfmw.fit(model, X, X[:, :1], verbose=0)
    return SyncDriver(model, EachStep(tf.distribute.get_strategy()))


def values_of(driver: SyncDriver) -> dict[str, np.ndarray]:
    """The values of the metrics' and layers' variables, by the ends of their paths."""
    found = [*metric_variables(driver.model), *driver.model.layers[0].non_trainable_variables]
    return {v.path.rpartition("/")[2]: v.numpy() for v in found}


def test_rows_are_exact_and_the_same_number_of_replicas_restores_each(driver):
    before = values_of(driver)
    assert before["count"] == LARGE + 24
    assert before["moving_mean"].any()
    metrics, averages = driver.state.rows()
    assert len(averages) == len(metrics) == 2  # one replica, and all
    metrics[1], averages[1] = 1, 1
    with driver:
        driver.model.reset_metrics()
        driver.model.layers[0].moving_mean.assign(np.zeros(4))
        driver.state.restore(metrics, averages)
    assert {n: v.tobytes() for n, v in values_of(driver).items()} == {
        n: v.tobytes() for n, v in before.items()
    }


def test_another_number_of_replicas_gets_the_metrics_of_all_and_the_mean_of_averages(driver):
    before = values_of(driver)
    model, results = driver.model, driver.results
    results.reset()
    results._combined = {
        id(v): kind
        for v in metric_variables(model)
        for kind, name in (("max", "largest"), ("min", "smallest"))
        if v.path.endswith(name)
    }
    of_three = []  # a replica with all examples, and two without any
    for variable in metric_variables(model):
        name = variable.path.rpartition("/")[2]
        of_three.append(np.array([before[name], *(2 * [FIRST.get(name, 0)])], variable.dtype))
    whole = map(results.over_all, metric_variables(model), of_three)
    metrics = packed(4, [np.stack([*r, a]) for r, a in zip(of_three, whole, strict=True)])
    _, averages = driver.state.rows()
    averages = np.concatenate([np.zeros([3, averages.shape[1]], np.uint8), averages[:1]])
    with driver:
        driver.state.restore(metrics, averages)
    for name, value in each(values_of(driver).items()):
        np.testing.assert_array_equal(value, before[name], err_msg=name)
