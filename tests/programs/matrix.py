"""Rows of the matrix on the cluster of this task: `matrix.py FOLDER COLUMN DEVICES [ROW...]`."""

import sys
from pathlib import Path

import tfmw
from tests.matrix import columns
from tests.programs import _result
from tests.programs.several_devices import several_devices

folder, column, devices, *names = sys.argv[1:]
if devices != "1":
    several_devices(int(devices))
cluster = tfmw.init()
strategy = tfmw.strategies.current_strategy()
assert strategy.num_replicas_in_sync == cluster.num_workers * int(devices)
chief = Path(folder) if cluster.is_chief else None
options = {"shard_optimizer": True} if column.endswith("_sharded") else {}
if column == "two_plain":
    tfmw.init(keras=True)
    strategy = "plain"
_result.write(columns.run_all(names, strategy, column, chief, **options))
