"""The systems that run a call's workers: this machine, Kubernetes, Ray, Slurm, Spark.

Read `engine.py` first: the interface of an engine. `kubernetes.py`, `ray.py`, `slurm.py`,
`spark.py` and `local_jobs.py` are engines. `folder.py` has the code of those with a shared folder;
`folder_server.py` serves one over connections; `own_files.py` explains why its files can be
unpickled. All engines share `submit.py`, the entry points; `job.py`, their results;
`controller.py`, which restarts; `job_attempt.py`, one attempt; and `agent.py`, the process of each
task. `tfmw.launcher.remote` connects the two.

May import: `tfmw.launcher.remote`, and the packages below it. No engine's library is imported
before that engine is used.
"""
