"""Small trainings by tfmw on replicas that are GPUs, each beside the same one on one replica.

    python -m tests.on_gpus.cases devices [NAME ...]     # two logical devices of one GPU
    tfmw run --workers 2 -m tests.on_gpus.cases workers  # two workers, which may share a GPU

Without a GPU the replicas are CPU devices. Prints a line for each case: its name, the largest
difference of a loss or metric, and the largest of a weight.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfmw

FLOAT, HALF = 2e-4, 2e-2  # differences of losses that rounding explains
_MB = 4000

random = np.random.default_rng(0)
X = random.normal(size=(96, 12)).astype(np.float32)
Y = random.integers(0, 4, 96).astype(np.int32)
IDS = random.integers(1, 50, (96, 7)).astype(np.int32)
IDS[:, 5:] = 0  # cuDNN takes masks of padding at the end
WEIGHTS = random.random(96).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class Case:
    """A training.

    Attributes:
        model: makes the compiled model.
        data: makes the dataset.
        tolerance: of losses and metrics.
        options: of `tfmw.fit`.
    """

    model: Callable[[], keras.Model]
    data: Callable[[], tf.data.Dataset]
    tolerance: float = FLOAT
    options: dict[str, Any] = dataclasses.field(default_factory=dict)


def _compiled(layers: list[Any], optimizer: Any = "adam", **options: Any) -> keras.Model:
    model = keras.Sequential(layers)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"], **{"jit_compile": False, **options})
    return model


def _dense(policy: str = "float32", optimizer: Any = "adam", **options: Any) -> keras.Model:
    keras.utils.set_random_seed(3)
    last = None if policy == "bfloat16" else "float32"
    keras.mixed_precision.set_global_policy(policy)
    try:
        layers = [keras.layers.Dense(16, activation="relu"), keras.layers.Dense(4, dtype=last)]
        return _compiled([keras.Input((12,)), *layers], optimizer, **options)
    finally:
        keras.mixed_precision.set_global_policy("float32")


def _embedding(upper: Any) -> keras.Model:
    keras.utils.set_random_seed(3)
    layers = [keras.layers.Embedding(50, 8, mask_zero=True), upper, keras.layers.Dense(4)]
    return _compiled([keras.Input((7,), dtype="int32"), *layers])


def _batches(*arrays: np.ndarray, rows: int = 96) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(tuple(a[:rows] for a in arrays)).batch(16)


def _filtered() -> tf.data.Dataset:
    return _batches(X, Y).unbatch().filter(lambda x, y: y >= 0).batch(16)


def _plain() -> tf.data.Dataset:
    return _batches(X, Y)


CASES = {
    "float32": Case(_dense, _plain),
    "a last batch of 5": Case(_dense, lambda: _batches(X, Y, rows=85)),
    "a dataset of unknown size": Case(_dense, _filtered),
    "sample weights": Case(_dense, lambda: _batches(X, Y, WEIGHTS)),
    "SGD with momentum": Case(
        lambda: _dense(optimizer=keras.optimizers.SGD(0.1, momentum=0.9)), _plain
    ),
    "clipping by the global norm": Case(
        lambda: _dense(optimizer=keras.optimizers.Adam(global_clipnorm=0.1)), _plain
    ),
    "XLA": Case(lambda: _dense(jit_compile=True), _plain),
    "embedding": Case(
        lambda: _embedding(keras.layers.GlobalAveragePooling1D()), lambda: _batches(IDS, Y)
    ),
    "LSTM with a mask": Case(lambda: _embedding(keras.layers.LSTM(6)), lambda: _batches(IDS, Y)),
    "mixed_float16": Case(lambda: _dense("mixed_float16"), _plain, HALF),
    "mixed_bfloat16": Case(lambda: _dense("mixed_bfloat16"), _plain, HALF),
    "bfloat16": Case(lambda: _dense("bfloat16"), _plain, 5 * HALF),
    'gradient_compression="fp16"': Case(_dense, _plain, HALF, {"gradient_compression": "fp16"}),
    "shard_optimizer=True": Case(_dense, _plain, options={"shard_optimizer": True}),
    "local SGD, every step": Case(
        lambda: _dense(optimizer=keras.optimizers.SGD(0.1)),
        _plain,
        options={"sync": tfmw.LocalSGD(1)},
    ),
}


def _logical_devices() -> tf.distribute.Strategy:
    gpus = tf.config.list_physical_devices("GPU")
    device = (gpus or tf.config.list_physical_devices("CPU"))[0]
    part = tf.config.LogicalDeviceConfiguration(memory_limit=_MB if gpus else None)
    tf.config.set_logical_device_configuration(device, [part, part])
    return tfmw.strategies.mirrored([f"{device.device_type}:{i}" for i in range(2)])


def compared(case: Case, strategy: Any) -> tuple[float, float]:
    """(the largest difference of a loss or metric, that of a weight) from one replica."""
    model, one = case.model(), case.model()
    shared = {} if strategy is None else {"strategy": strategy}
    found = tfmw.fit(model, case.data(), epochs=2, verbose=0, **case.options, **shared).history
    expected = tfmw.fit(one, case.data(), epochs=2, verbose=0, strategy="default").history
    losses = [np.abs(np.subtract(found[name], expected[name])).max() for name in expected]
    weights = [
        np.abs(np.asarray(a, np.float32) - np.asarray(b, np.float32)).max()
        for a, b in zip(model.get_weights(), one.get_weights(), strict=True)
    ]
    return float(max(losses)), float(max(weights))


def main(kind: str, names: list[str]) -> int:
    """Returns the number of cases that differ by more than rounding."""
    strategy, chief = None, True
    if kind == "workers":
        chief = tfmw.init(collectives="grpc").is_chief
    else:
        strategy = _logical_devices()
    wrong = 0
    for name in names or list(CASES):
        losses, weights = compared(CASES[name], strategy)
        right = losses <= CASES[name].tolerance
        wrong += not right
        if chief:
            print(
                f"| {name} | {losses:.1e} | {weights:.1e} | {'' if right else 'differs'} |",
                flush=True,
            )
    return wrong


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
