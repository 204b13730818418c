"""Losses whose value for one example depends on the other examples of its batch.

Contrastive losses, in-batch negatives and Keras's `Circle` compare the examples of a batch with
each other. A replica has only its part of the batch, so such a loss differs from that of one
process. `couples_examples` detects it: it evaluates a loss on a small random batch and on its two
halves.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

EXAMPLES = 4
UNKNOWN_SIZE = 3  # for dimensions of unknown size


def couples_examples(loss: keras.losses.Loss, y_true: Any, y_pred: Any) -> bool:
    """Whether a loss compares the examples of a batch.

    Args:
        loss: any loss.
        y_true, y_pred: structures of tensors, of which only shapes and dtypes are used.

    Returns:
        False also if the loss returns a scalar, or cannot be evaluated on random values.
    """
    try:
        with tf.init_scope():
            return any(_depends(loss, y_true, y_pred, seed) for seed in (1, 2))
    except Exception:  # a user's function may not accept random values
        return False


def _depends(loss: keras.losses.Loss, y_true: Any, y_pred: Any, seed: int) -> bool:
    random = np.random.default_rng(seed)
    predictions = tf.nest.map_structure(lambda t: _random(t, random, None), y_pred)
    classes = int(tf.nest.flatten(predictions)[0].shape[-1])
    labels = tf.nest.map_structure(lambda t: _random(t, random, classes), y_true)

    def values(part: slice) -> np.ndarray:
        # Keras casts to the dtype of the loss before it calls the loss.
        own = tf.nest.map_structure(
            lambda t: tf.constant(t[part], loss.dtype), (labels, predictions)
        )
        return np.asarray(loss.call(*own), np.float64)

    whole, again = values(slice(None)), values(slice(None))
    half = EXAMPLES // 2
    halves = [values(slice(None, half)), values(slice(half, None))]
    per_example = whole.ndim > 0 and len(whole) == EXAMPLES
    if not per_example or not np.isfinite(whole).all() or not np.array_equal(whole, again):
        return False
    if any(len(part) != half or part.shape[1:] != whole.shape[1:] for part in halves):
        return True  # a matrix of all pairs
    return not np.allclose(whole, np.concatenate(halves), rtol=1e-3, atol=1e-4)


def _random(like: Any, random: np.random.Generator, classes: int | None) -> np.ndarray:
    """Random values of the shape and dtype of a batch.

    Args:
        classes: upper bound of integer labels; None for predictions.
    """
    shape = [EXAMPLES, *[UNKNOWN_SIZE if d is None else d for d in like.shape[1:]]]
    dtype = tf.as_dtype(keras.backend.standardize_dtype(like.dtype)).as_numpy_dtype
    is_index = classes is not None and (shape[1:] in ([], [1]) and classes > 1)
    if is_index or not np.issubdtype(dtype, np.floating):
        return random.integers(0, max(classes or 2, 2), shape).astype(dtype)
    return random.uniform(0.05, 0.95, shape).astype(dtype)
