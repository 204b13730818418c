"""The synchronous driver: one model on many replicas, with the results of one process.

Read `sync_driver.py` first: one training step on each replica; then `synchronization.py`: how
replicas agree on their weights. `metrics.py` and `prediction.py` are
its other parts, `replicas.py` describes the replicas of a strategy.
`sharded_update.py` shards the optimizer's update over replicas. `step_loops.py` runs many steps in
one call. `sync_training.py` is the driver's interface to the training loop. `cached_driver.py`
keeps traced steps between calls, `agreement.py` broadcasts the chief's weights, and `collectives/`
sums gradients.

May import: all packages below the drivers, but not `tfmw.train.parameter_server`.
"""
