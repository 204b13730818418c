"""Hold the lock of a backup directory until killed: backup_lock.py DIRECTORY FIFO.

FIFO gets the number of the process once it has the lock.
"""

import os
import signal
import sys
from pathlib import Path

from tfmw.train.checkpoint.store import BackupStore

with BackupStore(sys.argv[1]).locked():
    Path(sys.argv[2]).write_text(str(os.getpid()))
    signal.pause()
