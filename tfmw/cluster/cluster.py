"""The cluster of this process, and its task in it.

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
8. otherwise this process is a cluster of its own.

A description that was found and is wrong raises `ClusterError`; it never falls through to the next.
`tf_config` reads 1 and 2, `schedulers` 3 to 7.

This module uses the standard library only: it runs before TensorFlow is imported.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

from tfmw.cluster import addresses, schedulers, tf_config
from tfmw.cluster.tf_config import TASK_TYPES
from tfmw.errors import ClusterError, is_whole
from tfmw.observe import task_process

TOKEN = "TFMW_TOKEN"
"""Variable with a secret of the training, the same for all tasks."""

MAX_RESTARTS = "TFMW_MAX_RESTARTS"
"""Variable with the number of restarts that the launcher allows."""

REPLACES = "TFMW_REPLACES"
"""Variable of workers whose launcher replaces one that is lost, while the others wait for it."""

STATE_FOLDER = "TFMW_STATE_FOLDER"
"""Variable of such workers: a folder in memory, for copies of their state that outlive them."""

ISOLATED = "TFMW_ISOLATED"
"""Variable that says whether the task is in a private network; unset if no one has chosen."""

KERAS, BACKUP_DIR = "TFMW_KERAS", "TFMW_BACKUP_DIR"
"""Variables for scripts of plain Keras: "on" or "off", whether Keras's methods are tfmw's; the
directory of their backups."""


@dataclasses.dataclass(frozen=True, repr=False)
class Cluster:
    """All tasks of a cluster, and the task of this process.

    Args:
        workers: addresses "host:port" (IPv6: "[::1]:2222"), in the order of the tasks' indexes.
        ps: addresses of the parameter servers.
        chief: address of the chief, alone or in a sequence. Without one, worker 0 is the chief.
            In a cluster with parameter servers the chief is the coordinator, and trains nothing.
        evaluators: addresses of evaluators; an evaluator needs none to join.
        task: the type of this process: "chief", "worker", "ps" or "evaluator".
        index: index of this task among those of its type, from 0.
        source: the source of the description, for messages.

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
        if isinstance(self.chief, str):
            object.__setattr__(self, "chief", (self.chief,))
        where = tf_config.describe(self.source)
        for field in ("workers", "ps", "chief", "evaluators"):
            value = addresses.validated(field, getattr(self, field), where)
            object.__setattr__(self, field, value)
        _validate(self, where)

    @classmethod
    def resolve(
        cls,
        environ: Mapping[str, str] | None = None,
        cluster: Cluster | Mapping[str, Any] | None = None,
    ) -> Cluster:
        """The cluster of this process; see the module's docstring for the order.

        A process that a task has started with its own description, such as one of a pool of
        multiprocessing, has no cluster.

        Args:
            environ: environment to read; `os.environ` unless given.
            cluster: an explicit description, a `Cluster` or a dict in the form of TF_CONFIG.

        Raises:
            ClusterError: the first description found is malformed or contradicts itself.
        """
        if environ is None:
            environ = os.environ
        found = cls._described(environ, cluster)
        if task_process.is_child(found.as_tf_config(), environ):
            return cls(source="none")
        return found

    @classmethod
    def _described(
        cls, environ: Mapping[str, str], cluster: Cluster | Mapping[str, Any] | None
    ) -> Cluster:
        """The first description of the module's list."""
        if isinstance(cluster, Cluster):
            return cluster
        if cluster is not None:
            return cls(**tf_config.from_config(cluster, "explicit"))
        for read in schedulers.READERS:
            fields = read(environ)
            if fields is not None:
                return cls(**fields)
        return cls(source="none")

    @classmethod
    def of_hosts(cls, hosts: Sequence[str], index: int | None = None, ps: int = 0) -> Cluster:
        """The cluster of one task on each host.

        Args:
            hosts: names or addresses, with or without a port (default: 2222).
            index: the index of this host; by default that of the only host whose address is this
                machine's.
            ps: number of parameter servers: the last tasks. The first task is the coordinator.

        Raises:
            ClusterError: hosts are malformed or repeated, or none or several of them are this
                machine.
        """
        members = [addresses.with_port(host, addresses.DEFAULT_PORT) for host in hosts]
        addresses.validated("hosts", members, tf_config.describe("hosts"))
        index = addresses.local_index(members, index)
        return cls(**schedulers.ranked(members, index, {schedulers.TFMW_NUM_PS: str(ps)}, "hosts"))

    @property
    def is_single(self) -> bool:
        """Whether this process is the only one that trains: there is nothing to join."""
        return self.task != "evaluator" and len(self._members) <= 1

    @property
    def has_ps(self) -> bool:
        """Whether the cluster has parameter servers."""
        return bool(self.ps)

    @property
    def is_chief(self) -> bool:
        """Whether this process writes shared files. A single process does."""
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
    def task_name(self) -> str:
        """The name of this task in messages: "chief", "worker 1", "ps 0"."""
        return _task_name(self.task, self.index)

    def tasks(self, *types: str) -> dict[str, str]:
        """Name -> address of every task of these types (all by default), the chief first."""
        return {
            _task_name(job, index): address
            for job, members in self._jobs.items()
            if not types or job in types
            for index, address in enumerate(members)
        }

    @property
    def address(self) -> str | None:
        """This task's "host:port"; None for a single process and for an unlisted evaluator."""
        own = self._jobs[self.task]
        return own[self.index] if self.index < len(own) else None

    def public_addresses(self) -> tuple[str, ...]:
        """The addresses that are literal IP addresses of the public internet.

        A tf.distribute server has no authentication: anyone who can connect to it can run code.
        """
        return tuple(a for a in self._members + self.evaluators if addresses.is_global(a))

    def is_public(self) -> bool:
        """Whether any address is public; see `public_addresses`."""
        return bool(self.public_addresses())

    def as_tf_config(self) -> dict[str, Any]:
        """The cluster in the form of TF_CONFIG; {} for a process without any description."""
        cluster = {job: list(members) for job, members in self._jobs.items() if members}
        if not cluster:
            return {}
        return {"cluster": cluster, "task": {"type": self.task, "index": self.index}}

    @property
    def _jobs(self) -> dict[str, tuple[str, ...]]:
        members = (self.chief, self.workers, self.ps, self.evaluators)
        return dict(zip(TASK_TYPES, members, strict=True))

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


