"""State on disk: backups, resume, and the evaluator that watches them.

Read `resume.py` first, the interface to the training loop: it decides when a run is backed up and
how it resumes. `schedule.py` has the frequency and the thread that writes. `state.py` collects the
state, and `store.py` writes and verifies it (`tensor_files.py` the tensors). `evaluator.py`
evaluates backups during the training.

May import: `tfmw.export`, `tfmw.callbacks`, `tfmw.cluster`, `tfmw.tables`, `tfmw.storage`,
`tfmw.compat`, `tfmw.observe`, `tfmw.errors`.
"""
