"""Joining the cluster, once per process and before TensorFlow's first op: `tfmw.init`.

cluster = tfmw.init()        # joins the cluster; no-op on a single machine

`tfmw run` joins for the script (`join_for_script`). Unless the script itself then calls
`tfmw.init()`, which a script of plain Keras does not, `model.fit` and Keras's other methods run on
the cluster.
"""

from __future__ import annotations

import dataclasses
import importlib
import logging
import os
import random
import signal
import sys
import threading
import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tfmw.cluster import membership, rendezvous
from tfmw.cluster.cluster import BACKUP_DIR, KERAS, ROUNDS, Cluster
from tfmw.cluster.imports import without_collection
from tfmw.cluster.membership import JoinedCluster
from tfmw.cluster.memory import usable_bytes
from tfmw.cluster.versions import common_versions
from tfmw.errors import UsageError
from tfmw.observe import task_process, trackers
from tfmw.observe.progress import PROGRESS_FILE
from tfmw.observe.trackers import RUN_ID

if TYPE_CHECKING:
    import tensorflow as tf

logger = logging.getLogger("tfmw")

COLLECTIVES = ("auto", "tfmw", "ring", "nccl")
STRATEGIES = ("auto", "multi_worker_mirrored", "mirrored", "parameter_server", "default")

# Reducing 100 MB between two CPU workers takes 400 ms in one piece. In packs of 1 to 4 MB it takes
# 170 to 200 ms (bench/ring.py measures it). NCCL pipelines by itself and prefers large packs.
RING_BYTES_PER_PACK = 2 << 20
HEARTBEAT_S = 10


def init(
    cluster: Cluster | Mapping[str, Any] | None = None,
    *,
    strategy: str = "auto",
    collectives: str = "auto",
    bytes_per_pack: int | None = None,
    timeout_s: float | None = None,
    start_timeout_s: float = 120.0,
    existing_servers: bool | None = None,
    keras: bool | None = None,
) -> Cluster:
    """Joins this process to its cluster.

    It also makes TensorFlow keep the memory of freed tensors for reuse, unless
    TF_CPU_ALLOCATOR_USE_BFC is set. On a single machine it does nothing else. A second call returns
    the same cluster; it may still choose `collectives`, `bytes_per_pack` and `timeout_s` (`tfmw
    run` makes the first call for a script).

    Args:
        cluster: an explicit description (`Cluster`, or a dict in the form of TF_CONFIG); by default
            it is read from the environment: TF_CONFIG, Slurm, Kubernetes, Open MPI and others.
        strategy: "auto" (synchronous training; parameter servers if the cluster has some),
            "multi_worker_mirrored", "mirrored", "parameter_server" or "default" (none).
        collectives: transport of the all-reduce of synchronous workers: "nccl" between GPUs; "ring"
            over TensorFlow's gRPC; "tfmw" over tfmw's own ring, between workers of one CPU replica
            each; "auto": NCCL if each worker has GPUs; else tfmw's ring, or TensorFlow's if workers
            can't connect to each other on any TCP port, or have several virtual devices.
        bytes_per_pack: gradients are reduced in packs of about this many bytes.
        timeout_s: seconds after which a collective fails; None waits as long as peers are alive.
        start_timeout_s: seconds to wait for all tasks to connect; on parameter servers also for
            their coordinator to restart.
        existing_servers: on ps and workers beside them, whether to serve any number of trainings,
            one after another; by default if TFMW_EXISTING_SERVERS is 1.
        keras: True: plain calls such as `model.fit(...)` train on the cluster, as
            `tfmw.fit(model, ...)` does; all tasks must make them. False: `model.fit` raises, and
            Keras's other methods ignore the cluster. None: False, unless TFMW_KERAS is "on" or an
            earlier call has chosen.

    Returns:
        The cluster, with this process's task in it; none in a child process of a task, such as one
        of a pool of multiprocessing. The call does not return on a ps, nor on a worker of a cluster
        with parameter servers: these serve until the coordinator is done, and then end with status
        0 (SystemExit).

    Raises:
        ClusterError: a malformed or contradictory description, a port in use, tasks that disagree.
        UsageError: an unknown strategy or collectives, another cluster than in the first call;
            parameter servers that the strategy excludes or lacks; or TensorFlow has already run
            an op.
        TfmwError: a task did not connect in time.
    """
    resolved = _join_once(
        cluster,
        strategy,
        collectives,
        bytes_per_pack,
        timeout_s,
        start_timeout_s,
        existing_servers,
    )
    if keras is None and os.environ.get(KERAS) == "on":
        keras = True
    if keras is not None or _keras.by_default:
        _keras.by_default = False
        _replace_methods(bool(keras))
    return resolved


