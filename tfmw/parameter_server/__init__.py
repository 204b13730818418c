"""The parameter-server driver: variables on servers, steps on workers, one coordinator.

Read `driver.py` first: the coordinator's loop. `variables.py` places variables on the servers.
Workers run `steps.py`: `lookups.py` fetches the rows of a batch before its step, `gradients.py`
sends the gradients after it, each by one message to a server (`messages.py`), and `hash_tables.py`
has the rows of ids that come and go. Servers run `updates.py`, on rows by `shards.py`.
`accumulators.py` has synchronous updates, `worker_data.py` each worker's dataset, `training.py` the
driver's interface to the training loop.

May import: everything below the drivers, and not `tfmw.mirrored`.
"""
