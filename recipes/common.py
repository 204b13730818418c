"""Shared by the recipes: their flags, and joining the cluster that the flags describe.

A recipe is one script for every task of the cluster. Its flags describe the task,

    python recipes/digits.py --worker_hosts=localhost:2222,localhost:2223 --task_index=0
    python recipes/digits.py --worker_hosts=localhost:2222,localhost:2223 --task_index=1

or, without them, `tfmw run`, TF_CONFIG or the scheduler. Otherwise it is a single process.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import coordinator
import keras
import tensorflow as tf
from absl import app, flags, logging

import tfmw
from tfmw import strategies
from tfmw.cluster import Cluster, addresses, membership
from tfmw.errors import TfmwError, UsageError

FLAGS = flags.FLAGS

flags.DEFINE_string(
    "strategy", "auto", "Strategy: auto, or another value of tfmw.init(strategy=...)."
)
flags.DEFINE_string("collectives", "auto", "All-reduce of gradients: auto, tfmw, grpc or nccl.")
flags.DEFINE_integer("epochs", 12, "Epochs over the training data.", lower_bound=1)
flags.DEFINE_integer("max_steps", None, "Stop after this many global batches.", lower_bound=1)
flags.DEFINE_integer("batch_size", 64, "Examples in a global batch, over all workers.", 1)
flags.DEFINE_string("backup_dir", None, "Directory for backups, from which a run resumes.")
flags.DEFINE_string("export_dir", None, "Directory for the exported model.")
flags.DEFINE_enum(
    "job_name", "worker", ["chief", "worker", "ps", "evaluator"], "Task type of this process."
)
flags.DEFINE_integer("task_index", None, "Index of this task in its job, from 0.", lower_bound=0)
flags.DEFINE_list("worker_hosts", [], "host:port of every worker, in order.")
flags.DEFINE_list("ps_hosts", [], "host:port of every parameter server, in order.")
flags.DEFINE_string(
    "chief_host",
    None,
    "host:port of the coordinator of parameter servers, --job_name=chief; without it, the process "
    "of worker 0 starts the coordinator beside itself.",
)
flags.DEFINE_boolean("existing_servers", False, "Serve one training after another (ps, worker).")
flags.DEFINE_integer("min_shard_bytes", None, "Divide larger variables over parameter servers.", 1)
flags.DEFINE_boolean("sync_replicas", False, "Aggregate gradients on the parameter servers.")
flags.DEFINE_integer("replicas_to_aggregate", None, "Gradients to wait for in a step.", 1)
flags.DEFINE_integer("num_gpus", None, "GPUs of this machine to use; all by default.", 0)


def run(main: Callable[[], None]) -> None:
    """Parses the flags and runs `main`; an error of tfmw is one sentence and an exit status."""

    def checked(argv: Sequence[str]) -> None:
        if not FLAGS["verbosity"].present:
            logging.set_verbosity(logging.WARNING)
            tf.get_logger().setLevel("WARNING")
        try:
            if len(argv) > 1:
                raise UsageError(f"unexpected argument {argv[1]!r}: every setting is a --flag.")
            main()
        except TfmwError as error:
            membership.report_failure(error)  # ends the other tasks, which wait for this one
            print(f"{os.path.basename(sys.argv[0])}: {error}", file=sys.stderr)
            raise SystemExit(error.status) from error

    for flag in FLAGS.get_key_flags_for_module(__name__):  # for --help, beside the recipe's own
        FLAGS.register_key_flag_for_module(sys.argv[0], flag)
    app.run(checked)


def init() -> Cluster:
    """Joins the cluster that the flags or the environment describe. Call it before any op.

    On parameter servers, and on the workers beside them, it serves and does not return.

    Raises:
        UsageError: flags that contradict each other.
    """
    cluster = cluster_from_flags()
    _limit_gpus()
    with _coordinator_of(cluster):
        joined = tfmw.init(
            cluster,
            strategy=FLAGS.strategy,
            collectives=FLAGS.collectives,
            existing_servers=FLAGS.existing_servers or None,
        )
    if joined.has_ps and joined.is_chief:
        strategies.parameter_server(
            min_shard_bytes=FLAGS.min_shard_bytes,
            sync_replicas=FLAGS.sync_replicas,
            replicas_to_aggregate=FLAGS.replicas_to_aggregate,
        )
    elif not joined.has_ps and (FLAGS.sync_replicas or FLAGS.replicas_to_aggregate):
        raise UsageError(
            "--sync_replicas is for parameter servers, and this cluster has none: pass --ps_hosts, "
            "or leave it out; without servers, workers are always in step."
        )
    return joined


def cluster_from_flags() -> Cluster | None:
    """The cluster of --worker_hosts, --job_name and --task_index; None if they are missing.

    Raises:
        UsageError: --worker_hosts is missing, or it names several and --task_index is missing.
        tfmw.errors.ClusterError: the addresses or the task are wrong.
    """
    if not FLAGS.worker_hosts:
        given = [n for n in ("job_name", "task_index", "ps_hosts") if FLAGS[n].present]
        if given:
            raise UsageError(
                f"--{given[0]} is given and --worker_hosts is not; list the workers, for example "
                "--worker_hosts=localhost:2222,localhost:2223."
            )
        return None
    if FLAGS.ps_hosts:
        return _cluster_with_ps()
    if FLAGS.task_index is None and len(FLAGS.worker_hosts) > 1:
        raise UsageError(
            f"--worker_hosts names {len(FLAGS.worker_hosts)} workers and --task_index is missing; "
            "give each process its own, --task_index=0 to the first."
        )
    return Cluster(
        workers=tuple(FLAGS.worker_hosts), task=FLAGS.job_name, index=FLAGS.task_index or 0
    )


def _cluster_with_ps() -> Cluster:
    hosts = {"worker": FLAGS.worker_hosts, "ps": FLAGS.ps_hosts}.get(FLAGS.job_name, [])
    if FLAGS.task_index is None and len(hosts) > 1:
        raise UsageError(
            f"--{FLAGS.job_name}_hosts names {len(hosts)} tasks and --task_index is missing; "
            "give each process its own, --task_index=0 to the first."
        )
    workers = addresses.validated("worker", FLAGS.worker_hosts, "--worker_hosts")
    servers = addresses.validated("ps", FLAGS.ps_hosts, "--ps_hosts")
    return Cluster(
        workers=workers,
        ps=servers,
        chief=(FLAGS.chief_host or coordinator.address(workers, servers),),
        task=FLAGS.job_name,
        index=FLAGS.task_index or 0,
    )


def _coordinator_of(cluster: Cluster | None) -> AbstractContextManager[None]:
    """Starts the coordinator, on worker 0, if no flag names one and servers serve one training."""
    existing = FLAGS.existing_servers or os.environ.get("TFMW_EXISTING_SERVERS") == "1"
    if cluster is None or not cluster.has_ps or FLAGS.chief_host or existing:
        return coordinator.unless_coordinated()
    if cluster.task_name != "worker 0":
        return coordinator.unless_coordinated()
    return coordinator.beside(cluster)


def _limit_gpus() -> None:
    if FLAGS.num_gpus is None:
        return
    gpus = tf.config.list_physical_devices("GPU")
    if FLAGS.num_gpus > len(gpus):
        raise UsageError(f"--num_gpus={FLAGS.num_gpus}, but TensorFlow sees {len(gpus)} here.")
    try:
        tf.config.set_visible_devices(gpus[: FLAGS.num_gpus], "GPU")
    except RuntimeError as error:  # `tfmw run` joined the cluster before the flags were read
        raise UsageError(
            f"--num_gpus={FLAGS.num_gpus} comes too late: TensorFlow has started. "
            "Set CUDA_VISIBLE_DEVICES instead."
        ) from error


def limits(data: tf.data.Dataset, cluster: Cluster) -> tuple[tf.data.Dataset, int, int | None]:
    """(training data, epochs, steps_per_epoch) of a call of fit, by --epochs and --max_steps.

    Args:
        data: batched by the global batch size.
        cluster: the result of `init`.
    """
    if cluster.has_ps:
        # Workers repeat the data: only a number of updates ends an epoch.
        steps = FLAGS.max_steps or int(data.cardinality())
        return data, 1 if FLAGS.max_steps else FLAGS.epochs, steps
    if FLAGS.max_steps is None:
        return data, FLAGS.epochs, None
    # One epoch of exactly max_steps batches; the data is repeated as often as needed.
    return data.repeat(FLAGS.epochs).take(FLAGS.max_steps), 1, None


def report(history: keras.callbacks.History, cluster: Cluster) -> None:
    """Prints the accuracy after the last epoch, on the chief."""
    if cluster.is_chief:
        print(f"validation accuracy: {history.history['val_accuracy'][-1]:.4f}", flush=True)
        if FLAGS.export_dir:
            print(f"exported to {FLAGS.export_dir}", flush=True)
