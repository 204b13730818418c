"""State on disk: backups, resume, and the evaluator that watches them.

Read `resume.py` first: when a run is backed up and how it resumes. `schedule.py` parses how often,
`state.py` collects what is saved, `store.py` writes and checks it, `evaluator.py` scores backups
beside the training, `file_lock.py` keeps runs apart.

May import: `tfmw.export`, `tfmw.callbacks`, `tfmw.cluster`, `tfmw.storage`, `tfmw.keras_compat`,
`tfmw.runtime`, `tfmw.errors`.
"""
