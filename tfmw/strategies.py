"""From a `Cluster` to a `tf.distribute.Strategy`, and joining the cluster once per process.

    cluster = tfmw.init()                            # who am I; join (no-op when alone)
    strategy = strategies.multi_worker_mirrored("ring")
    strategies.current_strategy()                    # what fit() trains on

TensorFlow can join a cluster only before its first op, and only once; so `init()` goes first and
what it joined is kept here, the one place with state that belongs to the process.
"""

from __future__ import annotations

import atexit
import dataclasses
import importlib
import logging
import os
import secrets
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from typing import TYPE_CHECKING, Any

from tfmw import rendezvous
from tfmw._imports import collector_paused
from tfmw.cluster import Cluster
from tfmw.errors import TfmwError, UsageError

if TYPE_CHECKING:
    import tensorflow as tf

    from tfmw import ps_cluster
    from tfmw.ring import Ring

logger = logging.getLogger("tfmw")

COLLECTIVES = ("auto", "ring", "nccl")
STRATEGIES = ("auto", "multi_worker_mirrored", "mirrored", "parameter_server", "default")

# Reducing 100 MB between two CPU workers: 400 ms in one piece, 170 to 200 ms in packs of 1 to 4 MB
# (bench/ring.py measures it again). NCCL pipelines by itself and prefers large packs.
RING_BYTES_PER_PACK = 2 << 20
HEARTBEAT_S = 10
LEAVE_TIMEOUT_S = 60.0


@dataclasses.dataclass
class _Joined:
    """What this process has joined."""

    cluster: Cluster
    strategy: tf.distribute.Strategy
    options: tf.distribute.experimental.CommunicationOptions
    servers: ps_cluster.Joined | None = None
    collectives: str = "auto"
    ring: Ring | None = None
    asked_for_ring: bool = False  # `ring` says what came of it


_joined: _Joined | None = None
_evaluating = False


def init(
    cluster: Cluster | Mapping[str, Any] | None = None,
    *,
    strategy: str = "auto",
    collectives: str = "auto",
    bytes_per_pack: int | None = None,
    timeout_s: float | None = None,
    start_timeout_s: float = 120.0,
    existing_servers: bool | None = None,
) -> Cluster:
    """Finds out which task of which cluster this process is, and joins.

    On a single machine it only has TensorFlow keep the memory of the tensors that it frees, as it
    does everywhere, unless TF_CPU_ALLOCATOR_USE_BFC says what to do with it. A second call returns
    the same cluster; it may still choose `collectives`, `bytes_per_pack` and `timeout_s` (`tfmw
    run` makes the first call for a script).

    Args:
        cluster: an explicit description (`Cluster`, or a dict in the form of TF_CONFIG); else the
            environment is asked: TF_CONFIG, Slurm, Kubernetes, Open MPI.
        strategy: "auto" (synchronous training; parameter servers where the cluster has some),
            "multi_worker_mirrored", "mirrored", "parameter_server" or "default" (none).
        collectives: how synchronous workers reduce gradients: "nccl" between GPUs; "ring" over
            TensorFlow's gRPC; "auto": NCCL where each worker has GPUs; else over tfmw's own ring
            (`tfmw.ring`), or TensorFlow's where workers can't connect to each other on any TCP
            port, or have several virtual devices.
        bytes_per_pack: gradients are reduced in packs of about this many bytes.
        timeout_s: seconds after which a collective fails; None waits as long as peers are alive.
        start_timeout_s: seconds to wait for all tasks to come; and for a coordinator of parameter
            servers to come back.
        existing_servers: on ps and workers beside them, whether to serve one training after
            another, without end; by default where TFMW_EXISTING_SERVERS is 1.

    Returns:
        The cluster, with this process's task in it. Not on a ps, nor on a worker of a cluster with
        parameter servers: these serve, and when the coordinator is done the process ends with
        status 0 (SystemExit).

    Raises:
        ClusterError: a malformed or contradictory description, a port in use, tasks that disagree.
        UsageError: an unknown strategy or collectives, or TensorFlow has run an op already.
        TfmwError: some task did not come in time.
    """
    global _joined, _evaluating
    _require_choice("strategy", strategy, STRATEGIES)
    _require_choice("collectives", collectives, COLLECTIVES)
    resolved = Cluster.resolve(os.environ, cluster)
    _reuse_freed_memory()
    if _joined is not None:
        if cluster is not None and resolved != _joined.cluster:
            raise UsageError(
                f"this process has already joined {_joined.cluster!r} and cannot join "
                f"{resolved!r}: a process joins once; start a new one for another cluster."
            )
        if collectives != "auto" or bytes_per_pack is not None or timeout_s is not None:
            # Joining is done; how gradients are reduced may still be chosen.
            if collectives != "auto":
                _joined.collectives = collectives
            _joined.options = _communication_options(_joined.collectives, bytes_per_pack, timeout_s)
            if _joined.ring is not None:
                _joined.ring.timeout_s = timeout_s
        return _joined.cluster
    if resolved.task == "evaluator":
        _evaluating = True
    if resolved.is_single or resolved.task == "evaluator":
        return resolved
    if resolved.is_public():
        logger.warning(
            "tf.distribute's gRPC has no authentication, and whoever reaches its port can run "
            "code: %s is a public address; keep the cluster in a private network.",
            ", ".join(resolved.public_addresses()),
        )
    if strategy == "parameter_server" or resolved.has_ps:
        _join_parameter_servers(resolved, strategy, start_timeout_s, existing_servers)
        return resolved
    _join_multi_worker(resolved, collectives, bytes_per_pack, timeout_s, start_timeout_s)
    return resolved


