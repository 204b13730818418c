"""Sums over replicas: TensorFlow's collectives, and tfmw's ring all-reduce.

Read `reduction.py` first: gradients in packs. `ring.py` is the ring all-reduce of CPU workers,
`hierarchy.py` makes two levels of it for several machines, `parts.py` cuts an array into a part for
each worker, `connection.py` has the ring of this process. `listener.py` connects and authenticates
neighbours, `ring_links.py` sends values to them: over TCP or through shared memory.

May import: `tfmw.strategies`, `tfmw.cluster`, `tfmw.keras_compat`, `tfmw.runtime`, `tfmw.errors`.
"""
