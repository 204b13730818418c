"""The processes and devices of `keras.distribution`, which are those of the joined cluster.

keras.distribution.initialize()      # tfmw.init(keras=True)
keras.distribution.list_devices()    # ["cpu:0", "cpu:1"] on two workers
"""

from __future__ import annotations

import os
import sys
from typing import Any

from tfmw.cluster import joining, membership
from tfmw.cluster.cluster import Cluster
from tfmw.errors import UsageError


def install() -> None:
    """Makes `keras.distribution` work with tfmw's clusters, in this process."""
    from tfmw.compat import distribution

    distribution.install(sys.modules[__name__])


def initialize(
    job_addresses: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
) -> None:
    """Joins the cluster, and makes Keras's methods tfmw's; see `keras.distribution.initialize`.

    Args:
        job_addresses: comma-separated addresses of all processes; None: the environment describes
            the cluster.
        num_processes: number of processes.
        process_id: index of this process.

    Raises:
        UsageError: the arguments contradict each other, or the environment.
    """
    described: dict[str, Any] | None = None
    addresses = [address.strip() for address in (job_addresses or "").split(",") if address.strip()]
    if len(addresses) > 1 or (addresses and (num_processes or 1) > 1):
        if process_id is None or len(addresses) != (num_processes or len(addresses)):
            raise UsageError(
                f"received job_addresses={job_addresses!r}, num_processes={num_processes} and "
                f"process_id={process_id}: expected the addresses of all processes, as many as "
                "num_processes, and the index of this one."
            )
        task = {"type": "worker", "index": process_id}
        described = {"cluster": {"worker": addresses}, "task": task}
    cluster = Cluster.resolve(os.environ, described)
    for name, received, has in (
        ("num_processes", num_processes, cluster.num_workers),
        ("process_id", process_id, cluster.rank),
    ):
        if received not in (None, has):
            raise UsageError(
                f"received {name}={received}, and {cluster!r} has {has}: leave it out, or start "
                "the processes with tfmw run, or pass job_addresses= with the addresses of all."
            )
    joining.init(described, keras=True)


def num_processes() -> int:
    """Number of workers."""
    return membership.current_cluster().num_workers


def process_id() -> int:
    """Index of this worker."""
    return membership.current_cluster().rank


def list_devices(device_type: str | None = None) -> list[str]:
    """Names of the devices of all workers: GPUs if there are some, else CPUs."""
    import tensorflow as tf

    joined = membership.joined()
    kind = (device_type or "").upper()
    if not kind:
        kind = "GPU" if tf.config.list_physical_devices("GPU") else "CPU"
    count = len(tf.config.list_logical_devices(kind))
    if joined is not None:
        local = [d for d in joined.strategy.extended.worker_devices if f"device:{kind}:" in d]
        count = num_processes() * (len(local) or len(tf.config.list_physical_devices(kind)))
    return [f"{kind.lower()}:{number}" for number in range(count)]