def _task_name(job: str, index: int) -> str:
    return job if job == "chief" else f"{job} {index}"


def _validate(cluster: Cluster, where: str) -> None:
    """Raises ClusterError for fields that contradict each other."""
    if cluster.task not in TASK_TYPES:
        raise ClusterError(
            f"{where} has {cluster.task!r} as this process's task type; "
            "use chief, worker, ps or evaluator."
        )
    if not is_whole(cluster.index, 0):
        raise ClusterError(
            f"{where} has {cluster.index!r} as this process's task index; "
            "use an integer from 0, such as 0 to 1 for two tasks."
        )
    _validate_jobs(cluster, where)
    if cluster._members:
        _validate_own_task(cluster, where)
    elif cluster.evaluators:
        raise ClusterError(
            f'{where} lists evaluators only; add the tasks that train, under "worker".'
        )
    elif cluster.task not in ("worker", "chief") or cluster.index != 0:
        raise ClusterError(
            f"{where} describes this process as {cluster.task} {cluster.index} of a cluster "
            'without tasks; list the addresses of its tasks under "cluster".'
        )


def _validate_jobs(cluster: Cluster, where: str) -> None:
    """Checks that addresses are distinct, with one chief, and the tasks that servers need."""
    if len(cluster.chief) > 1:
        raise ClusterError(
            f"{where} lists {len(cluster.chief)} chiefs ({', '.join(cluster.chief)}); "
            "keep one and make the others workers."
        )
    owners: dict[str, str] = {}
    for job, members in cluster._jobs.items():
        for i, address in enumerate(members):
            owner = owners.setdefault(address.lower(), f"{job} {i}")
            if owner != f"{job} {i}":
                raise ClusterError(
                    f"{where} lists {address} for both {owner} and {job} {i}; "
                    "give every task an address of its own."
                )
    if cluster.ps and not (cluster.chief and cluster.workers):
        missing = 'no "chief"' if not cluster.chief else 'no "worker"'
        raise ClusterError(
            f"{where} lists {len(cluster.ps)} ps and {missing}; "
            "parameter servers need one chief, which coordinates, and at least one worker."
        )


def _validate_own_task(cluster: Cluster, where: str) -> None:
    """Checks that this process is one of the listed tasks, or an evaluator."""
    own = cluster._jobs[cluster.task]
    if cluster.task == "evaluator" and not own:
        return
    if not own:
        listed = ", ".join(f"{len(a)} {job}" for job, a in cluster._jobs.items() if a)
        raise ClusterError(
            f"{where} describes this process as {cluster.task} {cluster.index}, but lists only "
            f'{listed}; add "{cluster.task}" to the cluster or correct the task.'
        )
    if cluster.index >= len(own):
        raise ClusterError(
            f"{where} describes this process as {cluster.task} {cluster.index}, but lists "
            f'{len(own)} task{"s" if len(own) > 1 else ""} of type "{cluster.task}", numbered '
            "from 0; add its address or correct the index."
        )
