"""Settings of a process that decide its results, beside the model and the data.

The workers of `tfmw.fit(..., workers=2)` begin where the caller's process is: shuffled arrays then
have the order that they have in one process, and a function that makes a model or a dataset makes
the same one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import keras

from tfmw import trackers
from tfmw.checkpoint import state
from tfmw.data.random_state import restore_random_state
from tfmw.keras_compat import datasets, models


@dataclasses.dataclass(frozen=True)
class ProcessSettings:
    """Random states and Keras's global settings, as they are in one process.

    Attributes:
        random: of Python and NumPy; see `checkpoint.state.all_random_state`.
        seeds: of TensorFlow and Keras; see `datasets.seed_state`.
        floatx: "float32", ...: the type of layers and of arrays without one.
        epsilon: the small number that Keras's functions add.
        image_data_format: "channels_last" or "channels_first".
        dtype_policy: the configuration of the policy that new layers take.
        trackers: the active runs of MLflow and W&B, to which the chief logs.
    """

    random: Mapping[str, Any]
    seeds: Mapping[str, Any]
    floatx: str
    epsilon: float
    image_data_format: str
    dtype_policy: Any
    trackers: Mapping[str, Any]

    @classmethod
    def of_this_process(cls) -> ProcessSettings:
        """Reads them."""
        return cls(
            random=state.all_random_state(),
            seeds=datasets.seed_state(),
            floatx=keras.config.floatx(),
            epsilon=keras.config.epsilon(),
            image_data_format=keras.config.image_data_format(),
            dtype_policy=keras.dtype_policies.serialize(keras.config.dtype_policy()),
            trackers=trackers.active_runs(),
        )

    def apply(self) -> None:
        """Makes them this process's own."""
        datasets.set_seed_state(self.seeds)
        restore_random_state(self.random)
        models.set_unseeded_state(self.random["keras"])
        keras.config.set_floatx(self.floatx)
        keras.config.set_epsilon(self.epsilon)
        keras.config.set_image_data_format(self.image_data_format)
        policy = keras.dtype_policies.deserialize(self.dtype_policy)
        keras.config.set_dtype_policy(policy)
        trackers.adopt(self.trackers)
