"""Ways to run steps."""

from __future__ import annotations

import keras

from tests.matrix.row import Case, row
from tests.matrix.rows.common import adam, classes, compiled, mlp


@row("steps_per_execution", core=True)
def steps_per_execution() -> Case:
    return Case(compiled(mlp(), adam(), steps_per_execution=3), classes())


@row("jit_compile", only=("two",))
def jit_compile() -> Case:
    return Case(compiled(mlp(), adam(), jit_compile=True), classes(40))


@row("jit_compile, several replicas in a process", warns="jit_compile is off", only=("devices",))
def jit_compile_devices() -> Case:
    return jit_compile()


@row("jit_compile, synchronized BatchNormalization", warns="jit_compile is off", only=("two",))
def jit_compile_where_xla_cannot() -> Case:
    model = keras.Sequential(
        [
            keras.layers.Input([5]),
            keras.layers.BatchNormalization(synchronized=True),
            keras.layers.Dense(3),
        ]
    )
    return Case(compiled(model, adam(), jit_compile=True), classes(40))


@row("run_eagerly", core=True)
def run_eagerly() -> Case:
    return Case(compiled(mlp(), adam(), run_eagerly=True), classes(20))


@row("gradients as bfloat16", tol=2e-2, only=("devices", "two"))
def gradient_compression_bf16() -> Case:
    return Case(compiled(mlp(), adam()), classes(), ours={"gradient_compression": "bf16"})


@row("gradients as float16", tol=2e-3, only=("devices", "two"))
def gradient_compression_fp16() -> Case:
    return Case(compiled(mlp(), adam()), classes(), ours={"gradient_compression": "fp16"})


def _wide(units: int) -> Case:
    """A kernel float32 [units, units], whose gradient is too large to be reduced in one piece."""
    model = keras.Sequential(
        [keras.layers.Input([5]), keras.layers.Dense(units), keras.layers.Dense(units)]
    )
    data = classes(16)
    return Case(compiled(model, "sgd"), data, fit={"epochs": 1}, evaluate=None, predict=None)


@row("a gradient of 13 MB", only=("two",))
def large_gradient() -> Case:
    return _wide(1824)


@row("a gradient of 13 MB, of an odd number of elements", only=("two",))
def odd_gradient() -> Case:
    return _wide(1825)


@row("precision mixed_bfloat16", tol=2e-2, only=("devices", "two"))
def precision_bfloat16() -> Case:
    return Case(compiled(mlp(), adam()), classes(), ours={"precision": "mixed_bfloat16"})
