"""Joining a cluster with parameter servers, as a server or as the coordinator.

    serve(cluster, facts, ...)                  # on a ps or worker: until the coordinator is done
    joined = coordinate(cluster, facts, ...)    # on the chief: its strategy, connected to all

The addresses of ps and workers are those of TensorFlow's servers. The chief's address is that of
its `ControlServer`. No other task needs the coordinator's TensorFlow port, so tfmw picks a free
one.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfmw.cluster import Cluster, addresses
from tfmw.cluster.control import ControlServer, wait_for_end
from tfmw.errors import UsageError
from tfmw.runtime import sockets

logger = logging.getLogger("tfmw")

# A function on a worker blocks a thread while it waits for a server; too few threads deadlock.
_INTER_OP_THREADS = 16

_serving: list[tf.distribute.Server] = []  # kept for ever: TensorFlow's servers cannot stop


@dataclasses.dataclass
class ServerSettings:
    """Options of parameter-server training.

    Attributes:
        partition: (shape, dtype) -> into how many pieces, along the first axis, to divide a
            variable.
        sync_replicas: whether updates wait for the gradients of several workers.
        replicas_to_aggregate: the number of gradients of an update; None for one of each worker.
        prefetch_rows: for how many steps ahead rows are fetched.
        row_compression: "bf16" if rows and their gradients travel as bfloat16.
    """

    partition: Callable[[Sequence[int], tf.DType], int] = lambda shape, dtype: 1
    sync_replicas: bool = False
    replicas_to_aggregate: int | None = None
    prefetch_rows: int = 0
    row_compression: str | None = None


@dataclasses.dataclass
class JoinedServers:
    """A cluster that this process coordinates.

    Attributes:
        strategy: a ParameterServerStrategy, connected to all servers.
        control: the control connections to all servers.
        cluster: this process is its chief.
        settings: options of the training.
    """

    strategy: tf.distribute.ParameterServerStrategy
    control: ControlServer
    cluster: Cluster
    settings: ServerSettings = dataclasses.field(default_factory=ServerSettings)
    _coordinator: Any = None

    @property
    def coordinator(self) -> Any:
        """TensorFlow's `ClusterCoordinator`, one per process."""
        if self._coordinator is None:
            self._coordinator = tf.distribute.coordinator.ClusterCoordinator(self.strategy)
        return self._coordinator


def serve(
    cluster: Cluster,
    facts: Mapping[str, str],
    *,
    patience_s: float,
    serve_again: bool,
    threads: int,
) -> None:
    """Serves as the task that this process is, and returns once the coordinator is done.

    Args:
        facts: what must be the same on every task.
        patience_s: seconds to wait for the first coordinator, and for a restarted one.
        serve_again: whether to serve any number of trainings, one after another.
        threads: for the ops of this server; 0 lets TensorFlow choose.

    Raises:
        ClusterError: a port in use, or tasks that disagree.
        TaskFailed: the coordinator failed.
        TfmwError: no coordinator connected.
    """
    assert cluster.address is not None
    addresses.check_port_free(cluster.address)
    config = tf.compat.v1.ConfigProto(
        intra_op_parallelism_threads=threads, inter_op_parallelism_threads=_INTER_OP_THREADS
    )
    spec = tf.train.ClusterSpec({"ps": list(cluster.ps), "worker": list(cluster.workers)})
    server = tf.distribute.Server(
        spec, job_name=cluster.task, task_index=cluster.index, protocol="grpc", config=config
    )
    _serving.append(server)
    logger.info("%r: serving", cluster)
    wait_for_end(cluster, facts, patience_s=patience_s, serve_again=serve_again)


def coordinate(cluster: Cluster, facts: Mapping[str, str], *, timeout_s: float) -> JoinedServers:
    """Connects to every server of the cluster.

    Args:
        facts: what must be the same on every task.
        timeout_s: seconds to wait for all of them.

    Raises:
        ClusterError: the chief's port is in use, or tasks disagree.
        TfmwError: a server did not connect; the message names it.
    """
    control = ControlServer(cluster, facts)
    control.wait_for_all(timeout_s)
    host, _ = addresses.split(cluster.chief[0])
    spec = {
        "chief": [f"{f'[{host}]' if ':' in host else host}:{_free_port()}"],
        "ps": list(cluster.ps),
        "worker": list(cluster.workers),
    }
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(spec), task_type="chief", task_id=0, rpc_layer="grpc"
    )
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    logger.info(
        "%r: in, %d workers, %d parameter servers", cluster, len(cluster.workers), len(cluster.ps)
    )
    return JoinedServers(strategy, control, cluster)


def partition_of(
    partitioner: Any, min_shard_bytes: int | None, servers: int
) -> Callable[[Sequence[int], tf.DType], int]:
    """The partition of variables; see `tfmw.strategies.parameter_server`."""
    if partitioner is not None and min_shard_bytes is not None:
        raise UsageError(
            "received both partitioner and min_shard_bytes: expected one of them; min_shard_bytes "
            "is the short form of tf.distribute.experimental.partitioners.MinSizePartitioner."
        )
    if min_shard_bytes is not None and min_shard_bytes < 1:
        raise UsageError(f"min_shard_bytes is {min_shard_bytes}: expected bytes, at least 1.")

    def partition(shape: Sequence[int], dtype: tf.DType) -> int:
        if not shape or shape[0] < 2:
            return 1
        if min_shard_bytes is not None:
            size = dtype.size
            for dimension in shape:
                size *= dimension
            wanted = min(servers, size // min_shard_bytes)
        elif partitioner is not None:
            parts = list(partitioner(tf.TensorShape(shape), dtype))
            if any(p != 1 for p in parts[1:]):
                raise UsageError(
                    f"the partitioner divides a variable of shape {list(shape)} into {parts}: "
                    "expected pieces along the first axis only."
                )
            wanted = parts[0]
        else:
            return 1
        return max(1, min(int(wanted), shape[0]))

    return partition


def threads_of_a_task(environ: Mapping[str, str] = os.environ) -> int:
    """This task's part of the machine's cores, if a launcher started several tasks on it."""
    tasks = int(environ.get("TFMW_LOCAL_TASKS", "1"))
    if tasks <= 1 or "TF_NUM_INTRAOP_THREADS" in environ:
        return 0
    return max(1, len(os.sched_getaffinity(0)) // tasks)


def _free_port() -> int:
    with sockets.listen() as probe:
        return int(probe.getsockname()[1])
