"""State on disk: backups, resume, and the evaluator that watches them.

Read `backups.py` first: what the training loop asks; then `resume.py`: when a run is backed up and
how it resumes. `schedule.py` parses the backup frequency, `state.py` collects the state, `store.py`
writes and verifies it (`tensor_files.py` the tensors, `sharded_backups.py` those of several tasks,
`table_backups.py` which rows of tables, `background.py` the thread), `evaluator.py` evaluates
backups beside the training.

May import: `tfmw.export`, `tfmw.callbacks`, `tfmw.cluster`, `tfmw.tables`, `tfmw.storage`,
`tfmw.keras_compat`, `tfmw.runtime`, `tfmw.errors`.
"""
