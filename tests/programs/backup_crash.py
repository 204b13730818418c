"""Die at every point of a write, as by SIGKILL, each time with a directory of its own.

backup_crash.py DIRECTORY same|other     the step that is written: the one that is there, or another

Each point is tried in a child that is forked before TensorFlow's runtime starts.
"""

import itertools
import os
import sys
from pathlib import Path

import numpy as np

from tests.helpers.backup_points import dying, watched
from tfmw.checkpoint.store import BackupStore

directory, step = Path(sys.argv[1]), {"same": 1, "other": 2}[sys.argv[2]]


def write_and_die(number: int) -> None:
    store = BackupStore(directory / str(number))
    with store.locked():
        store.write(1, {"w": np.full(1000, 1.0)}, {"value": 1})
        with watched(dying(number)):
            store.write(step, {"w": np.full(1000, 2.0)}, {"value": 2})


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
