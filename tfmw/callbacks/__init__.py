"""Callbacks on many workers: which tasks run them, which write, and the progress display.

Read `roles.py` first. `ordinary_model.py` is what callbacks see of the model, `progress_bar.py` the
progress bar, and lines for log files; `log.py` a user's own log, `trace.py` a trace of all workers,
`boards.py` TensorBoard's files.

May import: `tfmw.keras_compat`, `tfmw.runtime`, `tfmw.errors`.
"""

from tfmw.callbacks.log import Log, Training
from tfmw.callbacks.ordinary_model import OnOrdinaryModel
from tfmw.callbacks.roles import (
    BackupAndRestore,
    BetweenCalls,
    ChiefOnly,
    for_task,
    may_read_optimizer,
    wants_every_batch,
    without_backup,
    writes,
)
from tfmw.callbacks.trace import Trace, begin_traces

__all__ = [
    "BackupAndRestore",
    "BetweenCalls",
    "ChiefOnly",
    "Log",
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
