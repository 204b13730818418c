"""`keras.distribution` on the TensorFlow backend, where Keras has no processes.

    install(backend)
    keras.distribution.initialize()          # calls backend.initialize(...)
    devices_of_data_parallel()               # ["cpu:0", "cpu:1"] after set_distribution(...)

Keras's public functions ask a module of their backend for devices and processes. TensorFlow's lacks
most of these functions, and `fit` ignores the distribution. Keras's data adapters would shard data
themselves, which tfmw has sharded already.
"""

from __future__ import annotations

import types
from typing import Any

import keras
from keras.src.backend.tensorflow import distribution_lib as _of_backend
from keras.src.trainers import data_adapters as _data_adapters
from keras.src.trainers.data_adapters import array_data_adapter, py_dataset_adapter

from tfmw.errors import UsageError

_ASKED = ("initialize", "num_processes", "process_id", "list_devices")
"""The functions that Keras expects of its backend; see `tfmw.cluster.keras_distribution`."""


def install(backend: types.ModuleType) -> None:
    """Makes Keras's functions ask `backend`."""
    functions = {name: getattr(backend, name) for name in _ASKED}
    functions |= {
        "get_device_count": lambda device_type=None: len(backend.list_devices(device_type)),
        "distribute_tensor": lambda tensor, layout: tensor,
    }
    for name, function in functions.items():
        setattr(_of_backend, name, function)
    for module in (_data_adapters, array_data_adapter, py_dataset_adapter):  # since Keras 3.16
        module.distribution_lib = types.SimpleNamespace(distribution=lambda: None)


def devices_of_data_parallel() -> list[str] | None:
    """Names of the devices of Keras's current distribution; None if there is none.

    Raises:
        UsageError: it is no `DataParallel`.
    """
    distribution: Any = keras.distribution.distribution()
    if distribution is None:
        return None
    if not isinstance(distribution, keras.distribution.DataParallel):
        raise UsageError(
            f"received {type(distribution).__name__}, and on the TensorFlow backend each replica "
            "has the whole model: set keras.distribution.DataParallel()."
        )
    return [str(device) for device in distribution.device_mesh.devices.ravel()]


def is_sharded_by_user() -> bool:
    """Whether each process passes its own part of the data: `auto_shard_dataset=False`."""
    distribution: Any = keras.distribution.distribution()
    shards = getattr(distribution, "_auto_shard_dataset", True)  # Keras 3.8 has no property
    processes = getattr(_of_backend, "num_processes", lambda: 1)  # there is none before `install`
    return distribution is not None and not shards and processes() > 1
