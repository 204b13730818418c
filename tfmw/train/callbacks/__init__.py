"""Callbacks on many workers: which tasks run them, which write, and the progress display.

Read `roles.py` first: it has the model that callbacks see, too. `progress_bar.py` has the progress
bar, and lines for log files; `log.py` a user's own log, a trace of all workers, and TensorBoard's
files.

May import: rooms below `tfmw.train`.
"""

from tfmw.train.callbacks.log import Log, Trace
from tfmw.train.callbacks.roles import BackupAndRestore, ChiefOnly

__all__ = ["BackupAndRestore", "ChiefOnly", "Log", "Trace"]
