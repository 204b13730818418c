"""Callbacks on many workers: which tasks run them, which write, and the progress display.

Read `roles.py` first. `progress.py` is the progress bar, and lines for log files.

May import: `tfmw.keras_compat`, `tfmw.runtime`, `tfmw.errors`.
"""

from tfmw.callbacks.roles import (
    BackupAndRestore,
    ChiefOnly,
    for_task,
    wants_every_batch,
    without_backup,
    writes,
)

__all__ = [
    "BackupAndRestore",
    "ChiefOnly",
    "for_task",
    "wants_every_batch",
    "without_backup",
    "writes",
]
