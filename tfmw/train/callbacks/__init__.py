"""Callbacks on many workers: the tasks that run them or write, and the progress display.

Read `roles.py` first; it also has the model that callbacks see. `progress_bar.py` has the progress
bar, and lines for log files. `log.py` has a user's own log, a trace of all workers, and
TensorBoard's files.

May import: the packages below `tfmw.train`.
"""

from tfmw.train.callbacks.log import Log, Trace
from tfmw.train.callbacks.roles import BackupAndRestore, ChiefOnly

__all__ = ["BackupAndRestore", "ChiefOnly", "Log", "Trace"]
