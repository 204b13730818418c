"""Callbacks on many workers: backups, which tasks run a callback, logs and traces of all workers.

May import: `tfmw.train.callbacks`.
"""

from tfmw.train.callbacks import BackupAndRestore, ChiefOnly, Log, Trace

__all__ = ["BackupAndRestore", "ChiefOnly", "Log", "Trace"]
