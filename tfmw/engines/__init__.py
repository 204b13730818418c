"""Where a call's workers run: sends a model and its data to new processes, and results back.

Read `local.py` first: `tfmw.fit(..., workers=2)`. `serialization.py` packs models.

May import: `tfmw.checkpoint`, `tfmw.data`, `tfmw.launcher`, and what is below them.
"""