def _reuse_freed_memory() -> None:
    """Has TensorFlow keep the memory of tensors that it frees, as it does on GPUs.

    malloc hands large blocks back to the system, which clears every page of them for the next
    tensor: for large variables most of an optimizer's time. Of effect until the first op.
    """
    if "TF_CPU_ALLOCATOR_USE_BFC" in os.environ:
        return
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    os.environ["TF_CPU_ALLOCATOR_USE_BFC"] = "true"
    # Its own limit is 64 GiB.
    os.environ.setdefault("TF_CPU_BFC_MEM_LIMIT_IN_MB", str(machine >> 20))


def _join_multi_worker(
    cluster: Cluster,
    collectives: str,
    bytes_per_pack: int | None,
    timeout_s: float | None,
    start_timeout_s: float,
) -> None:
    global _joined
    _require_not_started("tfmw.init()")
    facts = {
        **{name: _version(name) for name in ("tensorflow", "keras", "numpy", "tfmw")},
        "Python": ".".join(map(str, sys.version_info[:2])),
        "collectives": collectives,
    }
    rendezvous.meet(cluster, facts, timeout_s=start_timeout_s)
    with collector_paused():
        import tensorflow as tf

        from tfmw import keras_compat

    _bound_threads()
    if collectives == "auto":
        _add_a_thread()
    config = cluster.as_tf_config()
    jobs = {name: len(a) for name, a in config["cluster"].items() if name in ("chief", "worker")}
    leader = f"/job:{'chief' if 'chief' in jobs else 'worker'}/replica:0/task:0"
    keras_compat.configure_coordination(jobs, leader, HEARTBEAT_S)
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec({k: config["cluster"][k] for k in jobs}),
        task_type=cluster.task,
        task_id=cluster.index,
        num_accelerators={"GPU": len(tf.config.list_physical_devices("GPU"))},
        rpc_layer="grpc",
    )
    options = _communication_options(collectives, bytes_per_pack, timeout_s)
    strategy = tf.distribute.MultiWorkerMirroredStrategy(
        cluster_resolver=resolver, communication_options=options
    )
    _joined = _Joined(cluster, strategy, options, collectives=collectives)
    _end_at_sigterm()
    _end_together()
    logger.info(
        "%r: in, %d workers, %d replicas",
        cluster,
        cluster.num_workers,
        strategy.num_replicas_in_sync,
    )


