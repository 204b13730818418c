"""The parameter-server driver: variables on servers, steps on workers, one coordinator.

Read `driver.py` first: the coordinator's loop. `variables.py` places variables on the servers,
`shards.py` looks up and updates rows of divided variables. Workers run `steps.py`, servers
`updates.py`. `accumulators.py` has synchronous updates, `worker_data.py` each worker's dataset,
`training.py` the driver's interface to the training loop.

May import: everything below the drivers, and not `tfmw.mirrored`.
"""
