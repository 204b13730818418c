"""Per-replica state, restored on another number of replicas."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfmw
from tfmw.train.mirrored.sync_driver import SyncDriver
from tfmw.train.mirrored.synchronization import EachStep

X = np.random.default_rng(0).normal(size=(24, 4)).astype("float32")


@pytest.fixture
def driver() -> SyncDriver:
    """A driver of one replica, after a step of a model with moving averages."""
    layers = [keras.Input((4,)), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile("sgd", "mse", metrics=["mae"])
    tfmw.fit(model, X, X[:, :1], verbose=0)
    return SyncDriver(model, EachStep(tf.distribute.get_strategy()))


def test_another_number_of_replicas_gets_the_mean_of_averages_and_the_sum_of_metrics(driver):
    norm = driver.model.layers[0]
    metrics, averages = (np.asarray(rows) for rows in driver.state.rows())
    assert len(averages) == len(metrics) == 1
    factors = np.array([[1.0], [2.0], [6.0]])  # of three replicas
    with driver:
        driver.state.restore(factors * metrics, factors * averages)
        restored = [np.asarray(rows) for rows in driver.state.rows()]
    np.testing.assert_allclose(restored[0], 9 * metrics, rtol=1e-6)
    np.testing.assert_allclose(restored[1], 3 * averages, rtol=1e-6)
    mean = np.concatenate([norm.moving_mean, norm.moving_variance])
    np.testing.assert_allclose(mean, 3 * averages[0], rtol=1e-6)
    assert mean.any()


def test_same_number_of_replicas_restores_each_replica(driver):
    metrics, averages = (np.asarray(rows) for rows in driver.state.rows())
    with driver:
        driver.state.restore(2 * metrics, 3 * averages)
        restored = [np.asarray(rows) for rows in driver.state.rows()]
    np.testing.assert_allclose(restored[0], 2 * metrics, rtol=1e-6)
    np.testing.assert_allclose(restored[1], 3 * averages, rtol=1e-6)
