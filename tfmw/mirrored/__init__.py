"""The synchronous driver: one model on many replicas, with the results of one process.

Read `driver.py` first: one training step on each replica. `metrics.py`, `replica_state.py` and
`prediction.py` are its other parts, over the `replicas.py` of a strategy. `cached_driver.py`
keeps traced steps between calls, `agreement.py` gives all workers the chief's values, and
`collectives/` sums gradients.

May import: everything below the drivers, and not `tfmw.parameter_server`.
"""