def _join_parameter_servers(
    cluster: Cluster, strategy: str, start_timeout_s: float, existing_servers: bool | None
) -> None:
    global _joined
    if strategy not in ("auto", "parameter_server"):
        raise UsageError(
            f"strategy={strategy!r} does not train on parameter servers, received {cluster!r}: "
            'use "parameter_server", or describe a cluster of workers only.'
        )
    if not cluster.has_ps:
        raise UsageError(
            f"parameter-server training needs at least one ps, received {cluster!r}: add the "
            'servers to "cluster" ("ps", and a "chief" that coordinates), or train synchronously.'
        )
    _require_not_started("tfmw.init()")
    facts = {name: _version(name) for name in ("tensorflow", "keras", "numpy", "tfmw")}
    from tfmw import ps_cluster

    if cluster.task in ("ps", "worker"):
        if existing_servers is None:
            existing_servers = os.environ.get("TFMW_EXISTING_SERVERS") == "1"
        ps_cluster.serve(
            cluster,
            facts,
            patience_s=start_timeout_s,
            standing=existing_servers,
            threads=ps_cluster.threads_of_a_task(),
        )
        raise SystemExit(0)
    _bound_threads()
    servers = ps_cluster.coordinate(cluster, facts, timeout_s=start_timeout_s)
    options = _communication_options("auto", None, None)
    _joined = _Joined(cluster, servers.strategy, options, servers)
    _watch_errors()

    def leave() -> None:
        if not _failed:
            _succeed()
            servers.line.finish()

    atexit.register(leave)