def join_for_script() -> None:
    """Joins as `init` does, for a script that may be of plain Keras: with `keras=True` by default.

    On a single machine Keras's methods remain, unless there are backups to write.
    """
    cluster = init()
    alone = cluster.is_single and not membership.is_evaluator()
    if KERAS not in os.environ and not (alone and not os.environ.keys() & {ROUNDS, BACKUP_DIR}):
        _keras.by_default = True
        _replace_methods(True)


@dataclasses.dataclass
class _Keras:
    """The state of Keras's methods in this process."""

    by_default: bool = False  # replaced by `tfmw run`; the script's own `init` chooses
    drawn: Any = None  # the state of Python's and NumPy's generators before they were seeded


_keras = _Keras()


def _replace_methods(replaces: bool) -> None:
    """Makes Keras's methods tfmw's, or again Keras's."""
    import numpy as np

    if not replaces and os.environ.get(BACKUP_DIR):
        raise UsageError(
            "received --backup-dir, which is for scripts of plain Keras, and this one calls "
            "tfmw.init(): pass backup_dir= to tfmw.fit, or call tfmw.init(keras=True)."
        )
    if not replaces and "tfmw.compat.model_methods" not in sys.modules:
        return
    from tfmw.compat.model_methods import replace_methods

    def plain(*call: Any) -> Any:
        return importlib.import_module("tfmw").plain_call(*call)  # of a room above this one

    replace_methods(plain if replaces else None)
    importlib.import_module("tfmw.cluster.keras_distribution").install()  # it imports this module
    if replaces and RUN_ID in os.environ and _keras.drawn is None:
        # A script that shuffles or splits its arrays does the same on all workers, and again after
        # a restart.
        _keras.drawn = random.getstate(), np.random.get_state()
        seed = zlib.crc32(os.environ[RUN_ID].encode())
        random.seed(seed)
        np.random.seed(seed)
    elif not replaces and _keras.drawn is not None:
        random.setstate(_keras.drawn[0])
        np.random.set_state(_keras.drawn[1])
        _keras.drawn = None


def _join_once(
    cluster: Cluster | Mapping[str, Any] | None,
    strategy: str,
    collectives: str,
    bytes_per_pack: int | None,
    timeout_s: float | None,
    start_timeout_s: float,
    existing_servers: bool | None,
) -> Cluster:
    require_choice("strategy", strategy, STRATEGIES)
    require_choice("collectives", collectives, COLLECTIVES)
    resolved = Cluster.resolve(os.environ, cluster)
    _reuse_freed_memory()
    joined = membership.joined()
    if joined is not None:
        if cluster is not None and resolved != joined.cluster:
            raise UsageError(
                f"this process has already joined {joined.cluster!r} and cannot join "
                f"{resolved!r}: a process joins once; start a new one for another cluster."
            )
        if collectives != "auto" or bytes_per_pack is not None or timeout_s is not None:
            # Already joined; the transport of reductions may still be chosen.
            if collectives != "auto":
                joined.collectives = collectives
            joined.options = communication_options(joined.collectives, bytes_per_pack, timeout_s)
        return joined.cluster
    if task_process.is_child() and resolved.is_single:
        return resolved
    if not resolved.is_single or os.environ.keys() & {ROUNDS, PROGRESS_FILE}:
        task_process.mark(resolved.as_tf_config())
    trackers.join(resolved.is_chief)
    if resolved.task == "evaluator":
        membership.set_evaluating()
    if resolved.is_single or resolved.task == "evaluator":
        return resolved
    if resolved.is_public():
        logger.warning(
            "tf.distribute's gRPC has no authentication: anyone who can connect to it can run "
            "code: %s is a public address; keep the cluster in a private network.",
            ", ".join(resolved.public_addresses()),
        )
    if strategy == "parameter_server" or resolved.has_ps:
        _join_parameter_servers(resolved, strategy, start_timeout_s, existing_servers)
        return resolved
    _join_multi_worker(resolved, collectives, bytes_per_pack, timeout_s, start_timeout_s)
    return resolved


