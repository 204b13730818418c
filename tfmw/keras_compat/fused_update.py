"""An optimizer's update as one compiled function, in place of a dozen passes over every weight.

Keras's optimizers compute an update op by op, and each op reads and writes memory as large as the
weights. For a 25M-parameter model with Adam this takes more time than forward and backward pass
together. XLA fuses the ops into one pass per variable. The arithmetic is Keras's own, so the
results differ by rounding only. (TensorFlow's `ResourceApplyAdam` is as fast, but rounds 1 - beta_2
to float32 first, which changes an update by 2e-5 of its size.)

Compiling takes about half a second and 80 MB, so updates of small models are not compiled.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfmw.errors import UsageError
from tfmw.keras_compat.models import native
from tfmw.keras_compat.objects import overridden
from tfmw.keras_compat.optimizers import with_inner_optimizers

FUSED_UPDATE = "TFMW_FUSED_UPDATE"
"""Environment variable: "auto" (default), "on" for models of any size, or "off"."""

MIN_BYTES = 4 << 20
"""Bytes of trainable weights below which compiling costs more than it saves."""


@contextlib.contextmanager
def fused_update(optimizer: Any, variables: list[Any]) -> Iterator[None]:
    """Compiles `optimizer.apply` if `fuses` returns True.

    Args:
        optimizer: a Keras optimizer, built.
        variables: the Keras variables that it updates.
    """
    if not fuses(optimizer, variables):
        yield
        return
    keras_apply = optimizer.apply

    def apply(grads: Any, trainable_variables: Any = None) -> None:
        grads = list(grads)
        # The number of rows of sparse gradients varies, and XLA would compile for each.
        if tf.executing_eagerly() or any(isinstance(g, tf.IndexedSlices) for g in grads):
            keras_apply(grads, trainable_variables)
            return

        @tf.function(jit_compile=True, autograph=False)
        def update() -> tf.Tensor:
            keras_apply(grads, trainable_variables)
            return tf.constant(0)

        update()

    with overridden([(optimizer, "apply", apply)]):
        yield


def fuses(optimizer: Any, variables: list[Any], choice: str | None = None) -> bool:
    """Whether updates by `optimizer` are compiled.

    Only those of Keras's own optimizers: a user's class may not compile. Only on the CPU, and with
    one replica in the process: XLA treats all virtual devices of a process as one.

    Args:
        optimizer: a Keras optimizer.
        variables: the Keras variables that it updates.
        choice: "auto", "on" or "off"; by default that of the environment.

    Raises:
        UsageError: `choice` is unknown.
    """
    choice = choice or os.environ.get(FUSED_UPDATE, "auto")
    if choice not in ("auto", "on", "off"):
        raise UsageError(f"{FUSED_UPDATE} is {choice!r}: expected auto, on or off.")
    values = [native(v) for v in variables]
    if choice == "off" or not values or not _is_of_keras(optimizer):
        return False
    if any(isinstance(v, tf.distribute.DistributedValues) or not _on_cpu(v) for v in values):
        return False
    size = sum(v.shape.num_elements() * v.dtype.size for v in values)
    return choice == "on" or size >= MIN_BYTES


def _is_of_keras(optimizer: Any) -> bool:
    every = with_inner_optimizers(optimizer)
    return all(type(each).__module__.startswith("keras.") for each in every)


def _on_cpu(variable: Any) -> bool:
    return "CPU" in (variable.device or "CPU").upper()
