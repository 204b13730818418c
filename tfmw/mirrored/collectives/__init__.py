"""Sums over replicas: what travels, and how.

Read `reduction.py` first: gradients in packs. `ring.py` is the ring all-reduce of CPU workers,
`links.py` its TCP connections and shared memory.

May import: `tfmw.strategies`, `tfmw.cluster`, `tfmw.keras_compat`, `tfmw.runtime`, `tfmw.errors`.
"""
