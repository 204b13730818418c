"""Which cluster is this process part of, and as which task.

    cluster = Cluster.resolve()              # reads os.environ once
    cluster = Cluster(workers=("h0:2222", "h1:2222"), task="worker", index=0)
    cluster.is_chief, cluster.num_workers    # True, 2

`Cluster.resolve` takes the first description it finds, in this order:

1. an explicit `cluster=` argument: a `Cluster`, or a dict in the form of TF_CONFIG;
2. `TF_CONFIG`;
3. Slurm: a task of a job step with several tasks (`srun`);
4. Kubernetes: a pod of an indexed Job;
5. Open MPI: a process of `mpirun`;
6. Vertex AI: a replica of a custom job;
7. SageMaker: a host of a training job;
8. otherwise this process is alone.

A description that was found and is wrong raises `ClusterError`; it never falls through to the next.
The launchers of 3 to 5 and 7 give each task a number r from 0. All tasks are workers, worker 0
being the chief; with `TFMW_NUM_PS=k` task 0 is the coordinator ("chief"), the last k tasks are
parameter servers, and those between are workers.

This module uses the standard library only: it answers before TensorFlow is imported.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import itertools
import json
import os
import re
import socket
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tfmw.errors import ClusterError

# {"cluster": {"worker": ["h0:2222", "h1:2222"]}, "task": {"type": "worker", "index": 0}}
# (tensorflow.org/guide/distributed_training#TF_CONFIG)
TF_CONFIG = "TF_CONFIG"

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

# kubernetes.io/docs/concepts/workloads/controllers/job/#completion-mode: an indexed Job gives each
# pod its index, and the host name <job>-<index>, found in DNS as <job>-<index>.<headless service>.
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

# What the launchers above don't tell.
TFMW_PORT = "TFMW_PORT"  # 2222: first port on each host; tasks of one host take consecutive ports
TFMW_NUM_PS = "TFMW_NUM_PS"  # 2: the last 2 tasks are parameter servers
TFMW_NUM_WORKERS = "TFMW_NUM_WORKERS"  # 4 (Kubernetes: the Job has this many pods, +1 +ps with ps)
TFMW_SERVICE = "TFMW_SERVICE"  # train-svc, or train-svc.default.svc (Kubernetes)
TFMW_HOSTS = "TFMW_HOSTS"  # h0,h1 or h0:2222,h1:2222 (Kubernetes, Open MPI)

TASK_TYPES = ("chief", "worker", "ps", "evaluator")
DEFAULT_PORT = 2222

_DERIVED_PORTS = range(12000, 32000)  # below Linux's ephemeral ports, which start at 32768
_PORTS_PER_JOB = 16  # jobs with neighbouring ids on one node don't take each other's ports

_ADDRESS = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+(%\w+)?\]|[^\s:/\[\]@]+):(?P<port>[0-9]{1,5})")

_NODELIST = re.compile(
    r"(?:[^\[\],\s]|\[[0-9]+(-[0-9]+)?(,[0-9]+(-[0-9]+)?)*\]|(?<=[^,]),(?=[^,]))+"
)

_WHERE = {
    "TF_CONFIG": "TF_CONFIG",
    "slurm": "the Slurm environment",
    "kubernetes": "the Kubernetes environment",
    "open mpi": "the Open MPI environment",
    "vertex": CLUSTER_SPEC,
    "sagemaker": "the SageMaker environment",
    "hosts": "the list of hosts",
}


@dataclasses.dataclass(frozen=True, repr=False)
class Cluster:
    """All tasks of a cluster, and which of them this process is.

    Args:
        workers: addresses "host:port" (IPv6: "[::1]:2222"), in the order of the tasks' indexes.
        ps: addresses of the parameter servers.
        chief: address of the chief, alone or in a sequence. Without one, worker 0 is the chief.
            In a cluster with parameter servers the chief is the coordinator, and trains nothing.
        evaluators: addresses of evaluators; an evaluator needs none to take part.
        task: "chief", "worker", "ps" or "evaluator": what this process is.
        index: which task of that type, from 0.
        source: where the description comes from, for messages.

    Raises:
        ClusterError: the description is malformed or contradicts itself.
    """

    workers: tuple[str, ...] = ()
    ps: tuple[str, ...] = ()
    chief: tuple[str, ...] = ()
    evaluators: tuple[str, ...] = ()
    task: str = "worker"
    index: int = 0
    source: str = "explicit"

    def __post_init__(self) -> None:
        for field in ("workers", "ps", "chief", "evaluators"):
            addresses = _addresses(field, getattr(self, field), _WHERE.get(self.source, field))
            object.__setattr__(self, field, addresses)
        _check(self)

    @classmethod
    def resolve(
        cls,
        environ: Mapping[str, str] | None = None,
        cluster: Cluster | Mapping[str, Any] | None = None,
    ) -> Cluster:
        """The cluster this process is part of; see the module's docstring for the order.

        Args:
            environ: environment to read; `os.environ` unless given.
            cluster: an explicit answer, as a `Cluster` or a dict in the form of TF_CONFIG.

        Raises:
            ClusterError: the first description found is malformed or contradicts itself.
        """
        if environ is None:
            environ = os.environ
        if isinstance(cluster, Cluster):
            return cluster
        if cluster is not None:
            return _from_config(cluster, "explicit")
        for read in (
            _from_tf_config,
            _from_slurm,
            _from_kubernetes,
            _from_open_mpi,
            _from_vertex,
            _from_sagemaker,
        ):
            found = read(environ)
            if found is not None:
                return found
        return cls(source="none")

    @classmethod
    def of_hosts(cls, hosts: Sequence[str], index: int | None = None, ps: int = 0) -> Cluster:
        """The cluster of one task on each host.

        Args:
            hosts: names or addresses, with a port or without (then 2222).
            index: which of them this process is on; by default the only one of them whose address
                is one of this machine's.
            ps: the last so many tasks are parameter servers, and the first one coordinates.

        Raises:
            ClusterError: malformed or repeated hosts, or which one this machine is can't be told.
        """
        addresses = [_with_port(host, DEFAULT_PORT) for host in hosts]
        _addresses("hosts", addresses, _WHERE["hosts"])
        if index is None:
            index = _own_host(addresses)
        return _ranked(addresses, index, {TFMW_NUM_PS: str(ps)}, "hosts")

    @property
    def is_single(self) -> bool:
        """Whether this process trains alone: there is nothing to join and nobody to wait for."""
        return self.task != "evaluator" and len(self._members) <= 1

    @property
    def has_ps(self) -> bool:
        """Whether the cluster has parameter servers."""
        return bool(self.ps)

    @property
    def is_chief(self) -> bool:
        """Whether this process writes what is written once. A process that is alone does."""
        if self.chief:
            return self.task == "chief"
        return self.task == "worker" and self.index == 0

    @property
    def num_workers(self) -> int:
        """Number of tasks that train: the workers, and the chief unless it coordinates servers."""
        chiefs = 0 if self.has_ps else len(self.chief)
        return max(1, chiefs + len(self.workers))

    @property
    def rank(self) -> int:
        """Position from 0 among the tasks that train, the chief first; -1 for the other tasks."""
        if self.task == "worker":
            return self.index + (0 if self.has_ps else len(self.chief))
        return 0 if self.task == "chief" and not self.has_ps else -1

    @property
    def address(self) -> str | None:
        """This task's "host:port"; None for a single process and for an unlisted evaluator."""
        addresses = self._jobs[self.task]
        return addresses[self.index] if self.index < len(addresses) else None

    def public_addresses(self) -> tuple[str, ...]:
        """The addresses that are literal IP addresses reachable from the whole internet.

        A tf.distribute server has no authentication: whoever reaches its port can run code.
        """
        return tuple(a for a in self._members + self.evaluators if _is_global(a))

    def is_public(self) -> bool:
        """Whether `public_addresses` finds any."""
        return bool(self.public_addresses())

    def as_tf_config(self) -> dict[str, Any]:
        """The cluster in the form of TF_CONFIG; {} for a process without any description."""
        cluster = {job: list(addresses) for job, addresses in self._jobs.items() if addresses}
        if not cluster:
            return {}
        return {"cluster": cluster, "task": {"type": self.task, "index": self.index}}

    @property
    def _jobs(self) -> dict[str, tuple[str, ...]]:
        addresses = (self.chief, self.workers, self.ps, self.evaluators)
        return dict(zip(TASK_TYPES, addresses, strict=True))

    @property
    def _members(self) -> tuple[str, ...]:
        return self.chief + self.workers + self.ps

    def __repr__(self) -> str:
        if not self._members:
            return "Cluster(single process)"
        own = self._jobs[self.task]
        what = self.task if self.task == "chief" or not own else f"{self.task} {self.index}"
        if own and self.task != "chief":
            what += f" of {len(own)}"
        parts = [f"{what} at {self.address}" if self.address else what]
        if self.chief and self.task != "chief":
            parts.append(f"chief at {self.chief[0]}")
        if self.workers and self.task != "worker":
            parts.append(f"{len(self.workers)} worker{'s' if len(self.workers) > 1 else ''}")
        if self.ps and self.task != "ps":
            parts.append(f"{len(self.ps)} ps")
        if self.source != "explicit":
            parts.append(f"from {self.source}")
        return f"Cluster({', '.join(parts)})"


