"""Optimizers and their options."""

from __future__ import annotations

from typing import Any

import keras

from tests.matrix.row import Case, row
from tests.matrix.rows.common import adam, classes, compiled, mlp

optimizers = keras.optimizers


def _with(optimizer: Any) -> Case:
    # Evaluation and prediction do not know the optimizer; other rows compare them.
    return Case(compiled(mlp(), optimizer), classes(), evaluate=None, predict=None)


@row("SGD with Nesterov momentum", nightly=True)
def sgd() -> Case:
    return _with(optimizers.SGD(0.1, momentum=0.9, nesterov=True))


@row("Adam, amsgrad", nightly=True, tol=1e-4)
def plain_adam() -> Case:
    return _with(optimizers.Adam(0.01, amsgrad=True))


@row("AdamW", core=True, nightly=True)
def adamw() -> Case:
    return _with(optimizers.AdamW(0.01, weight_decay=0.1, epsilon=1e-3))


@row("RMSprop, centered", nightly=True, tol=1e-4)
def rmsprop() -> Case:
    return _with(optimizers.RMSprop(0.01, centered=True, momentum=0.5, epsilon=1e-3))


@row("Lion", nightly=True)
def lion() -> Case:
    # Lion steps by the sign: a gradient that is all rounding error could step either way.
    return _with(optimizers.Lion(0.003))


@row("Adagrad", nightly=True)
def adagrad() -> Case:
    return _with(optimizers.Adagrad(0.1))


@row("Nadam", nightly=True)
def nadam() -> Case:
    return _with(optimizers.Nadam(0.01, epsilon=1e-3))


@row("Adafactor", nightly=True, tol=1e-4)
def adafactor() -> Case:
    return _with(optimizers.Adafactor(0.01))


@row("clipnorm", nightly=True)
def clipnorm() -> Case:
    return _with(adam(clipnorm=0.05))


@row("global_clipnorm", nightly=True, core=True)
def global_clipnorm() -> Case:
    return _with(adam(global_clipnorm=0.05))


@row("clipvalue", nightly=True)
def clipvalue() -> Case:
    return _with(adam(clipvalue=0.01))


@row("weight decay with a name left out", nightly=True)
def weight_decay() -> Case:
    optimizer = optimizers.SGD(0.1, weight_decay=0.05)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return _with(optimizer)


@row("EMA of weights", nightly=True, core=True)
def ema() -> Case:
    return _with(adam(use_ema=True, ema_momentum=0.8))


@row("EMA of weights, written back every 3 steps", nightly=True)
def ema_overwrite() -> Case:
    return _with(adam(use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=3))


@row("gradient_accumulation_steps", core=True, fast=True)
def accumulation() -> Case:
    return _with(adam(gradient_accumulation_steps=3))


if hasattr(optimizers, "MultiOptimizer"):  # the oldest Keras has none

    @row("MultiOptimizer", nightly=True)
    def multi_optimizer() -> Case:
        by_path = optimizers.OptimizerMap(optimizers.SGD(0.05))
        by_path[".*bias"] = optimizers.Adam(0.01, epsilon=1e-3)
        return _with(optimizers.MultiOptimizer(by_path))


@row("learning-rate schedule", nightly=True)
def schedule() -> Case:
    return _with(adam(optimizers.schedules.CosineDecay(0.05, 8, warmup_target=0.1, warmup_steps=3)))


def _mixed(policy: str, optimizer: Any) -> Case:
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        model = mlp()
        model.add(keras.layers.Activation("linear", dtype="float32"))
    finally:
        keras.config.set_dtype_policy(before)
    return Case(compiled(model, optimizer), classes(), predict=None)


@row("mixed_float16 with LossScaleOptimizer", core=True, tol=2e-3)
def mixed_float16() -> Case:
    optimizer = optimizers.LossScaleOptimizer(adam(), initial_scale=2.0**14, dynamic_growth_steps=4)
    return _mixed("mixed_float16", optimizer)


@row(
    "mixed_float16, a loss scale that overflows",
    nightly=True,
    but="a sum over one replica's examples overflows float16 at twice the scale or more at which "
    "the sum over all does, so steps that are skipped may differ",
    equal=(),
)
def overflow() -> Case:
    optimizer = optimizers.LossScaleOptimizer(adam(), initial_scale=2.0**20, dynamic_growth_steps=9)
    return _mixed("mixed_float16", optimizer)


@row("mixed_bfloat16", nightly=True, tol=2e-2)
def mixed_bfloat16() -> Case:
    return _mixed("mixed_bfloat16", adam())