def _version(package: str) -> str:
    """The installed version, without importing where the package's metadata tells."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # installed under another name, as tensorflow-cpu is
        return str(importlib.import_module(package).__version__)


def _bound_threads() -> None:
    """Shares this machine's cores between the tasks that a launcher started on it."""
    import tensorflow as tf

    tasks = int(os.environ.get("TFMW_LOCAL_TASKS", "1"))
    if tasks > 1 and "TF_NUM_INTRAOP_THREADS" not in os.environ:
        cores = len(os.sched_getaffinity(0))
        tf.config.threading.set_intra_op_parallelism_threads(max(1, cores // tasks))


def _add_a_thread() -> None:
    """Gives TensorFlow a thread more for ops, as a sum over tfmw's ring blocks one.

    With the others it also answers peers that are still in an earlier collective.
    """
    import tensorflow as tf

    chosen = tf.config.threading.get_inter_op_parallelism_threads()
    if not chosen:
        said = os.environ.get("TF_NUM_INTEROP_THREADS", "")
        chosen = int(said) if said.isdecimal() else 0
        chosen = chosen or len(os.sched_getaffinity(0))
    tf.config.threading.set_inter_op_parallelism_threads(chosen + 1)


def _end_at_sigterm() -> None:
    """SIGTERM ends the process again: the strategy has put a handler there that survives it."""
    if threading.current_thread() is threading.main_thread():
        if signal.getsignal(signal.SIGTERM) in (signal.SIG_DFL, None):
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


_at_success: list[Callable[[], None]] = []
_failed = False


def mark_failed() -> None:
    """This process will not have ended well, however it ends."""
    global _failed
    _failed = True


def on_success(callback: Callable[[], None]) -> None:
    """Calls `callback` when this process ends without an error, and no other task fails."""
    if not _at_success and _joined is None:
        _watch_errors()
        atexit.register(_succeed)
    _at_success.append(callback)


def _succeed() -> None:
    if not _failed:
        for callback in _at_success:
            callback()


def _watch_errors() -> None:
    """An unhandled error is told to all tasks, at once, so that it is what everybody shows."""
    show = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, traceback: Any) -> None:
        report_failure(error)
        show(kind, error, traceback)

    sys.excepthook = hook


def _end_together() -> None:
    """Nobody leaves while another still computes: TensorFlow takes a peer's exit for its death."""
    from tfmw import keras_compat

    _watch_errors()

    def leave() -> None:
        if _failed:
            return
        import tensorflow as tf

        try:
            keras_compat.coordination_barrier("tfmw/leave", LEAVE_TIMEOUT_S)
        except tf.errors.OpError as e:
            logger.warning("left before the other tasks had finished: %s", e.message)
            return
        _succeed()

    atexit.register(leave)


def report_failure(error: BaseException) -> None:
    """Tells every task of the cluster that this one fails with `error`; once per process."""
    already = _failed
    mark_failed()
    if _joined is None or already:
        return
    try:
        _tell(_joined, error)
    finally:
        if _joined.ring is not None:
            _joined.ring.close()  # others that wait for this task find out now, and hear why


def _tell(joined: _Joined, error: BaseException) -> None:
    import tensorflow as tf

    from tfmw import keras_compat

    if is_secondary(error):
        return
    if joined.servers is not None:
        joined.servers.line.fail(f"{type(error).__name__}: {error}")
        return
    name = f"{joined.cluster.task} {joined.cluster.index}"
    try:
        keras_compat.coordination_report_error(f"{name}: {type(error).__name__}: {error}")
    except (tf.errors.OpError, ValueError) as e:
        logger.warning("could not tell the other tasks about the error: %s", e)


def is_secondary(error: BaseException) -> bool:
    """Whether `error` only says that another task has gone."""
    import tensorflow as tf

    return isinstance(
        error,
        tf.errors.UnavailableError
        | tf.errors.AbortedError
        | tf.errors.CancelledError
        | tf.errors.DeadlineExceededError,
    )


def current_cluster() -> Cluster:
    """The cluster that `init()` joined; a single process where it joined none."""
    return Cluster() if _joined is None else _joined.cluster


def current_strategy() -> tf.distribute.Strategy:
    """The strategy of the joined cluster; TensorFlow's default one where there is none."""
    import tensorflow as tf

    return tf.distribute.get_strategy() if _joined is None else _joined.strategy


def chosen_collectives() -> str:
    """What `init` was told to reduce gradients with, last."""
    return "auto" if _joined is None else _joined.collectives


def reduction_options(
    strategy: tf.distribute.Strategy,
) -> tf.distribute.experimental.CommunicationOptions | None:
    """How `strategy` is to reduce gradients, where `init` was told; None for its own way."""
    return _joined.options if _joined is not None and strategy is _joined.strategy else None


def ring_of(strategy: tf.distribute.Strategy) -> Ring | None:
    """The ring of tfmw's own that `strategy` sums gradients over; None where TensorFlow does.

    It is for workers of one CPU replica each, unless `init` was told which collectives to take. All
    tasks call this: the first call connects them.
    """
    if _joined is None or strategy is not _joined.strategy or _joined.collectives != "auto":
        return None
    if not _joined.asked_for_ring:
        _joined.asked_for_ring = True
        _joined.ring = _connected(_joined)
    return _joined.ring


def _connected(joined: _Joined) -> Ring | None:
    from tfmw import ring
    from tfmw.group import Group

    group = Group.of(joined.strategy)
    devices = joined.strategy.extended.worker_devices
    if not all(group.from_all(len(devices) == 1 and "CPU" in devices[0].upper())):
        return None
    try:
        return ring.connect(
            group.rank,
            [rendezvous.split(address)[0] for address in rendezvous.members_of(joined.cluster)],
            group.from_chief(lambda: secrets.token_hex(16)).encode(),
            group.from_all,
            group.require_there,
            joined.options.timeout_seconds,
        )
    except ring.RingBroken as e:
        if group.is_chief:
            logger.warning(
                "gradients travel over TensorFlow's gRPC, which takes longer: %s. Let workers "
                "connect to each other on any TCP port, or choose collectives='ring' to be at "
                "peace with it.",
                e,
            )
        return None


def choose(strategy: str | tf.distribute.Strategy | None) -> tf.distribute.Strategy:
    """The strategy that a call of fit, evaluate or predict trains on.

    Args:
        strategy: "auto" (the joined cluster; else all GPUs of this machine; else none), a name,
            or a strategy, which is returned as it is.

    Raises:
        UsageError: an unknown name, or one that this process cannot have any more.
    """
    import tensorflow as tf

    if isinstance(strategy, tf.distribute.Strategy):
        return strategy
    if strategy is None:
        strategy = "auto"
    _require_choice("strategy", strategy, STRATEGIES)
    if is_evaluator():
        return tf.distribute.get_strategy()
    if strategy == "auto":
        if tf.distribute.has_strategy():
            return tf.distribute.get_strategy()
        if _joined is None and not Cluster.resolve(os.environ).is_single:
            init()
        if _joined is None and len(tf.config.list_logical_devices("GPU")) > 1:
            return mirrored()
        return current_strategy()
    if strategy == "multi_worker_mirrored":
        if _joined is None:
            init(strategy=strategy)
        return current_strategy()
    if strategy == "mirrored":
        return mirrored()
    if strategy == "default":
        return tf.distribute.get_strategy()
    return current_strategy() if _joined is not None else parameter_server()


def is_evaluator() -> bool:
    """Whether this process evaluates what others train."""
    return _evaluating or (_joined is None and Cluster.resolve(os.environ).task == "evaluator")


def servers_of(strategy: tf.distribute.Strategy) -> ps_cluster.Joined | None:
    """The parameter servers behind `strategy`; None for a strategy of another kind.

    Raises:
        UsageError: a `ParameterServerStrategy` that tfmw did not make.
    """
    import tensorflow as tf

    if not isinstance(strategy, tf.distribute.ParameterServerStrategy):
        return None
    if _joined is None or _joined.servers is None or strategy is not _joined.strategy:
        raise UsageError(
            "received a ParameterServerStrategy that tfmw did not make: use "
            "tfmw.strategies.parameter_server(...), which also tells the servers when to leave."
        )
    return _joined.servers


def beside_training(strategy: str | tf.distribute.Strategy | None) -> tf.distribute.Strategy:
    """The strategy for evaluate and predict: parameter servers leave them to the coordinator."""
    import tensorflow as tf

    chosen = choose(strategy)
    if not isinstance(chosen, tf.distribute.ParameterServerStrategy):
        return chosen
    return tf.distribute.get_strategy()


def multi_worker_mirrored(
    collectives: str = "auto",
    *,
    cluster: Cluster | Mapping[str, Any] | None = None,
    bytes_per_pack: int | None = None,
    timeout_s: float | None = None,
) -> tf.distribute.Strategy:
    """Synchronous training on all workers of the cluster, which this joins if `init` has not.

    Args:
        collectives: "auto", "ring" or "nccl", as in `init`.
        cluster: as in `init`.
        bytes_per_pack: gradients are reduced in packs of about this many bytes.
        timeout_s: seconds after which a collective fails; None waits as long as peers are alive.

    Returns:
        A `tf.distribute.MultiWorkerMirroredStrategy`; on a single machine, one without peers.

    Raises:
        UsageError: unknown collectives, or NCCL on a machine without GPUs.
    """
    _require_choice("collectives", collectives, COLLECTIVES)
    options = _communication_options(collectives, bytes_per_pack, timeout_s)
    resolved = init(
        cluster, collectives=collectives, bytes_per_pack=bytes_per_pack, timeout_s=timeout_s
    )
    if not resolved.is_single:
        return current_strategy()
    import tensorflow as tf

    return tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)


