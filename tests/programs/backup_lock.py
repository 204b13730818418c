"""Hold the lock of a backup directory until killed: backup_lock.py DIRECTORY FIFO [ERRNO].

FIFO gets the number of the process once it has the lock. ERRNO: the error of each `flock`.
"""

import fcntl
import os
import signal
import sys
from pathlib import Path

from tests.helpers.backup_points import lacking
from tfmw.train.checkpoint.store import BackupStore

if len(sys.argv) > 3:
    fcntl.flock = lacking(int(sys.argv[3]))
with BackupStore(sys.argv[1]).locked():
    Path(sys.argv[2]).write_text(str(os.getpid()))
    signal.pause()