def _addresses(job: str, value: Any, where: str) -> tuple[str, ...]:
    if isinstance(value, str):
        value = (value,)
    if not isinstance(value, Sequence):
        raise ClusterError(
            f'{where} gives {value!r} as the addresses of "{job}"; '
            'write a list such as ["h0:2222", "h1:2222"].'
        )
    for i, address in enumerate(value):
        match = _ADDRESS.fullmatch(address) if isinstance(address, str) else None
        if match is None or not 1 <= int(match["port"]) <= 65535:
            raise ClusterError(
                f'{where} gives {address!r} as address {i} of "{job}"; '
                'write "host:port" with a port from 1 to 65535, such as "h0:2222" or "[::1]:2222".'
            )
    return tuple(value)


def _check(cluster: Cluster) -> None:
    """Raises ClusterError for what no single field shows."""
    where = _WHERE.get(cluster.source, "the cluster")
    if cluster.task not in TASK_TYPES:
        raise ClusterError(
            f"{where} gives {cluster.task!r} as this process's task type; "
            "use chief, worker, ps or evaluator."
        )
    if isinstance(cluster.index, bool) or not isinstance(cluster.index, int) or cluster.index < 0:
        raise ClusterError(
            f"{where} gives {cluster.index!r} as this process's task index; "
            "use an integer from 0 to the number of its tasks less one."
        )
    if len(cluster.chief) > 1:
        raise ClusterError(
            f"{where} lists {len(cluster.chief)} chiefs ({', '.join(cluster.chief)}); "
            "keep one and make the others workers."
        )
    seen: dict[str, str] = {}
    for job, addresses in cluster._jobs.items():
        for i, address in enumerate(addresses):
            name = f"{job} {i}"
            if address.lower() in seen:
                raise ClusterError(
                    f"{where} gives {address} to both {seen[address.lower()]} and {name}; "
                    "give every task an address of its own."
                )
            seen[address.lower()] = name
    if cluster.ps and not (cluster.chief and cluster.workers):
        missing = 'no "chief"' if not cluster.chief else 'no "worker"'
        raise ClusterError(
            f"{where} lists {len(cluster.ps)} ps and {missing}; "
            "parameter servers need one chief, which coordinates, and at least one worker."
        )
    if not cluster._members:
        if cluster.evaluators:
            raise ClusterError(
                f'{where} lists evaluators only; add the tasks that train, under "worker".'
            )
        if cluster.task not in ("worker", "chief") or cluster.index != 0:
            raise ClusterError(
                f"{where} says that this process is {cluster.task} {cluster.index} of a cluster "
                'without tasks; list the addresses of its tasks under "cluster".'
            )
        return
    own = cluster._jobs[cluster.task]
    if cluster.task == "evaluator" and not own:
        return
    if not own:
        listed = ", ".join(f"{len(a)} {job}" for job, a in cluster._jobs.items() if a)
        raise ClusterError(
            f"{where} says that this process is {cluster.task} {cluster.index}, but lists only "
            f'{listed}; add "{cluster.task}" to the cluster or correct the task.'
        )
    if cluster.index >= len(own):
        raise ClusterError(
            f"{where} says that this process is {cluster.task} {cluster.index}, but lists "
            f'{len(own)} task{"s" if len(own) > 1 else ""} of type "{cluster.task}", numbered '
            "from 0; add its address or correct the index."
        )


