"""Hold the lock of a backup directory until killed: backup_lock.py DIRECTORY."""

import signal
import sys

from tfmw.checkpoint.store import BackupStore

with BackupStore(sys.argv[1]).locked():
    print("locked", flush=True)
    signal.pause()
