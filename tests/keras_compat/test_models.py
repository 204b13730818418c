"""Building of models with a `train_step` of their own."""

from __future__ import annotations

import bdb
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfmw.compat.models import build_all

SPEC = (tf.TensorSpec([None, 3]), tf.TensorSpec([None, 2]))


class OwnStep(keras.Model):
    calls = 0

    def weights_to_update(self) -> list[Any]:
        return list(self.trainable_variables)

    def train_step(self, data: Any) -> dict[str, Any]:
        type(self).calls += 1
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
            weights = self.weights_to_update()
            loss += tf.add_n([tf.reduce_sum(weight) for weight in weights])
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


outside = keras.Variable(np.ones(2, "float32"), name="outside")


class UpdatesAVariableOfTheModule(OwnStep):
    def weights_to_update(self) -> list[Any]:
        return [*self.trainable_variables, outside]


class UpdatesItThroughAProperty(OwnStep):
    @property
    def others(self) -> list[Any]:
        return [outside]

    def weights_to_update(self) -> list[Any]:
        return [*self.trainable_variables, *self.others]


def _variables() -> list[Any]:
    return [outside]


class UpdatesTheResultOfAFunction(OwnStep):
    def weights_to_update(self) -> list[Any]:
        return [*self.trainable_variables, *_variables()]


def model_of(kind: type[OwnStep]) -> Any:
    inputs = keras.Input((3,))
    model = kind(inputs, keras.layers.Dense(2)(inputs))
    model.compile("adam")
    kind.calls = 0
    return model


def test_a_step_is_not_traced_for_the_one_optimizer_of_a_model_that_is_built() -> None:
    model = model_of(OwnStep)
    build_all(model, SPEC)
    assert OwnStep.calls == 0
    assert model.optimizer._trainable_variables == model.trainable_variables


@pytest.mark.parametrize(
    "kind",
    [UpdatesAVariableOfTheModule, UpdatesItThroughAProperty, UpdatesTheResultOfAFunction],
)
def test_a_step_is_traced_that_may_update_other_variables(kind: type[OwnStep]) -> None:
    model = model_of(kind)
    build_all(model, SPEC)
    assert kind.calls == 1
    assert model.optimizer._trainable_variables == [*model.trainable_variables, outside]


class ByHand(keras.Model):
    def train_step(self, data: Any) -> dict[str, Any]:
        self.layers[-1].kernel.assign_add(self.layers[-1].kernel)
        return {"loss": 0.0}


def test_the_optimizer_stays_unbuilt_that_a_step_does_not_use() -> None:
    inputs = keras.Input((3,))
    model = ByHand(inputs, keras.layers.Dense(2)(inputs))
    model.compile()
    build_all(model, SPEC)
    assert not model.optimizer.built


def test_a_step_is_traced_that_may_use_another_optimizer() -> None:
    model = model_of(OwnStep)
    model.other = keras.optimizers.SGD()
    build_all(model, SPEC)
    assert OwnStep.calls == 1
    assert model.optimizer.built
    assert not model.other.built


def test_a_step_is_traced_that_may_use_an_optimizer_that_is_built() -> None:
    model = model_of(OwnStep)
    model.other = keras.optimizers.SGD()
    model.other.build(model.trainable_variables)
    build_all(model, SPEC)
    assert OwnStep.calls == 1


class Stopped(ByHand):
    def train_step(self, data: Any) -> dict[str, Any]:
        raise bdb.BdbQuit


def test_the_debugger_can_be_left_in_the_call_without_values() -> None:
    """An eager step that needs values may fail there; q of pdb ends the program."""
    inputs = keras.Input((3,))
    model = Stopped(inputs, keras.layers.Dense(2)(inputs))
    model.compile(run_eagerly=True)
    with pytest.raises(bdb.BdbQuit):
        build_all(model, SPEC)
