"""Reports of a run: progress, goodput, traces, recorded errors, metrics, trackers.

`progress.py` and `recorded_errors.py` are the reports of a task to its launcher; read `progress.py`
first. `recorder.py` records the exchanges between workers, `tracing.py` a trace, `goodput.py` and
`step_times.py` where the time went. `metrics_server.py` serves metrics; `trackers/` keeps one run
of a training in MLflow or W&B. Nothing here imports TensorFlow.

May import: `tfmw.storage`, `tfmw.errors`.
"""
