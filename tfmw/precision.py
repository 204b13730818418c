"""Training a float32 model with 16 bits: `fit(precision=..., gradient_compression=...)`.

    with trained_in(model, "mixed_bfloat16"):
        ...  # layers compute in bfloat16; weights, optimizer and losses stay float32

Keras takes a model's precision when its layers are made; this gives it to a model that exists.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import keras
import tensorflow as tf

from tfmw import keras_compat
from tfmw.errors import UsageError

PRECISIONS = ("mixed_bfloat16", "mixed_float16")

COMPRESSIONS = {"fp16": tf.float16, "bf16": tf.bfloat16}
"""The types that gradients may be sent in: the choices of `fit(gradient_compression=...)`."""


def check(precision: str | None, gradient_compression: str | None) -> None:
    """Raises UsageError for choices that `fit` does not know."""
    if gradient_compression not in (None, *COMPRESSIONS):
        raise UsageError(
            f"unknown gradient_compression {gradient_compression!r}: expected None, "
            f"{' or '.join(map(repr, COMPRESSIONS))}."
        )
    if precision not in (None, "float32", *PRECISIONS):
        raise UsageError(
            f"unknown precision {precision!r}: expected None, 'float32', "
            f"{' or '.join(map(repr, PRECISIONS))}."
        )


@contextlib.contextmanager
def trained_in(model: keras.Model, precision: str | None) -> Iterator[None]:
    """Gives layers of policy float32 the policy `precision`, and float32 back afterwards.

    Layers of any other policy keep theirs.

    Raises:
        UsageError: "mixed_float16" with an optimizer that does not scale the loss: small gradients
            would be rounded to zero.
    """
    if precision not in PRECISIONS:
        yield
        return
    scaled = isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    if precision == "mixed_float16" and not scaled:
        raise UsageError(
            'precision="mixed_float16" needs an optimizer that scales the loss, received '
            f"{type(model.optimizer).__name__}: compile the model with "
            "keras.optimizers.LossScaleOptimizer(optimizer), or use 'mixed_bfloat16'."
        )
    changed = [
        layer
        for layer in [model, *keras_compat.layers_of(model)]
        if layer.dtype_policy.name == "float32"
    ]
    try:
        for layer in changed:
            layer.dtype_policy = precision
        yield
    finally:
        for layer in changed:
            layer.dtype_policy = "float32"