def mirrored(devices: Sequence[str] | None = None) -> tf.distribute.Strategy:
    """Synchronous training on several devices of this machine.

    Args:
        devices: such as ["CPU:0", "CPU:1"] or ["GPU:0", "GPU:1"]; all GPUs unless given, and
            where there are none, all logical CPU devices.

    Raises:
        UsageError: a device that this machine does not have.
    """
    import tensorflow as tf

    known = [d.name.removeprefix("/device:") for d in tf.config.list_logical_devices()]
    if devices is None:
        devices = [d for d in known if d.startswith("GPU")] or known
    unknown = [
        d for d in devices if d.removeprefix("/").removeprefix("device:").upper() not in known
    ]
    if unknown or not devices:
        raise UsageError(f"unknown devices {unknown}: this machine has {', '.join(known)}.")
    return tf.distribute.MirroredStrategy(devices=list(devices))


def parameter_server(
    cluster: Cluster | Mapping[str, Any] | None = None,
    *,
    partitioner: Any = None,
    min_shard_bytes: int | None = None,
    sync_replicas: bool = False,
    replicas_to_aggregate: int | None = None,
) -> tf.distribute.Strategy:
    """Training on parameter servers, for the coordinator of `cluster`, which this joins.

    On a ps or worker of the cluster this serves, as `init` does.

    Args:
        cluster: as in `init`, with `ps` and `workers`; this process is its chief.
        partitioner: divides large variables over the servers, such as
            `tf.distribute.experimental.partitioners.MinSizePartitioner`; along the first axis.
        min_shard_bytes: divides each variable of at least twice this many bytes, into as many
            pieces of at least this size as there are servers.
        sync_replicas: updates wait for gradients of the same step from several workers.
        replicas_to_aggregate: from how many of them; the others are spare, and their late
            gradients are dropped and counted. All workers by default.

    Returns:
        A `tf.distribute.ParameterServerStrategy`, to pass to `fit`.

    Raises:
        UsageError: the cluster has no parameter servers, or the settings contradict each other.
    """
    resolved = init(cluster, strategy="parameter_server")
    if is_evaluator():
        return current_strategy()
    if _joined is None or _joined.servers is None:
        raise UsageError(
            f"parameter-server training needs at least one worker and one ps, received "
            f'{resolved!r}: add them to "cluster", or train synchronously.'
        )
    from tfmw import ps_cluster

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
    partition = ps_cluster.partition_of(partitioner, min_shard_bytes, len(resolved.ps))
    _joined.servers.settings = ps_cluster.Settings(partition, sync_replicas, replicas_to_aggregate)
    return _joined.strategy


