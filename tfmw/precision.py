"""Training a float32 model with 16 bits: `fit(precision=..., gradient_compression=...)`.

    with trained_in(model, "mixed_bfloat16"):
        ...  # layers compute in bfloat16; weights, optimizer and losses stay float32

Keras sets a layer's precision when the layer is created; this module changes that of a model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import keras
import tensorflow as tf

from tfmw.errors import UsageError
from tfmw.keras_compat import models

PRECISIONS = ("mixed_bfloat16", "mixed_float16")

COMPRESSIONS = {"fp16": tf.float16, "bf16": tf.bfloat16}
"""Types in which gradients are sent, by the choice of `fit(gradient_compression=...)`."""


def check(precision: str | None, gradient_compression: str | None) -> None:
    """Raises UsageError for unknown choices."""
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
    """Sets layers of policy float32 to the policy `precision`, and back to float32 afterwards.

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
        layer for layer in [model, *models.layers_of(model)] if layer.dtype_policy.name == "float32"
    ]
    try:
        for layer in changed:
            layer.dtype_policy = precision
        yield
    finally:
        for layer in changed:
            layer.dtype_policy = "float32"
