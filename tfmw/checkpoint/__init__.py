"""State on disk: backups, resume, and the evaluator that watches them.

Read `resume.py` first: when a run is backed up and how it resumes. `schedule.py` parses the backup
frequency, `state.py` collects the state, `store.py` writes and verifies it, `evaluator.py`
evaluates backups beside the training.

May import: `tfmw.export`, `tfmw.callbacks`, `tfmw.cluster`, `tfmw.storage`, `tfmw.keras_compat`,
`tfmw.runtime`, `tfmw.errors`.
"""
