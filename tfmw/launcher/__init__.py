"""The processes of one host: starts them, watches them, restarts them, ends them.

Read `run.py` first: the entry points. A run is a sequence of attempts (`attempts.py`, each one
`attempt.py`). **`restart.py` decides who restarts, when, and when the run ends**; nothing else
does. `diagnosis.py` finds the task that failed first, `watchdog.py` tasks that hang,
`preemption.py` asks tasks to save their state and exit.

`spawn.py`, `fork_server.py` and `task.py` start a process; `process.py` is the launcher's side of
one. `run_status.py` describes a run, and `run_files.py` lets `tfmw status` read that. `output.py`
prints what tasks write, `log_filter.py` leaves out TensorFlow's noise.
`isolation.py` creates a private network for tasks; `network.py` decides whether to use it, and
connects tasks to servers outside by `proxy.py`.

May import: `tfmw.cluster`, `tfmw.runtime`, `tfmw.errors`. Nothing here imports TensorFlow.
"""
