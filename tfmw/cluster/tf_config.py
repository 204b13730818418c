"""The format of TF_CONFIG: all tasks of a cluster by type, and the task of this process.

    {"cluster": {"worker": ["h0:2222", "h1:2222"]}, "task": {"type": "worker", "index": 0}}

TensorFlow defines it (tensorflow.org/guide/distributed_training#TF_CONFIG). Standard library only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from tfmw.cluster import addresses
from tfmw.errors import ClusterError

TF_CONFIG = "TF_CONFIG"
TASK_TYPES = ("chief", "worker", "ps", "evaluator")

_EXAMPLE = '{"cluster": {"worker": ["h0:2222", "h1:2222"]}, "task": {"type": "worker", "index": 0}}'

_FIELDS = {"worker": "workers", "evaluator": "evaluators"}
_SOURCES = {
    "TF_CONFIG": "TF_CONFIG",
    "slurm": "the Slurm environment",
    "kubernetes": "the Kubernetes environment",
    "open mpi": "the Open MPI environment",
    "vertex": "CLUSTER_SPEC",
    "sagemaker": "the SageMaker environment",
    "hosts": "the list of hosts",
}


Fields = dict[str, Any]
"""The fields of a `Cluster` that a reader has found."""


def describe(source: str) -> str:
    """The name of a source in messages."""
    return _SOURCES.get(source, "the cluster")


def shortened(value: Any) -> str:
    """The value, or the first 200 characters of it."""
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def from_environ(environ: Mapping[str, str]) -> Fields | None:
    """The cluster in TF_CONFIG; None if it is not set."""
    text = environ.get(TF_CONFIG, "").strip()
    if not text:
        return None
    try:
        config = json.loads(text)
    except ValueError as error:
        raise ClusterError(
            f"TF_CONFIG is not valid JSON ({error}): received {shortened(text)}; write {_EXAMPLE}."
        ) from None
    return from_config(config, "TF_CONFIG")


def from_config(config: Any, source: str) -> Fields:
    """The cluster in an object of this format; a single process for an empty object.

    Args:
        config: {"cluster": {task type: [address]}, "task": {"type": ..., "index": ...}}.
        source: the source of the description, for messages.

    Raises:
        ClusterError: it has another format.
    """
    where = describe(source)
    jobs = config.get("cluster") if isinstance(config, Mapping) else None
    if not isinstance(config, Mapping) or not isinstance(jobs or {}, Mapping):
        raise ClusterError(
            f"{where} is {shortened(config)}; write an object "
            'with "cluster", the addresses by task type, and "task", this process\'s own.'
        )
    if not jobs:
        return {"source": "none"}
    members = _members(jobs, where)
    if not any(members.values()) or not jobs.get("worker", True):
        empty = "worker" if "worker" in jobs else next(iter(jobs))
        raise ClusterError(
            f'{where} lists no address under "{empty}"; '
            f"write {_EXAMPLE}, or leave it out where there are no such tasks."
        )
    task, index = _own_task(config.get("task"), members, where)
    return {
        **{_FIELDS.get(job, job): values for job, values in members.items()},
        "task": task,
        "index": index,
        "source": source,
    }


def _members(jobs: Mapping[str, Any], where: str) -> dict[str, tuple[str, ...]]:
    """Task type -> addresses, for every type."""
    unknown = [job for job in jobs if job not in (*TASK_TYPES, "master")]
    if unknown:
        raise ClusterError(
            f"{where} lists tasks of type {unknown[0]!r}; use chief, worker, ps or evaluator."
        )
    # The chief was called "master" before TensorFlow 1.5; Google's schedulers still use that name.
    if "master" in jobs and "chief" in jobs:
        raise ClusterError(
            f'{where} lists the chief twice, as "chief" and as "master"; keep "chief".'
        )
    renamed = {"chief" if job == "master" else job: value for job, value in jobs.items()}
    return {job: addresses.validated(job, renamed.get(job, ()), where) for job in TASK_TYPES}


def _own_task(task: Any, members: dict[str, tuple[str, ...]], where: str) -> tuple[str, int]:
    """(task type, index) of this process."""
    listed = [job for job, values in members.items() for _ in values]
    if not task:
        if len(listed) <= 1:
            return (listed or ["worker"])[0], 0
        raise ClusterError(
            f"{where} lists {len(listed)} tasks and doesn't say which one this process is; "
            'add "task": {"type": "worker", "index": 0}, with an index of its own for each process.'
        )
    if not isinstance(task, Mapping) or not isinstance(task.get("type"), str):
        raise ClusterError(
            f'{where} has {shortened(task)} as "task"; write {{"type": "worker", "index": 0}}.'
        )
    kind = "chief" if task["type"] == "master" else task["type"]
    index = task.get("index")
    if index is None:
        if len(members.get(kind, ())) > 1:
            raise ClusterError(
                f'{where} has no "index" in "task" and lists {len(members[kind])} tasks of '
                f'type "{kind}"; add the index of this process, from 0.'
            )
        index = 0
    if isinstance(index, str) and re.fullmatch("[0-9]+", index):
        index = int(index)  # TensorFlow accepts "1" too
    return kind, index
