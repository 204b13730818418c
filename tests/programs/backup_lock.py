"""Hold the lock of a backup directory until killed: backup_lock.py DIRECTORY [ERRNO of flock]."""

import fcntl
import signal
import sys

from tests.helpers.backup_points import lacking
from tfmw.train.checkpoint.store import BackupStore

if len(sys.argv) > 2:
    fcntl.flock = lacking(int(sys.argv[2]))
with BackupStore(sys.argv[1]).locked():
    print("locked", flush=True)
    signal.pause()