def _is_global(address: str) -> bool:
    host = address.rpartition(":")[0].strip("[]").partition("%")[0]
    try:
        return ipaddress.ip_address(host).is_global
    except ValueError:
        return False


# ---- TF_CONFIG ------------------------------------------------------------------------------


def _from_tf_config(environ: Mapping[str, str]) -> Cluster | None:
    text = environ.get(TF_CONFIG, "").strip()
    if not text:
        return None
    try:
        config = json.loads(text)
    except ValueError as error:
        raise ClusterError(
            f"TF_CONFIG is not valid JSON ({error}): received {_short(text)}; write "
            '{"cluster": {"worker": ["h0:2222", "h1:2222"]}, '
            '"task": {"type": "worker", "index": 0}}.'
        ) from None
    return _from_config(config, "TF_CONFIG")


def _from_config(config: Any, source: str) -> Cluster:
    """Reads the form of TF_CONFIG: {"cluster": {job: [address]}, "task": {"type", "index"}}."""
    where = _WHERE.get(source, "the cluster")
    jobs = config.get("cluster") if isinstance(config, Mapping) else None
    if not isinstance(config, Mapping) or not isinstance(jobs or {}, Mapping):
        raise ClusterError(
            f"{where} is {_short(config)}; write an object "
            'with "cluster", the addresses by task type, and "task", this process\'s own.'
        )
    if not jobs:
        return Cluster(source="none")
    unknown = [job for job in jobs if job not in (*TASK_TYPES, "master")]
    if unknown:
        raise ClusterError(
            f"{where} lists tasks of type {unknown[0]!r}; use chief, worker, ps or evaluator."
        )
    # "master" is the name that the chief had before TensorFlow 1.5; Google's schedulers kept it.
    if "master" in jobs and "chief" in jobs:
        raise ClusterError(
            f'{where} lists the chief twice, as "chief" and as "master"; keep "chief".'
        )
    chief = jobs.get("chief", jobs.get("master", ()))
    addresses = {
        job: _addresses(job, value, where)
        for job, value in (("chief", chief), *jobs.items())
        if job in TASK_TYPES
    }
    task, index = _own_task(config.get("task"), addresses, where)
    return Cluster(
        workers=addresses.get("worker", ()),
        ps=addresses.get("ps", ()),
        chief=addresses["chief"],
        evaluators=addresses.get("evaluator", ()),
        task=task,
        index=index,
        source=source,
    )


