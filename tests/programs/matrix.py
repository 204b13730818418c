"""Rows of the matrix on the cluster of this task: `matrix.py FOLDER COLUMN DEVICES [ROW...]`."""

import sys
from pathlib import Path
from typing import Any

from tensorflow.python.distribute import collective_all_reduce_strategy

import tfmw
from tests.matrix import columns
from tests.programs import _result


def several_devices(number: int) -> None:
    """Gives this task several replicas, as GPUs would; of CPUs TensorFlow takes one per task."""
    columns.virtual_devices(number)

    def devices(self: Any, resolver: Any, task: str) -> tuple[tuple[str, ...], str]:
        return tuple(f"{task}/device:CPU:{i}" for i in range(number)), "CPU"

    extended = collective_all_reduce_strategy.CollectiveAllReduceExtended
    extended._initialize_local_devices = devices


folder, column, devices, *names = sys.argv[1:]
if devices != "1":
    several_devices(int(devices))
cluster = tfmw.init()
strategy = tfmw.strategies.current_strategy()
assert strategy.num_replicas_in_sync == cluster.num_workers * int(devices)
chief = Path(folder) if cluster.is_chief else None
options = {"shard_optimizer": True} if column.endswith("_sharded") else {}
_result.write(columns.run_all(names, strategy, column, chief, **options))
