"""Joining the cluster, once per process and before TensorFlow's first op: `tfmw.init`.

cluster = tfmw.init()        # joins the cluster; no-op on a single machine

`tfmw run` joins for the script (`join_for_script`). Unless the script itself then calls
`tfmw.init()`, which a script of plain Keras does not, `model.fit` and Keras's other methods run on
the cluster.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import importlib
import itertools
import logging
import os
import random
import signal
import sys
import threading
import warnings
import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tfmw.cluster import addresses, membership, rendezvous, turns
from tfmw.cluster.cluster import BACKUP_DIR, ISOLATED, KERAS, STATE_FOLDER, Cluster
from tfmw.cluster.imports import without_collection
from tfmw.cluster.membership import JoinedCluster
from tfmw.cluster.memory import usable_bytes
from tfmw.cluster.versions import common_versions
from tfmw.errors import UsageError, require_choice
from tfmw.observe import task_process, trackers
from tfmw.observe.progress import PROGRESS_FILE, blocking_call
from tfmw.observe.trackers import RUN_ID

if TYPE_CHECKING:
    import tensorflow as tf

logger = logging.getLogger("tfmw")

GRPC = ("grpc", "nccl")  # collectives of TensorFlow
COLLECTIVES = ("auto", "tfmw", *GRPC)
STRATEGIES = ("auto", "multi_worker_mirrored", "mirrored", "parameter_server", "default")

_EXPORT_S = 600.0  # longest wait for an export, which a script may make on another worker only

# Reducing 100 MB between two CPU workers takes 400 ms in one piece. In packs of 1 to 4 MB it takes
# 170 to 200 ms (bench/ring.py measures it). NCCL pipelines by itself and prefers large packs.
RING_BYTES_PER_PACK = 2 << 20


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
        collectives: transport of the all-reduce of synchronous workers: "nccl" between GPUs; "grpc"
            over TensorFlow's gRPC, whose servers listen on the addresses of the tasks; "tfmw" over
            tfmw's own ring, which connects workers of one CPU device each on any TCP port; "auto":
            "tfmw", or TensorFlow's choice if a worker has GPUs or several virtual devices. "ring"
            is the former name of "grpc".
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
        if not keras:
            turns.end()
    return resolved


def join_for_script() -> None:
    """Joins as `init` does, for a script that may be of plain Keras: with `keras=True` by default.

    In a single worker Keras's methods remain, unless it writes backups or may restart from memory.
    """
    cluster = init()
    alone = cluster.is_single and not membership.is_evaluator()
    needed = os.environ.keys() & {BACKUP_DIR, STATE_FOLDER}
    if KERAS not in os.environ and (needed or not alone):
        _keras.by_default = True
        _replace_methods(True)
        if path := task_process.own_path(turns.FILE):
            importlib.import_module("tfmw.cluster.script_files").share_files(path)
        if cluster.is_chief:
            membership.on_success(_warn_if_each_worked_alone)


def _warn_if_each_worked_alone() -> None:
    """Warns if a script has used TensorFlow, but not its cluster."""
    joined = membership.joined()
    if joined is None or joined.made is not None or not _keras.by_default:
        return
    from tfmw.compat import runtime

    if runtime.runtime_started():
        logger.warning(
            "the script called no method of Keras that shares the work, such as fit, so each of "
            "the %d workers has done all of it: in a loop of your own, call model.train_on_batch.",
            joined.cluster.num_workers,
        )


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
    collectives = require_collectives(collectives)
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
            _choose_reductions(joined, collectives, bytes_per_pack, timeout_s)
        return joined.cluster
    if task_process.is_child() and resolved.is_single:
        return resolved
    if not resolved.is_single or PROGRESS_FILE in os.environ:
        task_process.mark(resolved.as_tf_config())
    trackers.join(resolved.is_chief)
    if resolved.task == "evaluator":
        membership.set_evaluating()
        _share_downloads()
    if resolved.is_single or resolved.task == "evaluator":
        return resolved
    if strategy == "parameter_server" or resolved.has_ps:
        _join_parameter_servers(resolved, strategy, start_timeout_s, existing_servers)
        return resolved
    _join_multi_worker(resolved, collectives, bytes_per_pack, timeout_s, start_timeout_s)
    return resolved


def _choose_reductions(
    joined: JoinedCluster, collectives: str, bytes_per_pack: int | None, timeout_s: float | None
) -> None:
    """Changes the transport of reductions in a process that has joined its cluster."""
    if collectives == "auto":
        collectives = joined.collectives
    over_grpc = collectives in GRPC
    if collectives != "auto" and over_grpc != (joined.make is _over_grpc):
        if joined.made is not None:
            raise UsageError(
                f"collectives={collectives!r} came after workers had connected in another way: "
                "choose it in the first call of tfmw.init, and before TensorFlow's first op."
            )
        joined.make = _over_grpc
    joined.options = communication_options(collectives, bytes_per_pack, timeout_s)
    joined.collectives = collectives
    if over_grpc and joined.made is None:
        joined.made = _over_grpc(joined)


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
    _meet(cluster, facts, start_timeout_s)
    from tfmw.cluster.group import Group

    _bound_threads()
    options = communication_options(collectives, bytes_per_pack, timeout_s)
    over_grpc = collectives in GRPC
    if not over_grpc and any(Group.of_cluster(cluster).from_all(_has_other_devices())):
        if collectives == "tfmw":
            raise UsageError(
                'collectives="tfmw" needs workers of one CPU device each, and a worker here has '
                'other devices: use "auto".'
            )
        over_grpc = True
    make = _over_grpc if over_grpc else _over_ring
    joined = JoinedCluster(cluster, make, options, collectives=collectives)
    joined.rejoin = functools.partial(_meet, cluster, facts, start_timeout_s)
    if over_grpc:
        joined.made = _over_grpc(joined)
    else:
        _add_a_thread()
    membership.set_joined(joined)
    _guard_models(cluster)
    _end_at_sigterm()
    membership.end_together(cluster)
    logger.info("%r: in, %d workers", cluster, cluster.num_workers)


def _meet(cluster: Cluster, facts: Mapping[str, str], timeout_s: float) -> None:
    """Connects to the other workers."""
    channels = rendezvous.meet(cluster, facts, timeout_s=timeout_s)
    with without_collection():
        from tfmw.cluster import coordination

    names = list(cluster.tasks("chief", "worker"))
    coordination.use(coordination.Coordination(cluster.rank, names, channels))


def _has_other_devices() -> bool:
    """Whether this process has GPUs, or several virtual devices."""
    import tensorflow as tf

    processor = tf.config.list_physical_devices("CPU")[0]
    virtual = tf.config.get_logical_device_configuration(processor) or ()
    return bool(tf.config.list_physical_devices("GPU")) or len(virtual) > 1


def _over_ring(joined: JoinedCluster) -> tf.distribute.Strategy:
    """The strategy of synchronous workers over tfmw's own ring."""
    make = importlib.import_module("tfmw").connected_strategy  # of a room above this one
    strategy: tf.distribute.Strategy = make(joined, _resolver(joined.cluster))
    return strategy