def _own_task(task: Any, addresses: dict[str, tuple[str, ...]], where: str) -> tuple[str, int]:
    listed = [job for job, values in addresses.items() for _ in values]
    if not task:
        if len(listed) <= 1:
            return (listed or ["worker"])[0], 0
        raise ClusterError(
            f"{where} lists {len(listed)} tasks and doesn't say which one this process is; "
            'add "task": {"type": "worker", "index": 0}, with an index of its own for each process.'
        )
    if not isinstance(task, Mapping) or not isinstance(task.get("type"), str):
        raise ClusterError(
            f'{where} gives {_short(task)} as "task"; write {{"type": "worker", "index": 0}}.'
        )
    kind = "chief" if task["type"] == "master" else task["type"]
    index = task.get("index")
    if index is None:
        if kind in TASK_TYPES and len(addresses.get(kind, ())) > 1:
            raise ClusterError(
                f'{where} gives no "index" in "task" and lists {len(addresses[kind])} tasks of '
                f'type "{kind}"; add the index of this process, from 0.'
            )
        index = 0
    if isinstance(index, str) and re.fullmatch("[0-9]+", index):
        index = int(index)  # TensorFlow accepts "1" too
    return kind, index


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


# ---- Slurm ----------------------------------------------------------------------------------


def _from_slurm(environ: Mapping[str, str]) -> Cluster | None:
    if SLURM_PROCID not in environ or _first(environ, SLURM_STEP) is None:
        return None
    total = _count(environ, SLURM_NTASKS, default="1", least=1)
    if total == 1:
        return None
    rank = _count(environ, (SLURM_PROCID,))
    nodelist = _need(environ, SLURM_NODELIST, "start the tasks with srun")
    nodes = list(_expand_nodes(nodelist))
    if not nodes:  # n[3-1]
        raise ClusterError(
            f"the Slurm environment gives the node list {nodelist!r}, which names no node; "
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
    slots = _layout(per_node, environ.get(SLURM_DISTRIBUTION, "block"))
    _check_slot(environ, rank, slots)
    port = _port(environ)
    if port is None:
        job = _count(environ, SLURM_JOB_ID, default="0")
        step = _count(environ, SLURM_STEP_ID, default="0")
        port = _derived_port(job + 389 * step)
    addresses = [f"{nodes[node]}:{port + local}" for node, local in slots]
    return _ranked(addresses, rank, environ, "slurm")


def _layout(per_node: list[int], distribution: str) -> list[tuple[int, int]]:
    """(node, position on the node) of each task, in the order of the tasks' numbers.

    srun(1), --distribution: block fills one node after the other, cyclic deals the tasks out.
    """
    slots = [(node, local) for node, count in enumerate(per_node) for local in range(count)]
    if distribution.startswith("cyclic"):
        slots.sort(key=lambda slot: (slot[1], slot[0]))
    return slots


def _check_slot(environ: Mapping[str, str], rank: int, slots: list[tuple[int, int]]) -> None:
    """Each task compares its own place with the layout, so a wrong layout is seen by some task."""
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
            f"the Slurm environment gives the node list {text!r}; expected a form such as "
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
    """srun(1): tasks per node look like 3(x2),1, which is 3 3 1."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]+)(?:\(x([0-9]+)\))?", part.strip())
        if match is None:
            raise ClusterError(
                f"the Slurm environment gives {text!r} as the tasks per node; "
                "expected a form such as 3(x2),1."
            )
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


# ---- Kubernetes -----------------------------------------------------------------------------


def _from_kubernetes(environ: Mapping[str, str]) -> Cluster | None:
    if JOB_COMPLETION_INDEX not in environ:
        return None
    index = _count(environ, (JOB_COMPLETION_INDEX,))
    port = _port(environ) or DEFAULT_PORT
    hosts = _hosts(environ)
    if hosts is not None:
        return _ranked([_with_port(host, port) for host in hosts], index, environ, "kubernetes")
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
    return _ranked(addresses, index, environ, "kubernetes")


# ---- Open MPI -------------------------------------------------------------------------------


def _from_open_mpi(environ: Mapping[str, str]) -> Cluster | None:
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
        port = DEFAULT_PORT if name is None else _derived_port(zlib.crc32(name.encode()))
    hosts = _hosts(environ)
    if hosts is None and local_size == size:
        hosts = ["localhost"]
    if hosts is None:
        raise ClusterError(
            f"Open MPI started {size} processes on several hosts and doesn't tell them its hosts; "
            f"pass them on: mpirun -x {TFMW_HOSTS}=h0,h1 ..., in the order of the ranks."
        )
    if len(hosts) == size and not (local_size == size and len(set(hosts)) < size):
        return _ranked([_with_port(host, port) for host in hosts], rank, environ, "open mpi")
    # One entry per host: ranks fill the hosts one after the other (mpirun(1), --map-by slot).
    if len(hosts) * local_size != size or rank % local_size != local_rank:
        raise ClusterError(
            f"{TFMW_HOSTS} lists {len(hosts)} hosts for {size} processes of Open MPI, of which "
            f"{local_size} on this host; list one host:port per process, in the order of the ranks."
        )
    addresses = [f"{host}:{port + local}" for host in hosts for local in range(local_size)]
    return _ranked(addresses, rank, environ, "open mpi")


# ---- Vertex AI ------------------------------------------------------------------------------


def _from_vertex(environ: Mapping[str, str]) -> Cluster | None:
    try:
        config = json.loads(environ.get(CLUSTER_SPEC, "{}"))
    except ValueError:
        return None  # the name is not Vertex's alone
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
    return _from_config({"cluster": jobs, "task": task}, "vertex")


# ---- SageMaker ------------------------------------------------------------------------------


def _from_sagemaker(environ: Mapping[str, str]) -> Cluster | None:
    text = environ.get(SM_HOSTS)
    if not text:
        return None
    try:
        hosts = json.loads(text)
    except ValueError:
        hosts = None
    if not isinstance(hosts, list) or not all(isinstance(host, str) for host in hosts):
        raise ClusterError(
            f'{SM_HOSTS} is {_short(text)}; expected a list such as ["algo-1", "algo-2"].'
        )
    if len(hosts) <= 1:
        return None
    own = environ.get(SM_CURRENT_HOST)
    if own not in hosts:
        raise ClusterError(
            f"{SM_CURRENT_HOST} is {own!r}, which is not in {SM_HOSTS}, {_short(text)}; set it to "
            "the name of this host."
        )
    port = _port(environ) or DEFAULT_PORT
    addresses = [_with_port(host, port) for host in hosts]
    return _ranked(addresses, hosts.index(own), environ, "sagemaker")


# ---- hosts by hand --------------------------------------------------------------------------


def _own_host(addresses: Sequence[str]) -> int:
    """The position of the only address that is this machine's."""
    own = [i for i, address in enumerate(addresses) if is_here(address)]
    if len(own) != 1:
        what = "none of them is" if not own else f"{len(own)} of them are"
        raise ClusterError(
            f"which of the hosts {', '.join(addresses)} this machine is can't be told: {what} an "
            "address of this machine; say it with --host-index, from 0."
        )
    return own[0]


def is_here(address: str) -> bool:
    """Whether the host of "host:port" is an address of this machine: one that it can listen on."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    for family, kind, protocol, _, where in found:
        try:
            with socket.socket(family, kind, protocol) as one:
                one.bind(where)
                return True
        except OSError:
            continue
    return False


# ---- what the launchers share -----------------------------------------------------------------


def _ranked(addresses: list[str], rank: int, environ: Mapping[str, str], source: str) -> Cluster:
    """The cluster in which task number `rank` has `addresses[rank]`."""
    total, ps = len(addresses), _count(environ, (TFMW_NUM_PS,), default="0")
    if rank >= total:
        raise ClusterError(
            f"{_WHERE[source]} numbers this process {rank} of {total} tasks, which are numbered "
            "from 0; start as many processes as there are tasks."
        )
    if ps == 0:
        return Cluster(workers=tuple(addresses), task="worker", index=rank, source=source)
    if ps > total - 2:
        raise ClusterError(
            f"{TFMW_NUM_PS} is {ps} with {total} tasks; parameter servers need one task more as "
            f"the chief and at least one as a worker: start {ps + 2} tasks or lower {TFMW_NUM_PS}."
        )
    first_ps = total - ps
    if rank == 0:
        task, index = "chief", 0
    elif rank < first_ps:
        task, index = "worker", rank - 1
    else:
        task, index = "ps", rank - first_ps
    return Cluster(
        workers=tuple(addresses[1:first_ps]),
        ps=tuple(addresses[first_ps:]),
        chief=(addresses[0],),
        task=task,
        index=index,
        source=source,
    )


def _first(environ: Mapping[str, str], names: Sequence[str]) -> str | None:
    return next((environ[name] for name in names if environ.get(name)), None)


def _need(environ: Mapping[str, str], names: Sequence[str], fix: str) -> str:
    value = _first(environ, names)
    if value is None:
        raise ClusterError(f"{names[0]} is not set; set it, or {fix}.")
    return value


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


def _derived_port(number: int) -> int:
    """A first port that all tasks of one job compute alike, and other jobs differently."""
    slots = len(_DERIVED_PORTS) // _PORTS_PER_JOB
    return _DERIVED_PORTS[number % slots * _PORTS_PER_JOB]


def _hosts(environ: Mapping[str, str]) -> list[str] | None:
    text = environ.get(TFMW_HOSTS, "").strip()
    return [host.strip() for host in text.split(",")] if text else None


def _with_port(host: str, port: int) -> str:
    return host if _ADDRESS.fullmatch(host) else f"{host}:{port}"
