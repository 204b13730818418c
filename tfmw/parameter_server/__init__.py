"""The parameter-server driver: variables on servers, steps on workers, one coordinator.

Read `driver.py` first: the coordinator's loop. `variables.py` places variables on the servers,
`shards.py` looks up and updates rows of divided ones, `steps.py` is what workers run,
`accumulators.py` synchronous updates, `worker_data.py` who reads what.

May import: everything below the drivers, and not `tfmw.mirrored`.
"""
