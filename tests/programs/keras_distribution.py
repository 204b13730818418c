"""`keras.distribution`: `keras_distribution.py workers|devices`; prints its results as JSON.

workers: one of two processes that KERAS_DISTRIBUTION_... describe. devices: two virtual devices.
"""

import json
import sys
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfmw

X = np.random.default_rng(0).normal(size=(26, 4)).astype("float32")


def network() -> Any:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
    return model


def batches(x: Any, size: int) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(size)


class Sevens(keras.utils.PyDataset):
    """The batches of seven rows, from Python."""

    def __len__(self) -> int:
        return -(-len(X) // 7)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        rows = X[7 * index : 7 * index + 7]
        return rows, rows[:, :1]


def numbers(data: Any) -> dict[str, Any]:
    """The results of each method, of a model of its own."""
    model = network()
    return {
        "fit": model.fit(data, epochs=2, verbose=0, shuffle=False).history,
        "python": network().fit(Sevens(), epochs=2, verbose=0, shuffle=False).history["loss"],
        "evaluate": model.evaluate(X, X[:, :1], verbose=0),
        "predict": model.predict(batches(X, 5), verbose=0).tolist(),
    }


def refused(distribution: Any) -> str:
    keras.distribution.set_distribution(distribution)
    try:
        network().fit(batches(X, 7), verbose=0)
    except tfmw.UsageError as e:
        return str(e)
    raise AssertionError("not refused")


def main() -> None:
    if sys.argv[1] == "devices":
        devices = [tf.config.LogicalDeviceConfiguration()] * 2
        tf.config.set_logical_device_configuration(
            tf.config.list_physical_devices("CPU")[0], devices
        )
    keras.distribution.initialize()
    parallel = keras.distribution.DataParallel()
    keras.distribution.set_distribution(parallel)
    found: dict[str, Any] = {
        "devices": keras.distribution.list_devices(),
        "replicas": parallel.num_model_replicas,
        "process": [parallel.data_shard_id, keras.src.backend.distribution_lib.num_processes()],
        "numbers": numbers(batches(X, 7)),
    }
    if sys.argv[1] == "workers":
        own = keras.distribution.DataParallel(auto_shard_dataset=False)
        keras.distribution.set_distribution(own)
        model = network()
        part = batches(X[found["process"][0] :: 2], 3)
        found["own part"] = model.fit(part, epochs=2, verbose=0).history
        mesh = keras.distribution.DeviceMesh(
            (1, 2), ["batch", "model"], parallel.device_mesh.devices
        )
        layouts = keras.distribution.LayoutMap(mesh)
        found["refused"] = [
            refused(keras.distribution.DataParallel(devices=["cpu:0"])),
            refused(keras.distribution.ModelParallel(layout_map=layouts)),
        ]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
