"""Die at every point of a write, as by SIGKILL, each time with a directory of its own.

backup_crash.py DIRECTORY same|other|changed

The step that is written is the one that is there, or another; or another with the changed rows of a
table.

Each point is tried in a child that is forked before TensorFlow's runtime starts.
"""

import itertools
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from tests.helpers.backup_points import dying, watched
from tests.helpers.local_tables import LocalTables
from tfmw.train.checkpoint.store import BackupStore
from tfmw.train.checkpoint.tensor_files import TableRows

directory, step = Path(sys.argv[1]), {"same": 1}.get(sys.argv[2], 2)
with_table = sys.argv[2] == "changed"


def write_and_die(number: int) -> None:
    store = BackupStore(directory / str(number))
    files: Any = LocalTables()
    with store.locked():
        rows = TableRows(files) if with_table else None
        base = store.write(1, {"w": np.full(1000, 1.0)}, {"value": 1}, rows=rows)
        if with_table:
            files.clear_marks()
            files.set([1, 5], 2.0)
            rows = TableRows(files, base=base)
        with watched(dying(number)):
            store.write(step, {"w": np.full(1000, 2.0)}, {"value": 2}, rows=rows)


for number in itertools.count():
    child = os.fork()
    if child == 0:
        write_and_die(number)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    if code == 0:
        break
    assert code == 77, f"the child ended with {code}"
print(number)
