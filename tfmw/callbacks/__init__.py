"""Callbacks on many workers: which tasks run them, which write, and the progress display.

Read `roles.py` first: it has the model that callbacks see, too. `progress_bar.py` has the progress
bar, and lines for log files; `log.py` a user's own log, a trace of all workers, and TensorBoard's
files.

May import: `tfmw.keras_compat`, `tfmw.runtime`, `tfmw.errors`.
"""

from tfmw.callbacks.log import Log, Observer, Trace, Training, begin_traces
from tfmw.callbacks.roles import (
    BackupAndRestore,
    BetweenCalls,
    ChiefOnly,
    OnOrdinaryModel,
    for_task,
    may_read_optimizer,
    wants_every_batch,
    without_backup,
    writes,
)

__all__ = [
    "BackupAndRestore",
    "BetweenCalls",
    "ChiefOnly",
    "Log",
    "Observer",
    "OnOrdinaryModel",
    "Trace",
    "Training",
    "begin_traces",
    "for_task",
    "may_read_optimizer",
    "wants_every_batch",
    "without_backup",
    "writes",
]
