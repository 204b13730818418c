"""Strategies of tf.distribute for a `Cluster`.

strategy = strategies.multi_worker_mirrored("grpc")
strategies.current_strategy()                    # the default strategy of fit()
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tfmw.cluster import membership
from tfmw.cluster.cluster import Cluster
from tfmw.cluster.joining import (
    STRATEGIES,
    communication_options,
    init,
    require_collectives,
)
from tfmw.cluster.membership import JoinedCluster, current_cluster, is_evaluator
from tfmw.errors import UsageError, require_choice

if TYPE_CHECKING:
    import tensorflow as tf


def multi_worker_mirrored(
    collectives: str = "auto",
    *,
    cluster: Cluster | Mapping[str, Any] | None = None,
    bytes_per_pack: int | None = None,
    timeout_s: float | None = None,
) -> tf.distribute.Strategy:
    """Creates the strategy of synchronous training on all workers. Joins the cluster if needed.

    Args:
        collectives: "auto", "tfmw", "grpc" or "nccl"; see `init`.
        cluster: see `init`.
        bytes_per_pack: gradients are reduced in packs of about this many bytes.
        timeout_s: seconds after which a collective fails; None waits as long as peers are alive.

    Returns:
        A `tf.distribute.MultiWorkerMirroredStrategy`; without peers on a single machine.

    Raises:
        UsageError: `collectives` is unknown, or NCCL was chosen on a machine without GPUs.
    """
    collectives = require_collectives(collectives)
    options = communication_options(collectives, bytes_per_pack, timeout_s)
    resolved = init(
        cluster, collectives=collectives, bytes_per_pack=bytes_per_pack, timeout_s=timeout_s
    )
    if not resolved.is_single:
        return current_strategy()
    import tensorflow as tf

    return tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)


def mirrored(devices: Sequence[str] | None = None) -> tf.distribute.Strategy:
    """Creates the strategy of synchronous training on several devices of this machine.

    Args:
        devices: names such as ["CPU:0", "CPU:1"] or ["GPU:0", "GPU:1"]; by default all GPUs, or
            without GPUs all logical CPU devices.

    Raises:
        UsageError: this machine does not have one of the devices.
    """
    import tensorflow as tf

    from tfmw.compat import runtime

    known = [d.name.removeprefix("/device:") for d in tf.config.list_logical_devices()]
    if devices is None:
        devices = [d for d in known if d.startswith("GPU")] or known
    unknown = [
        d for d in devices if d.removeprefix("/").removeprefix("device:").upper() not in known
    ]
    if unknown or not devices:
        raise UsageError(f"unknown devices {unknown}: this machine has {', '.join(known)}.")
    return runtime.mirrored_strategy(list(devices))


def parameter_server(
    cluster: Cluster | Mapping[str, Any] | None = None,
    *,
    partitioner: Any = None,
    min_shard_bytes: int | None = None,
    sync_replicas: bool = False,
    replicas_to_aggregate: int | None = None,
    max_whole_bytes: int = 256 << 20,
    prefetch_rows: int = 0,
    row_compression: str | None = None,
) -> tf.distribute.Strategy:
    """Creates the strategy of parameter servers. Joins the cluster as its coordinator.

    On a ps or worker of the cluster the call serves, as `init` does. If the model is created after
    this call, divided variables and their optimizer slots are created on the servers: this process
    then has a handle, and never the rows.

    Args:
        cluster: see `init`; it has `ps` and `workers`, and this process is its chief.
        partitioner: divides large variables over the servers, such as
            `tf.distribute.experimental.partitioners.MinSizePartitioner`; along the first axis.
        min_shard_bytes: divides each variable of at least twice this many bytes into shards of at
            least this size, at most one for each server.
        sync_replicas: updates wait for gradients of the same step from several workers.
        replicas_to_aggregate: the number of gradients in an update; by default one of each
            worker. With fewer, late gradients are dropped and counted.
        max_whole_bytes: a divided variable of more bytes is never read or assigned as a whole:
            `variable.numpy()`, or a layer that needs all rows, raises `TfmwError`.
        prefetch_rows: 1 fetches the rows of a worker's next batch while it computes. They then lack
            the worker's own last update: they are one step staler. The first of every ten batches
            is not fetched ahead. 0 fetches each batch's rows when its step begins.
        row_compression: "bf16" sends rows and their gradients as bfloat16, in half of the bytes;
            servers keep and update them in their own type. None sends them unchanged.

    Returns:
        A `tf.distribute.ParameterServerStrategy`, to pass to `fit`.

    Raises:
        UsageError: the cluster has no parameter servers, or the settings contradict each other.
    """
    resolved = init(cluster, strategy="parameter_server")
    if is_evaluator():
        return current_strategy()
    joined = membership.joined()
    if joined is None or joined.control is None:
        raise UsageError(
            f"parameter-server training needs at least one worker and one ps, received "
            f'{resolved!r}: add them to "cluster", or train synchronously.'
        )
    from tfmw.cluster import servers
    from tfmw.tables.creation import create_on_servers

    workers = len(resolved.workers)
    if replicas_to_aggregate is not None and not sync_replicas:
        raise UsageError(
            f"replicas_to_aggregate={replicas_to_aggregate} goes with sync_replicas=True: without "
            "it each worker's gradient is an update of its own."
        )
    if replicas_to_aggregate is not None and not 1 <= replicas_to_aggregate <= workers:
        raise UsageError(
            f"replicas_to_aggregate is {replicas_to_aggregate}: expected 1 to {workers}, the "
            "number of workers."
        )
    require_choice("prefetch_rows", prefetch_rows, (0, 1))
    require_choice("row_compression", row_compression, (None, "bf16"))
    if sync_replicas and (prefetch_rows or row_compression):
        raise UsageError(
            "prefetch_rows and row_compression are for rows that stay on servers, which "
            "sync_replicas=True does not have: leave them out, or train asynchronously."
        )
    partition = servers.partition_of(partitioner, min_shard_bytes, len(resolved.ps))
    aggregate = (replicas_to_aggregate or workers) if sync_replicas else None
    joined.settings = servers.ServerSettings(partition, aggregate, prefetch_rows, row_compression)
    create_on_servers(partition, len(resolved.ps), max_whole_bytes)
    return joined.strategy


def choose(strategy: str | tf.distribute.Strategy | None) -> tf.distribute.Strategy:
    """Chooses the strategy of a call of fit, evaluate or predict.

    Args:
        strategy: "auto" (the joined cluster; else all GPUs of this machine; else none), a name,
            or a strategy, which is returned unchanged.

    Raises:
        UsageError: the name is unknown, or this process can no longer create the strategy.
    """
    import tensorflow as tf

    from tfmw.compat import distribution

    if isinstance(strategy, tf.distribute.Strategy):
        return strategy
    if strategy is None:
        strategy = "auto"
    require_choice("strategy", strategy, STRATEGIES)
    entered = strategy == "auto" and tf.distribute.has_strategy()
    if is_evaluator() or entered or strategy == "default":
        return tf.distribute.get_strategy()
    if strategy == "auto":
        if membership.joined() is None and not Cluster.resolve(os.environ).is_single:
            init()
        if (devices := distribution.devices_of_data_parallel()) is not None:
            return _data_parallel(tuple(devices))
        if membership.joined() is None and len(tf.config.list_logical_devices("GPU")) > 1:
            return _mirrored_on()
        return current_strategy()
    if strategy == "multi_worker_mirrored":
        if membership.joined() is None:
            init(strategy=strategy)
        return current_strategy()
    if strategy == "mirrored":
        return _mirrored_on()
    return current_strategy() if membership.joined() is not None else parameter_server()


@functools.cache
def _mirrored_on(devices: tuple[str, ...] | None = None) -> tf.distribute.Strategy:
    """`mirrored(devices)`, the same for all calls: traced steps are kept with their strategy."""
    return mirrored(devices)


def _data_parallel(devices: tuple[str, ...]) -> tf.distribute.Strategy:
    """The strategy of `keras.distribution.DataParallel` on these devices."""
    joined = membership.joined()
    if joined is None:
        return _mirrored_on(devices) if len(devices) > 1 else current_strategy()
    replicas = joined.strategy.num_replicas_in_sync
    if len(devices) != replicas and joined.control is None:
        raise UsageError(
            f"received keras.distribution.DataParallel with {len(devices)} devices, and the "
            f"cluster has {replicas}: make it after keras.distribution.initialize(), without "
            "devices= or with all of keras.distribution.list_devices()."
        )
    return joined.strategy


def current_strategy() -> tf.distribute.Strategy:
    """The strategy of the joined cluster, or TensorFlow's default strategy."""
    import tensorflow as tf

    joined = membership.joined()
    return tf.distribute.get_strategy() if joined is None else joined.strategy


def servers_of(strategy: tf.distribute.Strategy) -> JoinedCluster | None:
    """The joined cluster, if `strategy` trains on its parameter servers; None for other kinds.

    Raises:
        UsageError: tfmw did not create this `ParameterServerStrategy`.
    """
    import tensorflow as tf

    if not isinstance(strategy, tf.distribute.ParameterServerStrategy):
        return None
    joined = membership.joined()
    if joined is None or joined.control is None or strategy is not joined.strategy:
        raise UsageError(
            "received a ParameterServerStrategy that tfmw did not make: use "
            "tfmw.strategies.parameter_server(...), which also ends the servers after training."
        )
    return joined


__all__ = [
    "choose",
    "current_cluster",
    "current_strategy",
    "init",
    "mirrored",
    "multi_worker_mirrored",
    "parameter_server",
]
