"""What every process of a run may use, tasks and launcher alike; no TensorFlow.

`progress.py` and `recorded_errors.py` are how a task reports to its launcher; `signals.py`,
`ports.py`, `secrets.py` and `imports.py` are small services to both.

May import: `tfmw.errors`.
"""
