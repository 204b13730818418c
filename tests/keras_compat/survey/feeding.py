"""The data of an item and its model's first layers, in a context."""

from __future__ import annotations

import dataclasses
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from tests.keras_compat.survey.contexts import CLASSES, FEATURES, STEPS, Context
from tests.matrix.row import Case

_TOKENS = 9


def plain(context: Context) -> Context:
    """The same context, for items that have neither sequences nor labels of classes."""
    return dataclasses.replace(context, masked=False, by_class=False)


def inputs_of(context: Context) -> np.ndarray:
    """float32 [n, FEATURES], or int32 [n, STEPS] of tokens, where 0 is masked."""
    random = context.random()
    if not context.masked:
        return random.normal(size=(context.examples, FEATURES)).astype("float32")
    tokens = random.integers(1, _TOKENS, context.shape).astype("int32")
    lengths = random.integers(0, STEPS + 1, (context.examples, 1))
    lengths[0] = STEPS  # where all is masked, Keras divides zero by zero
    return tokens * (np.arange(STEPS) < lengths).astype("int32")


def labels_of(context: Context, kind: str) -> np.ndarray:
    """Labels: "index" int32 [n], "one hot", "sign" or "number" float32 [n, CLASSES]."""
    random, shape = context.random(), (*context.shape, CLASSES)
    index = random.integers(0, CLASSES, context.shape).astype("int32")
    if kind == "index":
        return index
    if kind == "one hot":
        return np.eye(CLASSES, dtype="float32")[index]
    if kind == "sign":
        return random.choice([-1.0, 1.0], shape).astype("float32")
    return random.uniform(0.1, 0.9, shape).astype("float32")


def hidden_layers(context: Context) -> list[Any]:
    """The input and the layers before those of an output."""
    hidden = layers.Dense(4, activation="tanh", kernel_regularizer=context.regularizer())
    if not context.masked:
        return [keras.Input([FEATURES]), hidden]
    embedding = layers.Embedding(_TOKENS, FEATURES, mask_zero=True)
    return [keras.Input([STEPS], dtype="int32"), embedding, hidden]


def network(context: Context, activation: str | None) -> list[Any]:
    """All layers of a model with one output."""
    return [*hidden_layers(context), layers.Dense(CLASSES, activation=activation)]


def fed(context: Context, model: Any, x: Any, y: Any = None) -> Case:
    """A case that passes arrays as the context says; `y` None: all of it is in `x`."""
    weights = context.sample_weights() if context.weighted and y is not None else None
    parts = tuple(part for part in (x, y, weights) if part is not None)
    fit: dict[str, Any] = {}
    classes = y is not None and not isinstance(y, dict) and (y.dtype == "int32" or _is_one_hot(y))
    if context.by_class and classes and weights is None and not context.masked:
        fit["class_weight"] = {0: 0.5, 1: 2.0, 2: 1.0}
    if context.feed == "arrays":
        given: dict[str, Any] = {"batch_size": context.batch}
        if weights is not None:
            given["sample_weight"] = weights
        evaluate = {"x": x, **({} if y is None else {"y": y}), **given}
        return Case(model, x, y, {**fit, **given, "shuffle": False}, evaluate, predict=None)
    examples = tf.data.Dataset.from_tensor_slices(parts if y is not None else x)
    if context.feed == "unknown length":
        examples = examples.filter(lambda *_: True)
    if context.feed == "repeated":
        data = examples.repeat().batch(context.batch)
        steps = context.full_steps
        fit["steps_per_epoch"] = steps
        return Case(model, data, None, fit, {"x": data, "steps": steps}, predict=None)
    return Case(model, examples.batch(context.batch), None, fit, predict=None)


def _is_one_hot(y: np.ndarray) -> bool:
    return y.ndim == 2 and set(np.unique(y)) <= {0.0, 1.0} and bool((y.sum(axis=1) == 1).all())


def case_of(context: Context, model: Any, x: Any, y: Any, **options: Any) -> Case:
    """A compiled case."""
    options = {
        "optimizer": keras.optimizers.SGD(0.05, momentum=0.5),
        "loss": keras.losses.MeanSquaredError(reduction=context.reduction),
        "steps_per_execution": context.steps_per_execution,
        **options,
    }
    model.compile(**options)
    return fed(context, model, x, y)


def only_trained(case: Case) -> Case:
    """The same case without an evaluation."""
    return dataclasses.replace(case, evaluate=None)
