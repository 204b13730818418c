"""`keras.distribution.set_runtime`, the proposed hook of Keras, with tfmw as the runtime.

`make test-nightly` applies docs/contribute/keras-runtime.patch to Keras and runs this file, which
pytest does not collect by its name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfmw

X = np.random.default_rng(0).normal(size=(26, 4)).astype("float32")


class Runtime:
    """The devices of this process, on which tfmw's public functions train."""

    def __init__(self) -> None:
        self.ran: list[str] = []

    def initialize(
        self, job_addresses: str | None, num_processes: int | None, process_id: int | None
    ) -> None:
        """Joins the cluster that the environment describes."""
        tfmw.init()

    def num_processes(self) -> int:
        return 1

    def process_id(self) -> int:
        return 0

    def list_devices(self, device_type: str | None = None) -> list[str]:
        return [f"cpu:{n}" for n in range(len(tf.config.list_logical_devices("CPU")))]

    def run(
        self, method: Callable[..., Any], trainer: Any, args: Any, kwargs: dict[str, Any]
    ) -> Any:
        """Makes the call on all devices of the distribution."""
        distribution = kwargs.pop("distribution")
        if distribution is None:
            return method(trainer, *args, **kwargs)
        self.ran.append(method.__name__)
        tfmw_method = getattr(tfmw, method.__name__)
        return tfmw_method(trainer, *args, strategy="mirrored", **kwargs)


def numbers() -> dict[str, Any]:
    """The results of each method of a new model."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
    batches = tf.data.Dataset.from_tensor_slices((X, X[:, :1])).batch(7)
    return {
        "fit": model.fit(batches, epochs=2, shuffle=False, verbose=0).history["loss"],
        "evaluate": model.evaluate(X, X[:, :1], verbose=0),
        "predict": model.predict(X, verbose=0),
    }


def test_the_hook_is_enough_to_train_on_two_devices() -> None:
    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    stock = numbers()
    runtime = Runtime()
    keras.distribution.set_runtime(runtime)
    keras.distribution.initialize()
    parallel = keras.distribution.DataParallel()
    keras.distribution.set_distribution(parallel)
    assert parallel.num_model_replicas == 2
    on_both = numbers()
    assert runtime.ran == ["fit", "evaluate", "predict"]
    for name, expected in stock.items():
        np.testing.assert_allclose(on_both[name], expected, rtol=1e-5, atol=1e-6)
