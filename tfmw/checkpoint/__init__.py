"""State on disk: backups, resume, and the evaluator that watches them.

Read `resume.py` first: when a run is backed up and how it goes on. `state.py` says what is saved,
`store.py` how it is written and checked, `evaluator.py` scores backups beside the training.

May import: `tfmw.strategies`, `tfmw.callbacks`, `tfmw.cluster`, `tfmw.keras_compat`,
`tfmw.runtime`, `tfmw.errors`.
"""