def _reuse_freed_memory() -> None:
    """Makes TensorFlow keep the memory of freed tensors, as it does on GPUs.

    malloc returns large blocks to the system, which clears every page of them for the next tensor.
    With large variables that takes most of an optimizer's time. The setting has no effect after the
    first op.
    """
    if "TF_CPU_ALLOCATOR_USE_BFC" in os.environ:
        return
    os.environ["TF_CPU_ALLOCATOR_USE_BFC"] = "true"
    # TensorFlow's own limit is 64 GiB
    os.environ.setdefault("TF_CPU_BFC_MEM_LIMIT_IN_MB", str(usable_bytes() >> 20))


def _join_multi_worker(
    cluster: Cluster,
    collectives: str,
    bytes_per_pack: int | None,
    timeout_s: float | None,
    start_timeout_s: float,
) -> None:
    _require_not_started()
    facts = {**common_versions(), "collectives": collectives}
    rendezvous.meet(cluster, facts, timeout_s=start_timeout_s)
    with without_collection():
        import tensorflow as tf

        from tfmw.compat import runtime

    _bound_threads()
    if collectives in ("auto", "tfmw"):
        _add_a_thread()
    config = cluster.as_tf_config()
    jobs = {name: len(a) for name, a in config["cluster"].items() if name in ("chief", "worker")}
    leader = f"/job:{'chief' if 'chief' in jobs else 'worker'}/replica:0/task:0"
    runtime.configure_coordination(jobs, leader, HEARTBEAT_S)
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec({k: config["cluster"][k] for k in jobs}),
        task_type=cluster.task,
        task_id=cluster.index,
        num_accelerators={"GPU": len(tf.config.list_physical_devices("GPU"))},
        rpc_layer="grpc",
    )
    options = communication_options(collectives, bytes_per_pack, timeout_s)
    strategy = tf.distribute.MultiWorkerMirroredStrategy(
        cluster_resolver=resolver, communication_options=options
    )
    membership.set_joined(JoinedCluster(cluster, strategy, options, collectives=collectives))
    _guard_models(cluster)
    _end_at_sigterm()
    membership.end_together(cluster)
    logger.info(
        "%r: in, %d workers, %d replicas",
        cluster,
        cluster.num_workers,
        strategy.num_replicas_in_sync,
    )


def _join_parameter_servers(
    cluster: Cluster, strategy: str, start_timeout_s: float, existing_servers: bool | None
) -> None:
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
    _require_not_started()
    facts = common_versions()
    from tfmw.cluster import servers as server_tasks

    if cluster.task in ("ps", "worker"):
        if existing_servers is None:
            existing_servers = os.environ.get("TFMW_EXISTING_SERVERS") == "1"
        server_tasks.serve(
            cluster,
            facts,
            patience_s=start_timeout_s,
            serve_again=existing_servers,
            threads=_threads_of_this_task(),
        )
        raise SystemExit(0)
    _bound_threads()
    connected, control = server_tasks.coordinate(cluster, facts, timeout_s=start_timeout_s)
    options = communication_options("auto", None, None)
    membership.set_joined(JoinedCluster(cluster, connected, options, control=control))
    _guard_models(cluster)
    membership.leave_servers_at_exit(control)


