"""Sums over replicas: TensorFlow's collectives, and tfmw's ring all-reduce.

Read `reduction.py` first, then `transports.py`: values travel over the ring, or by TensorFlow.
`all_reduce.py` has the exchanges of CPU workers, `ring.py` makes them over one ring, `hierarchy.py`
over two levels of rings for several machines, `connection.py` has the ring of this process.
`listener.py` connects and authenticates neighbours, `ring_links.py` sends values to them: over TCP
or through shared memory.

May import: `tfmw.train.mirrored.replicas`, and what the drivers import.
"""
