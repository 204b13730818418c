"""Losses that compare the examples of a batch are found; others are not taken for such."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from keras import ops
from keras.src.losses.losses import LossFunctionWrapper

from tfmw.keras_compat.coupling import couples_examples

PREDICTIONS: Any = np.zeros([8, 5], "float32")


def in_batch_negatives(y_true: Any, y_pred: Any) -> Any:
    scores = ops.matmul(y_pred, ops.transpose(y_pred))
    return keras.losses.sparse_categorical_crossentropy(
        ops.arange(ops.shape(y_pred)[0]), scores, from_logits=True
    )


def all_pairs(y_true: Any, y_pred: Any) -> Any:
    return ops.tensordot(y_pred, y_pred, axes=[[1], [1]])


def standardized(y_true: Any, y_pred: Any) -> Any:
    return ops.mean(ops.square((y_pred - ops.mean(y_pred, axis=0)) - y_true), axis=-1)


def same_class(y_true: Any, y_pred: Any) -> Any:
    same = ops.cast(ops.equal(y_true[:, None], y_true[None]), "float32")
    return ops.mean(same * ops.matmul(y_pred, ops.transpose(y_pred)), axis=-1)


def squared(y_true: Any, y_pred: Any) -> Any:
    return ops.square(y_pred - y_true)


def focal(y_true: Any, y_pred: Any) -> Any:
    return keras.losses.categorical_focal_crossentropy(y_true, y_pred)


def of_labels(y_true: Any, y_pred: Any) -> Any:
    return -ops.log(ops.take_along_axis(y_pred, ops.cast(y_true, "int32")[:, None], axis=1)[:, 0])


def one_number(y_true: Any, y_pred: Any) -> Any:
    return ops.mean(ops.square(y_pred - y_true))


def random(y_true: Any, y_pred: Any) -> Any:
    return ops.mean(keras.random.normal(ops.shape(y_pred)) * y_pred, axis=-1)


def not_callable_so(y_true: Any, y_pred: Any) -> Any:
    return ops.reshape(y_pred, [8, 5])[:, 0]


class Contrastive(keras.losses.Loss):
    def call(self, y_true: Any, y_pred: Any) -> Any:
        return in_batch_negatives(y_true, y_pred)


def _wrapped(function: Any) -> keras.losses.Loss:
    return LossFunctionWrapper(function)


@pytest.mark.parametrize(
    ("function", "labels"),
    [
        (in_batch_negatives, PREDICTIONS),
        (all_pairs, PREDICTIONS),
        (standardized, PREDICTIONS),
        (same_class, np.zeros(8, "int32")),
    ],
)
def test_coupled_loss_function_is_detected(function: Any, labels: Any) -> None:
    assert couples_examples(_wrapped(function), labels, PREDICTIONS)


def test_coupled_loss_class_is_detected() -> None:
    assert couples_examples(Contrastive(), PREDICTIONS, PREDICTIONS)


@pytest.mark.parametrize(
    ("function", "labels"),
    [
        (squared, PREDICTIONS),
        (focal, PREDICTIONS),
        (of_labels, np.zeros(8, "int64")),
        (one_number, PREDICTIONS),
        (random, PREDICTIONS),
        (not_callable_so, PREDICTIONS),
    ],
)
def test_other_losses_are_not_coupled(function: Any, labels: Any) -> None:
    assert not couples_examples(_wrapped(function), labels, PREDICTIONS)
