"""Sums over replicas: TensorFlow's collectives, and tfmw's ring all-reduce.

Read `reduction.py` first, then `transports.py`: values are sent over the ring, or by TensorFlow.
`all_reduce.py` has the interface of the collectives of CPU workers. `ring.py` implements them over
one ring, and `hierarchy.py` over two levels of rings for several machines. `connection.py` has the
ring of this process. `listener.py` connects and authenticates neighbours, and `ring_links.py` sends
values to them: over TCP or through shared memory.

May import: `tfmw.train.mirrored.replicas`, and the packages that the drivers import.
"""