def _communication_options(
    collectives: str, bytes_per_pack: int | None, timeout_s: float | None
) -> tf.distribute.experimental.CommunicationOptions:
    import tensorflow as tf

    gpus = len(tf.config.list_physical_devices("GPU"))
    if collectives == "nccl" and not gpus:
        raise UsageError(
            'collectives="nccl" reduces between GPUs, and this machine has none: '
            'use "ring", or "auto".'
        )
    implementation = {
        "auto": tf.distribute.experimental.CommunicationImplementation.AUTO,
        "ring": tf.distribute.experimental.CommunicationImplementation.RING,
        "nccl": tf.distribute.experimental.CommunicationImplementation.NCCL,
    }[collectives]
    if bytes_per_pack is None:
        bytes_per_pack = 0 if collectives == "nccl" or gpus else RING_BYTES_PER_PACK
    return tf.distribute.experimental.CommunicationOptions(
        bytes_per_pack=bytes_per_pack, timeout_seconds=timeout_s, implementation=implementation
    )


def _require_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    if value not in choices:
        raise UsageError(
            f"unknown {name} {value!r}: expected one of {', '.join(map(repr, choices))}."
        )


def _require_not_started(what: str) -> None:
    if "tensorflow" not in sys.modules:
        return
    from tfmw import keras_compat

    if keras_compat.runtime_started():
        raise UsageError(
            f"{what} came after TensorFlow had run its first op, and a running TensorFlow cannot "
            "join a cluster: call it first in the script, before any tensor, dataset or model is "
            "made (`tfmw run` does this for you; in a notebook, use tfmw.fit(..., workers=2))."
        )


__all__ = [
    "TfmwError",
    "choose",
    "current_cluster",
    "current_strategy",
    "init",
    "mirrored",
    "multi_worker_mirrored",
    "parameter_server",
]
