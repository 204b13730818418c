"""The commands: `tfmw run`, `tfmw check`, `tfmw status`, `tfmw bench`, `tfmw env`.

Read `main.py` first: the arguments of every command. `jobs.py` lists jobs, `reports.py` describes
this machine or a directory, and `bench.py` measures a model.

May import: everything.
"""
