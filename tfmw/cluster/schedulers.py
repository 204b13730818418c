"""Environment variables of schedulers: one reader for each scheduler.

    fields = from_slurm(os.environ)          # None: this process is not a task of a Slurm step
    Cluster(**fields)

A reader returns None if its scheduler did not start this process, or started it alone. It raises
`ClusterError` for variables that it finds and cannot use. To add a scheduler: its variables above,
a reader here, its place in `READERS`, its name in `tf_config.describe`, its rows in
tests/cluster/test_cluster.py.

Schedulers number the tasks from 0. All tasks are workers, and worker 0 is the chief. With
`TFMW_NUM_PS=k` task 0 is the coordinator ("chief"), the last k tasks are parameter servers, and the
tasks between are workers. Standard library only.
"""

from __future__ import annotations

import itertools
import json
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence

from tfmw.cluster import tf_config
from tfmw.cluster.addresses import DEFAULT_PORT, derived_port, with_port
from tfmw.cluster.tf_config import Fields
from tfmw.errors import ClusterError

# srun(1), "OUTPUT ENVIRONMENT VARIABLES". The STEP_ names describe this step, the others the whole
# job; a batch script has SLURM_PROCID=0 too, but belongs to no step.
SLURM_PROCID = "SLURM_PROCID"  # 5
SLURM_NTASKS = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")  # 8
SLURM_STEP = ("SLURM_STEP_ID", "SLURM_STEPID", "SLURM_STEP_NODELIST")
SLURM_NODELIST = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")  # n[01-03,7],m2
SLURM_TASKS_PER_NODE = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")  # 3(x2),1
SLURM_JOB_ID = ("SLURM_JOB_ID", "SLURM_JOBID")  # 4242
SLURM_STEP_ID = ("SLURM_STEP_ID", "SLURM_STEPID")  # 0
SLURM_DISTRIBUTION = "SLURM_DISTRIBUTION"  # block, cyclic, cyclic:block, plane=4, arbitrary
SLURM_NODEID = "SLURM_NODEID"  # 1: position of this task's node in the node list
SLURM_LOCALID = "SLURM_LOCALID"  # 2: position of this task on its node

# kubernetes.io/docs/concepts/workloads/controllers/job/#completion-mode: each pod of an indexed Job
# has an index, and the host name <job>-<index>, found in DNS as <job>-<index>.<headless service>.
JOB_COMPLETION_INDEX = "JOB_COMPLETION_INDEX"  # 1
HOSTNAME = "HOSTNAME"  # train-1

# docs.open-mpi.org, "Environment variables set for MPI applications".
OMPI_RANK = "OMPI_COMM_WORLD_RANK"  # 3
OMPI_SIZE = "OMPI_COMM_WORLD_SIZE"  # 4
OMPI_LOCAL_RANK = "OMPI_COMM_WORLD_LOCAL_RANK"  # 1
OMPI_LOCAL_SIZE = "OMPI_COMM_WORLD_LOCAL_SIZE"  # 2
PMIX_NAMESPACE = "PMIX_NAMESPACE"  # prterun-h0-1234@1: one name per mpirun

# cloud.google.com/vertex-ai/docs/training/distributed-training#cluster-variables
# {"cluster": {"workerpool0": ["cmle-training-workerpool0-ab-0:2222"], "workerpool1": [...]},
#  "environment": "cloud", "task": {"type": "workerpool1", "index": 0, "trial": "..."}}
CLUSTER_SPEC = "CLUSTER_SPEC"
WORKER_POOLS = {
    "workerpool0": "chief",
    "workerpool1": "worker",
    "workerpool2": "ps",
    "workerpool3": "evaluator",
}

# github.com/aws/sagemaker-training-toolkit, ENVIRONMENT_VARIABLES.md
SM_HOSTS = "SM_HOSTS"  # ["algo-1","algo-2"]
SM_CURRENT_HOST = "SM_CURRENT_HOST"  # algo-1

# Variables that complete those of the schedulers.
TFMW_PORT = "TFMW_PORT"  # 2222: first port on each host; tasks of one host take consecutive ports
TFMW_NUM_PS = "TFMW_NUM_PS"  # 2: the last 2 tasks are parameter servers
TFMW_NUM_WORKERS = "TFMW_NUM_WORKERS"  # 4 (Kubernetes: the Job has this many pods, +1 +ps with ps)
TFMW_SERVICE = "TFMW_SERVICE"  # train-svc, or train-svc.default.svc (Kubernetes)
TFMW_HOSTS = "TFMW_HOSTS"  # h0,h1 or h0:2222,h1:2222 (Kubernetes, Open MPI)

