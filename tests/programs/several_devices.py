"""Tasks with several replicas each, without GPUs."""

from typing import Any

from tensorflow.python.distribute import collective_all_reduce_strategy

from tests.matrix.columns import virtual_devices


def several_devices(number: int) -> None:
    """Gives this task several replicas, as GPUs would; of CPUs TensorFlow takes one per task."""
    virtual_devices(number)

    def devices(self: Any, resolver: Any, task: str) -> tuple[tuple[str, ...], str]:
        return tuple(f"{task}/device:CPU:{i}" for i in range(number)), "CPU"

    extended = collective_all_reduce_strategy.CollectiveAllReduceExtended
    extended._initialize_local_devices = devices
