"""The parameter-server driver: variables on servers, steps on workers, one coordinator.

Read `coordinator.py` first: the coordinator's loop. `variables.py` places variables on the servers.
Workers run `steps.py`. `lookups.py` finds the rows that a batch needs, and `updates.py` has the
updates of a step and their execution on servers. `exchange.py` sends both in one message to each
server. `hash_tables.py` has the rows of ids that come and go. `accumulators.py` has synchronous
updates, `worker_data.py` each worker's dataset, and `ps_training.py` the driver's interface to the
training loop.

May import: all packages below the drivers, but not `tfmw.train.mirrored`.
"""