def _over_grpc(joined: JoinedCluster) -> tf.distribute.Strategy:
    """TensorFlow's own strategy, whose servers listen on the addresses of the tasks."""
    _require_not_started()
    _warn_of_open_ports(joined.cluster)
    import tensorflow as tf

    from tfmw.cluster import coordination
    from tfmw.compat import runtime

    tasks = joined.cluster.tasks("chief", "worker")
    hosts = {addresses.split(address)[0] for address in tasks.values()}
    os.environ.setdefault("no_grpc_proxy", ",".join(sorted(hosts)))  # a user's proxy cannot help
    jobs = collections.Counter(name.partition(" ")[0] for name in tasks)
    leader = f"/job:{'chief' if 'chief' in jobs else 'worker'}/replica:0/task:0"
    runtime.configure_coordination(dict(jobs), leader)
    strategy = tf.distribute.MultiWorkerMirroredStrategy(
        cluster_resolver=_resolver(joined.cluster), communication_options=joined.options
    )
    coordination.current().at_failure.append(runtime.abort_collectives)
    return strategy


def _warn_of_open_ports(cluster: Cluster) -> None:
    """Warns of gRPC servers that strangers may reach."""
    hosts = {addresses.split(address)[0] for address in cluster.tasks().values()}
    if public := cluster.public_addresses():
        where = f"{', '.join(public)} is a public address; keep the cluster in a private network"
    elif hosts == {"127.0.0.1"} and ISOLATED not in os.environ:
        where = "start the tasks in a private network of their own: tfmw run --isolate on"
    else:
        return
    if not cluster.is_chief:
        return
    logger.warning(
        "tf.distribute's gRPC has no authentication: anyone who can connect to it can run code: "
        "%s.",
        where,
    )


def _resolver(cluster: Cluster) -> tf.distribute.cluster_resolver.ClusterResolver:
    import tensorflow as tf

    tasks = cluster.as_tf_config()["cluster"]
    return tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec({k: v for k, v in tasks.items() if k in ("chief", "worker")}),
        task_type=cluster.task,
        task_id=cluster.index,
        num_accelerators={"GPU": len(tf.config.list_physical_devices("GPU"))},
        rpc_layer="grpc",
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
    _warn_of_open_ports(cluster)
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
    membership.set_joined(
        JoinedCluster(cluster, lambda _: connected, options, control=control, made=connected)
    )
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

    exports = itertools.count()  # equal on all workers, as they run the same script

    def after_export() -> None:
        """Waits for the chief's export, which the next lines of the script may load."""
        from tfmw.cluster.group import Group

        group, key = Group.of_cluster(cluster), f"exported/{next(exports)}"
        if cluster.has_ps or group.size == 1:
            return
        with blocking_call("export"), contextlib.suppress(OSError):  # the loss of a task is told
            if cluster.is_chief:
                group.post(key, True)
            else:
                group.posted(key, _EXPORT_S)

    guard_models(refuse, cluster.is_chief, after_export)
    _share_downloads()


def _share_downloads() -> None:
    from tfmw.compat.downloads import share_downloads

    share_downloads()


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

    setting = os.environ.get("TF_NUM_INTEROP_THREADS", "")
    chosen = tf.config.threading.get_inter_op_parallelism_threads()
    chosen = chosen or (int(setting) if setting.isdecimal() else 0) or len(os.sched_getaffinity(0))
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
            'use "grpc", or "auto".'
        )
    name = {"tfmw": "AUTO", "grpc": "RING"}.get(collectives, collectives.upper())
    if bytes_per_pack is None:
        bytes_per_pack = 0 if collectives == "nccl" or gpus else RING_BYTES_PER_PACK
    return tf.distribute.experimental.CommunicationOptions(
        bytes_per_pack=bytes_per_pack,
        timeout_seconds=timeout_s,
        implementation=tf.distribute.experimental.CommunicationImplementation(name),
    )


def require_collectives(collectives: Any) -> str:
    """The name of a transport. Raises UsageError if there is none of that name."""
    if collectives == "ring":
        warnings.warn('collectives="ring" is now "grpc".', FutureWarning, stacklevel=2)
        return "grpc"
    require_choice("collectives", collectives, COLLECTIVES)
    return str(collectives)


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
