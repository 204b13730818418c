"""The common weights, and the outer optimizer that updates them, independent of replicas."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

MIXED = 0.5
"""Fraction of a replica's own weights after an exchange that overlapped with steps.

The experiments of arXiv 2501.18512, section 3.3, use this value.
"""


class OuterStep:
    """The common weights, with one optimizer for each fragment.

    Args:
        values: tensors, the first common weights.
        config: configuration of the outer optimizer, in the form of `keras.optimizers.serialize`.
        fragments: number of fragments, each of neighbouring weights.

    Attributes:
        common: a Keras variable for each weight.
        fragments: the positions of the weights of each fragment.
        dtype: dtype of flat gradients.
    """

    def __init__(self, values: Sequence[tf.Tensor], config: dict[str, Any], fragments: int = 1):
        self.common = [
            keras.Variable(v, dtype=v.dtype.name, name=f"common_{i}") for i, v in enumerate(values)
        ]
        self.fragments = fragments_of([math.prod(v.shape) for v in values], fragments)
        double = any(v.dtype == tf.float64 for v in values)
        self.dtype = tf.float64 if double else tf.float32
        self._optimizers = [
            keras.optimizers.deserialize(copy.deepcopy(config))  # Keras changes the configuration
            for _ in self.fragments
        ]
        for optimizer, positions in zip(self._optimizers, self.fragments, strict=True):
            optimizer.build([self.common[i] for i in positions])

    @property
    def state(self) -> list[Any]:
        """The variables of the outer optimizers."""
        return [v for optimizer in self._optimizers for v in optimizer.variables]

    def elements(self, fragment: int) -> int:
        """Number of values of a fragment."""
        return sum(math.prod(self.common[i].shape) for i in self.fragments[fragment])

    def begin(self, values: Sequence[tf.Tensor]) -> None:
        """Sets the common weights."""
        for variable, value in zip(self.common, values, strict=True):
            variable.assign(value)

    def gradient(self, fragment: int, weights: Sequence[tf.Tensor]) -> tf.Tensor:
        """The outer gradient of one replica: [n], flat.

        Args:
            weights: that replica's weights of the fragment.
        """
        pairs = zip(self.fragments[fragment], weights, strict=True)
        differences = [tf.cast(self.common[i].value - weight, self.dtype) for i, weight in pairs]
        return tf.concat([tf.reshape(d, [-1]) for d in differences], axis=0)

    def apply(self, fragment: int, gradient: tf.Tensor) -> None:
        """Updates the common weights of a fragment by the mean of all replicas' gradients."""
        variables = [self.common[i] for i in self.fragments[fragment]]
        parts = tf.split(gradient, [math.prod(v.shape) for v in variables])
        grads = [
            tf.cast(tf.reshape(part, v.shape), v.dtype)
            for part, v in zip(parts, variables, strict=True)
        ]
        self._optimizers[fragment].apply(grads, variables)


def fragments_of(sizes: Sequence[int], fragments: int) -> list[list[int]]:
    """Positions of neighbouring weights, in fragments of about equal sizes; none is empty.

    Args:
        sizes: size of each weight.
        fragments: number of fragments, at most that of weights.
    """
    parts: list[list[int]] = [[] for _ in range(fragments)]
    total, before, at = sum(sizes), 0.0, 0
    for i, size in enumerate(sizes):
        left = len(sizes) - i
        full = (before + size / 2) * fragments > total * (at + 1)
        needed = left < fragments - at
        if parts[at] and at + 1 < fragments and (full or needed):
            at += 1
        parts[at].append(i)
        before += size
    return parts
