"""Sums over replicas: what travels, and how.

Read `reduction.py` first: gradients in packs. `ring.py` is the ring all-reduce of CPU workers,
`connection.py` the ring of this process, `listener.py` how neighbours connect, `links.py` what
values travel through: TCP or shared memory.

May import: `tfmw.strategies`, `tfmw.cluster`, `tfmw.keras_compat`, `tfmw.runtime`, `tfmw.errors`.
"""
