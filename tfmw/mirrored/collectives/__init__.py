"""Sums over replicas: TensorFlow's collectives, and tfmw's ring all-reduce.

Read `reduction.py` first: gradients in packs. `all_reduce.py` has the exchanges of CPU workers,
`ring.py` makes them over one ring, `hierarchy.py` over two levels of rings for several machines,
`connection.py` has the ring of this process. `listener.py` connects and authenticates neighbours,
`ring_links.py` sends values to them: over TCP or through shared memory.

May import: `tfmw.strategies`, `tfmw.cluster`, `tfmw.keras_compat`, `tfmw.runtime`, `tfmw.errors`.
"""
