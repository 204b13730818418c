"""Rows of the matrix on the cluster of this task: `matrix.py FOLDER COLUMN DEVICES [ROW...]`."""

import sys
from pathlib import Path

import tfmw
from tests.matrix import columns
from tests.matrix.row import ROWS
from tests.programs import _result

folder, column, devices, *names = sys.argv[1:]
if devices != "1":
    columns.virtual_devices(int(devices))
cluster = tfmw.init()
strategy = tfmw.strategies.current_strategy()
assert strategy.num_replicas_in_sync == cluster.num_workers * int(devices)
chief = Path(folder) if cluster.is_chief else None
_result.write(columns.run_all(names or list(ROWS), strategy, column, chief))
