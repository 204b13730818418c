"""For every process of a run, task or launcher: progress, errors, signals. No TensorFlow.

`progress.py` and `recorded_errors.py` are the reports of a task to its launcher. Both processes use
`signals.py`, `sockets.py`, `versions.py` and `disk.py`. Read `progress.py` first.

May import: `tfmw.errors`.
"""
