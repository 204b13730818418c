"""Ways to run steps."""

from __future__ import annotations

from typing import Any
from unittest import mock

import keras
import tensorflow as tf

from tests.matrix.row import Case, row
from tests.matrix.rows.common import adam, classes, compiled, mlp


@row("steps_per_execution", core=True, nightly=True)
def steps_per_execution() -> Case:
    return Case(compiled(mlp(), adam(), steps_per_execution=3), classes())


class _Compiles(keras.callbacks.Callback):
    """Fails where fewer functions than these many are compiled by XLA."""

    def __init__(self, functions: int) -> None:
        super().__init__()
        self._functions = functions
        self._seen = 0

    def on_train_begin(self, logs: Any = None) -> None:
        tf_function = tf.function

        def function(*args: Any, **options: Any) -> Any:
            self._seen += bool(options.get("jit_compile"))
            return tf_function(*args, **options)

        self._patch = mock.patch.object(tf, "function", function)
        self._patch.start()

    def on_train_end(self, logs: Any = None) -> None:
        self._patch.stop()
        assert self._seen >= self._functions, f"XLA compiled {self._seen} functions"


@row("jit_compile", only=("two",), nightly=True)
def jit_compile() -> Case:
    fit = {"callbacks": [_Compiles(2)]}  # The gradients, and the update.
    alone: dict[str, Any] = {"callbacks": []}
    return Case(compiled(mlp(), adam(), jit_compile=True), classes(40), fit=fit, reference=alone)


@row("jit_compile, several replicas in a process", warns="jit_compile is off", only=("devices",))
def jit_compile_devices() -> Case:
    return Case(compiled(mlp(), adam(), jit_compile=True), classes(40))


@row(
    "jit_compile, synchronized BatchNormalization",
    nightly=True,
    warns="jit_compile is off",
    only=("two",),
)
def jit_compile_where_xla_cannot() -> Case:
    model = keras.Sequential(
        [
            keras.layers.Input([5]),
            keras.layers.BatchNormalization(synchronized=True),
            keras.layers.Dense(3),
        ]
    )
    return Case(compiled(model, adam(), jit_compile=True), classes(40))


@row("run_eagerly", nightly=True, core=True)
def run_eagerly() -> Case:
    return Case(compiled(mlp(), adam(), run_eagerly=True), classes(20))


class ReadsValues(keras.Model):
    """Reads a value in its step, which a graph would not allow; built by its first call."""

    def __init__(self) -> None:
        super().__init__()
        self.out = keras.layers.Dense(3)

    def call(self, x: Any) -> Any:
        return self.out(x)

    def train_step(self, data: Any) -> Any:
        assert float(tf.norm(data[0])) > 0
        return super().train_step(data)


@row("run_eagerly, a step that reads values", only=("devices", "two"))
def run_eagerly_reads_values() -> Case:
    return Case(compiled(ReadsValues(), adam(), run_eagerly=True), classes(20))


@row("gradients as bfloat16", nightly=True, tol=2e-2, only=("devices", "two"))
def gradient_compression_bf16() -> Case:
    return Case(compiled(mlp(), adam()), classes(), ours={"gradient_compression": "bf16"})


@row("gradients as float16", nightly=True, tol=2e-3, only=("devices", "two"))
def gradient_compression_fp16() -> Case:
    return Case(compiled(mlp(), adam()), classes(), ours={"gradient_compression": "fp16"})


def _wide(units: int) -> Case:
    """A kernel float32 [units, units], whose gradient is too large to be reduced in one piece."""
    model = keras.Sequential(
        [keras.layers.Input([5]), keras.layers.Dense(units), keras.layers.Dense(units)]
    )
    data = classes(16)
    return Case(compiled(model, "sgd"), data, fit={"epochs": 1}, evaluate=None, predict=None)


@row("a gradient of 13 MB", nightly=True, only=("two",))
def large_gradient() -> Case:
    return _wide(1824)


@row("a gradient of 13 MB, of an odd number of elements", nightly=True, only=("two",))
def odd_gradient() -> Case:
    return _wide(1825)


@row("layers of two dtypes", only=("devices", "two"), nightly=True)
def two_dtypes() -> Case:
    layers = [keras.layers.Dense(8, "tanh", dtype="float64"), keras.layers.Dense(3)]
    model = keras.Sequential([keras.layers.Input([5]), *layers])
    return Case(compiled(model, "sgd"), classes(), predict=None)


@row("precision mixed_bfloat16", nightly=True, tol=2e-2, only=("devices", "two"))
def precision_bfloat16() -> Case:
    return Case(compiled(mlp(), adam()), classes(), ours={"precision": "mixed_bfloat16"})
