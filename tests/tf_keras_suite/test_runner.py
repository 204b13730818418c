"""The runner of legacy Keras's tests, on a test that is made here: nothing is downloaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tf_keras_suite import __main__ as suite

TEST = """
import tensorflow.compat.v2 as tf
import tf_keras as keras
from absl.testing import parameterized
from tf_keras.distribute import own_combinations
from tf_keras.layers.rnn import lstm
from tf_keras.optimizers.legacy import gradient_descent


class Test(tf.test.TestCase, parameterized.TestCase):
    @tf.__internal__.distribute.combinations.generate(own_combinations.all_of_them())
    def test_fit(self, distribution, mode):
        with distribution.scope():
            model = keras.Sequential([keras.Input([3, 1]), lstm.LSTM(1)])
            model.compile(gradient_descent.SGD(0.1), "mse")
        self.assertLen(model.fit(tf.ones([8, 3, 1]), tf.ones([8, 1])).history["loss"], 1)
        self.assertEqual(mode, "eager")
        self.assertEqual(distribution.num_replicas_in_sync, 2)  # not so without a strategy
"""
COMBINATIONS = """
import tensorflow.compat.v2 as tf

of = tf.__internal__.distribute.combinations


def all_of_them():
    return tf.__internal__.test.combinations.combine(
        distribution=[of.mirrored_strategy_with_two_gpus, of.tpu_strategy],
        mode=["graph", "eager"],
    )
"""


@pytest.mark.nightly
def test_strategies_are_those_of_tfmw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "BUILD", tmp_path / "build")
    folder = tmp_path / "tf_keras" / "distribute"
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    (folder / "own_test.py").write_text(TEST)
    (folder / "own_combinations.py").write_text(COMBINATIONS)
    found = {where: suite.run(tmp_path, where, ["own_test.py"]) for where in ("devices", "keras")}
    name = "tf_keras/distribute/own_test.py::Test::test_fit_Mirrored2GPUs"
    assert found["devices"][name]["outcome"] == "passed", found["devices"][name]["error"]
    assert found["devices"][name]["calls"] == 1
    assert found["keras"][name]["outcome"] == "failed"
    assert found["keras"][name]["calls"] == 0
