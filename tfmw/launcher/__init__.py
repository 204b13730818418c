"""The processes of one host: starts them, watches them, restarts them, ends them.

Read `run.py` first: the entry points. A run is a sequence of attempts (`attempts.py`, each one
`attempt.py`). **Only `restart.py` decides which tasks restart, when, and when the run ends.**
`failure.py` finds the task that failed first, and its error as text; `watchdog.py` finds tasks that
hang. `options.py` has the user's options.

`spawn.py`, `fork_server.py` and `task.py` start a process, with the variables of `environment.py`;
`process.py` is the launcher's side of one. `run_status.py` describes a run, and `run_files.py` lets
`tfmw status` read that. `output.py` prints what tasks write, without TensorFlow's noise.
`isolation.py` creates a private network for tasks; `network.py` decides whether to use it, and
connects tasks to servers outside by `proxy.py`.

Above it, `hosts/` has the supervisors of several hosts, and `engines/` has Ray, Slurm and Spark.
`remote/` has attempts on several machines, which both of them share.

May import: `tfmw.cluster`, `tfmw.observe`, `tfmw.storage`, `tfmw.errors`. Nothing here imports
TensorFlow.
"""