def _guard_models(cluster: Cluster) -> None:
    """Makes Keras's own `model.fit` raise, because it would train in this process only."""
    from tfmw.compat.model_methods import guard_models

    def refuse() -> None:
        raise UsageError(
            f"model.fit() was called in {cluster!r}: it would train this process's copy alone, on "
            "all of the data. Write tfmw.fit(model, ...) with the same arguments, which trains on "
            "the cluster, or call tfmw.init(keras=True) first, with which model.fit does; to train "
            'here alone, tfmw.fit(model, ..., strategy="default").'
        )

    guard_models(refuse, cluster.is_chief)


def _threads_of_this_task() -> int:
    """This task's share of the cores, next to other local tasks; 0 lets TensorFlow choose."""
    tasks = int(os.environ.get("TFMW_LOCAL_TASKS", "1"))
    if tasks <= 1 or "TF_NUM_INTRAOP_THREADS" in os.environ:
        return 0
    return max(1, len(os.sched_getaffinity(0)) // tasks)


def _bound_threads() -> None:
    """Limits TensorFlow's threads to this task's share of the cores."""
    import tensorflow as tf

    if threads := _threads_of_this_task():
        tf.config.threading.set_intra_op_parallelism_threads(threads)


def _add_a_thread() -> None:
    """Adds one thread to TensorFlow's pool for ops, because a sum over tfmw's ring blocks one.

    The other threads also serve peers that are still in an earlier collective.
    """
    import tensorflow as tf

    chosen = tf.config.threading.get_inter_op_parallelism_threads()
    if not chosen:
        setting = os.environ.get("TF_NUM_INTEROP_THREADS", "")
        chosen = int(setting) if setting.isdecimal() else 0
        chosen = chosen or len(os.sched_getaffinity(0))
    tf.config.threading.set_inter_op_parallelism_threads(chosen + 1)


def _end_at_sigterm() -> None:
    """Restores the default action of SIGTERM, as the strategy's handler ignores the signal."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    if in_main_thread and signal.getsignal(signal.SIGTERM) in (signal.SIG_DFL, None):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def communication_options(
    collectives: str, bytes_per_pack: int | None, timeout_s: float | None
) -> tf.distribute.experimental.CommunicationOptions:
    """`tf.distribute`'s options for the arguments of `init` that concern reductions.

    Raises:
        UsageError: NCCL on a machine without GPUs.
    """
    import tensorflow as tf

    gpus = len(tf.config.list_physical_devices("GPU"))
    if collectives == "nccl" and not gpus:
        raise UsageError(
            'collectives="nccl" reduces between GPUs, and this machine has none: '
            'use "ring", or "auto".'
        )
    name = "AUTO" if collectives == "tfmw" else collectives.upper()
    if bytes_per_pack is None:
        bytes_per_pack = 0 if collectives == "nccl" or gpus else RING_BYTES_PER_PACK
    return tf.distribute.experimental.CommunicationOptions(
        bytes_per_pack=bytes_per_pack,
        timeout_seconds=timeout_s,
        implementation=tf.distribute.experimental.CommunicationImplementation(name),
    )


def require_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    """Raises UsageError for a value that is not one of the choices."""
    if value not in choices:
        raise UsageError(
            f"unknown {name} {value!r}: expected one of {', '.join(map(repr, choices))}."
        )


def _require_not_started() -> None:
    if "tensorflow" not in sys.modules:
        return
    from tfmw.compat import runtime

    if runtime.runtime_started():
        raise UsageError(
            "tfmw.init() came after TensorFlow had run its first op, and a running TensorFlow "
            "cannot join a cluster: call it first in the script, before any tensor, dataset or "
            "model is made (`tfmw run` does this for you; in a notebook, use "
            "tfmw.fit(..., workers=2))."
        )