_NODELIST = re.compile(
    r"(?:[^\[\],\s]|\[[0-9]+(-[0-9]+)?(,[0-9]+(-[0-9]+)?)*\]|(?<=[^,]),(?=[^,]))+"
)


# ---- Slurm ----------------------------------------------------------------------------------


def from_slurm(environ: Mapping[str, str]) -> Fields | None:
    """The tasks of a Slurm job step, in the order of srun's numbers."""
    if SLURM_PROCID not in environ or _first(environ, SLURM_STEP) is None:
        return None
    total = _count(environ, SLURM_NTASKS, default="1", least=1)
    if total == 1:
        return None
    rank = _count(environ, (SLURM_PROCID,))
    nodelist = _first(environ, SLURM_NODELIST)
    if nodelist is None:
        raise ClusterError(f"{SLURM_NODELIST[0]} is not set; set it, or start the tasks with srun.")
    nodes = list(_expand_nodes(nodelist))
    if not nodes:  # n[3-1]
        raise ClusterError(
            f"the Slurm environment has the node list {nodelist!r}, which names no node; "
            "start the tasks with srun."
        )
    per_node_text = _first(environ, SLURM_TASKS_PER_NODE)
    if per_node_text is None and total % len(nodes):
        raise ClusterError(
            f"the Slurm environment has {total} tasks on {len(nodes)} nodes and no "
            f"{SLURM_TASKS_PER_NODE[0]}; set it, such as 3(x2),1, or start the tasks with srun."
        )
    per_node = (
        [total // len(nodes)] * len(nodes)
        if per_node_text is None
        else _expand_tasks_per_node(per_node_text)
    )
    if len(per_node) != len(nodes) or sum(per_node) != total:
        raise ClusterError(
            f"the Slurm environment contradicts itself: {total} tasks, the {len(nodes)} nodes "
            f"{nodelist}, and {per_node_text} tasks per node; start the tasks with one srun."
        )
    # (node, position on the node) of each task. srun(1), --distribution: block fills one node after
    # the other, cyclic assigns tasks in turn.
    slots = [(node, local) for node, count in enumerate(per_node) for local in range(count)]
    if environ.get(SLURM_DISTRIBUTION, "block").startswith("cyclic"):
        slots.sort(key=lambda slot: (slot[1], slot[0]))
    _check_slot(environ, rank, slots)
    port = _port(environ)
    if port is None:
        job = _count(environ, SLURM_JOB_ID, default="0")
        step = _count(environ, SLURM_STEP_ID, default="0")
        port = derived_port(job + 389 * step)
    addresses = [f"{nodes[node]}:{port + local}" for node, local in slots]
    return ranked(addresses, rank, environ, "slurm")


def _check_slot(environ: Mapping[str, str], rank: int, slots: list[tuple[int, int]]) -> None:
    """Compares this task's node and slot with the layout; some task detects a wrong layout."""
    if rank >= len(slots) or SLURM_NODEID not in environ or SLURM_LOCALID not in environ:
        return
    own = (_count(environ, (SLURM_NODEID,)), _count(environ, (SLURM_LOCALID,)))
    if own != slots[rank]:
        raise ClusterError(
            f"Slurm put task {rank} on node {own[0]} as its task {own[1]}, and the layout "
            f"{environ.get(SLURM_DISTRIBUTION, 'block')} would put it on node {slots[rank][0]} "
            f"as its task {slots[rank][1]}; start the tasks with srun --distribution=block."
        )


def _expand_nodes(text: str) -> Iterator[str]:
    """Expands a Slurm node list: "n[01-03,7],m2" is n01 n02 n03 n7 m2; "r[1-2]n[1-2]" is 4 nodes.

    slurm.conf(5), NodeName: ranges keep the width of their first number.
    """
    if not _NODELIST.fullmatch(text):
        raise ClusterError(
            f"the Slurm environment has the node list {text!r}; expected a form such as "
            "n[01-03,7],m2."
        )
    for name in re.split(r",(?![^\[]*\])", text):
        parts = re.split(r"\[([^\]]*)\]", name)  # literal, range, literal, range, ..., literal
        choices = [[p] if i % 2 == 0 else _expand_range(p) for i, p in enumerate(parts)]
        yield from map("".join, itertools.product(*choices))


def _expand_range(text: str) -> list[str]:
    numbers: list[str] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        numbers += [str(i).zfill(len(first)) for i in range(int(first), int(last or first) + 1)]
    return numbers


def _expand_tasks_per_node(text: str) -> list[int]:
    """Expands Slurm's tasks per node, srun(1): "3(x2),1" means 3, 3 and 1."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]+)(?:\(x([0-9]+)\))?", part.strip())
        if match is None:
            raise ClusterError(
                f"the Slurm environment has {text!r} as the tasks per node; "
                "expected a form such as 3(x2),1."
            )
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


# ---- Kubernetes -----------------------------------------------------------------------------


def from_kubernetes(environ: Mapping[str, str]) -> Fields | None:
    """The pods of an indexed Job, under their names in the DNS of its headless Service."""
    if JOB_COMPLETION_INDEX not in environ:
        return None
    index = _count(environ, (JOB_COMPLETION_INDEX,))
    port = _port(environ) or DEFAULT_PORT
    hosts = _hosts(environ)
    if hosts is not None:
        return ranked([with_port(host, port) for host in hosts], index, environ, "kubernetes")
    if TFMW_NUM_WORKERS not in environ:
        raise ClusterError(
            f"{JOB_COMPLETION_INDEX} is set, as in an indexed Job of Kubernetes, without the size "
            f"of the job: set {TFMW_NUM_WORKERS} to the number of workers and {TFMW_SERVICE} to "
            f"the Job's headless Service, or {TFMW_NUM_WORKERS}=1 where each pod trains alone."
        )
    workers = _count(environ, (TFMW_NUM_WORKERS,), least=1)
    ps = _count(environ, (TFMW_NUM_PS,), default="0")
    total = workers + ps + (1 if ps else 0)
    if total == 1:
        return None
    if TFMW_SERVICE not in environ:
        raise ClusterError(
            f"{TFMW_NUM_WORKERS} is {workers} and {TFMW_SERVICE} is not set; set it to the "
            "headless Service of the Job, under which its pods find each other."
        )
    job, dash, tail = environ.get(HOSTNAME, "").partition(".")[0].rpartition("-")
    if not dash or tail != str(index):
        raise ClusterError(
            f"{HOSTNAME} is {environ.get(HOSTNAME)!r}; expected <job>-{index}, as Kubernetes names "
            "the pods of an indexed Job: don't set it yourself, or list all hosts in "
            f"{TFMW_HOSTS}."
        )
    service = environ[TFMW_SERVICE]
    addresses = [f"{job}-{i}.{service}:{port}" for i in range(total)]
    return ranked(addresses, index, environ, "kubernetes")


# ---- Open MPI -------------------------------------------------------------------------------


def from_open_mpi(environ: Mapping[str, str]) -> Fields | None:
    """The processes of one mpirun."""
    if OMPI_RANK not in environ or OMPI_SIZE not in environ:
        return None
    rank, size = _count(environ, (OMPI_RANK,)), _count(environ, (OMPI_SIZE,), least=1)
    if size == 1:
        return None
    local_size = _count(environ, (OMPI_LOCAL_SIZE,), default="0")
    local_rank = _count(environ, (OMPI_LOCAL_RANK,), default="0")
    port = _port(environ)
    if port is None:
        name = environ.get(PMIX_NAMESPACE)
        port = DEFAULT_PORT if name is None else derived_port(zlib.crc32(name.encode()))
    hosts = _hosts(environ)
    if hosts is None and local_size == size:
        hosts = ["localhost"]
    if hosts is None:
        raise ClusterError(
            f"Open MPI started {size} processes on several hosts and doesn't tell them its hosts; "
            f"pass them on: mpirun -x {TFMW_HOSTS}=h0,h1 ..., in the order of the ranks."
        )
    if len(hosts) == size and not (local_size == size and len(set(hosts)) < size):
        return ranked([with_port(host, port) for host in hosts], rank, environ, "open mpi")
    # One entry per host: ranks fill the hosts one after the other (mpirun(1), --map-by slot).
    if len(hosts) * local_size != size or rank % local_size != local_rank:
        raise ClusterError(
            f"{TFMW_HOSTS} lists {len(hosts)} hosts for {size} processes of Open MPI, of which "
            f"{local_size} on this host; list one host:port per process, in the order of the ranks."
        )
    addresses = [f"{host}:{port + local}" for host in hosts for local in range(local_size)]
    return ranked(addresses, rank, environ, "open mpi")


# ---- Vertex AI ------------------------------------------------------------------------------


def from_vertex(environ: Mapping[str, str]) -> Fields | None:
    """The replicas of a Vertex AI custom job, described in the form of TF_CONFIG."""
    try:
        config = json.loads(environ.get(CLUSTER_SPEC, "{}"))
    except ValueError:
        return None  # other software may use this name too
    pools = config.get("cluster") if isinstance(config, Mapping) else None
    if not isinstance(pools, Mapping) or "workerpool0" not in pools:
        return None
    unknown = [pool for pool in pools if pool not in WORKER_POOLS]
    if unknown:
        raise ClusterError(
            f"{CLUSTER_SPEC} lists a worker pool {unknown[0]!r}; expected workerpool0 (the chief), "
            "workerpool1 (workers), workerpool2 (parameter servers) or workerpool3 (evaluators)."
        )
    task = config.get("task")
    if isinstance(task, Mapping):
        task = {**task, "type": WORKER_POOLS.get(task.get("type", ""), task.get("type"))}
    jobs = {WORKER_POOLS[pool]: addresses for pool, addresses in pools.items() if addresses}
    return tf_config.from_config({"cluster": jobs, "task": task}, "vertex")


# ---- SageMaker ------------------------------------------------------------------------------


def from_sagemaker(environ: Mapping[str, str]) -> Fields | None:
    """The hosts of a SageMaker training job."""
    text = environ.get(SM_HOSTS)
    if not text:
        return None
    try:
        hosts = json.loads(text)
    except ValueError:
        hosts = None
    if not isinstance(hosts, list) or not all(isinstance(host, str) for host in hosts):
        raise ClusterError(
            f"{SM_HOSTS} is {tf_config.shortened(text)}; expected a list such as "
            '["algo-1", "algo-2"].'
        )
    if len(hosts) <= 1:
        return None
    own = environ.get(SM_CURRENT_HOST)
    if own not in hosts:
        raise ClusterError(
            f"{SM_CURRENT_HOST} is {own!r}, which is not in {SM_HOSTS}, "
            f"{tf_config.shortened(text)}; set it to the name of this host."
        )
    port = _port(environ) or DEFAULT_PORT
    addresses = [with_port(host, port) for host in hosts]
    return ranked(addresses, hosts.index(own), environ, "sagemaker")


# ---- shared by the readers ---------------------------------------------------------------------


def ranked(addresses: list[str], rank: int, environ: Mapping[str, str], source: str) -> Fields:
    """The cluster in which the task of rank `rank` has `addresses[rank]`."""
    total, ps = len(addresses), _count(environ, (TFMW_NUM_PS,), default="0")
    if rank >= total:
        raise ClusterError(
            f"{tf_config.describe(source)} numbers this process {rank} of {total} tasks, which are "
            "numbered from 0; start as many processes as there are tasks."
        )
    if ps and ps > total - 2:
        raise ClusterError(
            f"{TFMW_NUM_PS} is {ps} with {total} tasks; parameter servers need one task more as "
            f"the chief and at least one as a worker: start {ps + 2} tasks or lower {TFMW_NUM_PS}."
        )
    chiefs, first_ps = min(ps, 1), total - ps
    tasks = ["chief"] * chiefs + ["worker"] * (first_ps - chiefs) + ["ps"] * ps
    return {
        "chief": tuple(addresses[:chiefs]),
        "workers": tuple(addresses[chiefs:first_ps]),
        "ps": tuple(addresses[first_ps:]),
        "task": tasks[rank],
        "index": tasks[:rank].count(tasks[rank]),
        "source": source,
    }


def _first(environ: Mapping[str, str], names: Sequence[str]) -> str | None:
    return next((environ[name] for name in names if environ.get(name)), None)


def _count(
    environ: Mapping[str, str], names: Sequence[str], default: str | None = None, least: int = 0
) -> int:
    """The whole number in the first of `names` that is set."""
    name = next((name for name in names if environ.get(name)), names[0])
    text = environ.get(name) or default
    if text is None or not re.fullmatch("[0-9]+", text) or int(text) < least:
        raise ClusterError(f"{name} is {text!r}; expected a whole number of at least {least}.")
    return int(text)


def _port(environ: Mapping[str, str]) -> int | None:
    if not environ.get(TFMW_PORT):
        return None
    port = _count(environ, (TFMW_PORT,), least=1)
    if port > 65535:
        raise ClusterError(f"{TFMW_PORT} is {port}; expected a port from 1 to 65535.")
    return port


def _hosts(environ: Mapping[str, str]) -> list[str] | None:
    text = environ.get(TFMW_HOSTS, "").strip()
    return [host.strip() for host in text.split(",")] if text else None


READERS: tuple[Callable[[Mapping[str, str]], Fields | None], ...] = (
    tf_config.from_environ,
    from_slurm,
    from_kubernetes,
    from_open_mpi,
    from_vertex,
    from_sagemaker,
)
"""The readers in the order in which `Cluster.resolve` calls them."""
