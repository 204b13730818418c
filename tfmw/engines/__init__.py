"""Where jobs run: what carries a model, its data and a function to other processes and back.

Read `local.py` first: `tfmw.fit(..., workers=2)`. `serialization.py` packs models.

May import: `tfmw.checkpoint`, `tfmw.data`, `tfmw.launcher`, and what is below them.
"""
