"""The processes of one host: starts them, watches them, restarts them, ends them.

Read `run.py` first: a run is a sequence of attempts (`attempt.py`), `restart.py` decides whether
there is another. `spawn.py`, `template.py` and `task.py` start a process, `watchdog.py` notices one
that hangs, `output.py` prints what they print, `isolation.py` gives them a network of their own.

May import: `tfmw.cluster`, `tfmw.runtime`, `tfmw.errors`. Nothing here imports TensorFlow.
"""
