"""The parameter-server driver: variables on servers, steps on workers, one coordinator.

Read `coordinator.py` first: the coordinator's loop. `variables.py` places variables on the servers.
Workers run `steps.py`: `lookups.py` finds which rows a batch needs, `updates.py` which updates
follow from a step and how servers make them, and `exchange.py` has both in one message to each
server. `hash_tables.py` has the rows of ids that come and go. `accumulators.py` has synchronous
updates, `worker_data.py` each worker's dataset, `ps_training.py` the driver's interface to the
training loop.

May import: everything below the drivers, and not `tfmw.train.mirrored`.
"""
