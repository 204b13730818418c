"""The report of `tfmw env`: versions, devices and environment, to paste in an issue.

Secrets are hidden: values of variables with telling names, and passwords inside values.

    shown("WANDB_API_KEY", "1a2b")                     # "(hidden)"
    shown("TFMW_DATA", "s3://user:1a2b@host/data")     # "s3://(hidden)@host/data"
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator, Mapping

from tfmw.cluster import Cluster
from tfmw.errors import ClusterError
from tfmw.runtime.versions import ask_tensorflow, version

PACKAGES = ("tfmw", "tensorflow", "keras", "tensorflow-datasets", "numpy", "protobuf", "absl-py")
PREFIXES = ("TF_", "TFMW_", "SLURM_", "OMPI_", "PMIX_", "JOB_", "KERAS_", "CUDA_", "NCCL_", "OMP_")
NAMES = ("CLUSTER_SPEC", "SM_HOSTS", "SM_CURRENT_HOST")

HIDDEN = "(hidden)"

_NAME = re.compile("KEY|TOKEN|SECRET|PASS|PWD|CREDENTIAL|JWT|AUTH|COOKIE|SIGNATURE", re.IGNORECASE)
# postgres://user:password@host, https://token@host
_IN_URL = re.compile(r"(?<=://)[^/\s@'\"]+(?=@)")
# --api_key=1a2b, "password": "1a2b", ?sig=1a2b, in command lines and JSON inside variables
_IN_TEXT = re.compile(
    r"((?:key|token|secret|password|passwd|pwd|credentials?|jwt|sig(?:nature)?)\\*[\"']?\s*[=:]"
    r"\s*\\*[\"']?)[^\s\"'&,;\\}]+",
    re.IGNORECASE,
)


def report(environ: Mapping[str, str]) -> str:
    """The report as lines of "name: value"."""
    return "\n".join(f"{name}: {value}" for name, value in facts(environ))


def facts(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """The report as (name, value)."""
    yield "python", f"{platform.python_version()} ({platform.python_implementation()})"
    for package in PACKAGES:
        yield package, version(package)
    yield "platform", platform.platform()
    yield "cores", f"{_usable_cores()} usable of {os.cpu_count()}"
    backend, gpus = ask_tensorflow()
    yield "keras backend", backend
    yield "gpus", gpus
    try:
        yield "cluster", repr(Cluster.resolve(environ))
    except ClusterError as error:
        yield "cluster", f"wrong: {error}"
    for name in sorted(environ):
        if name.startswith(PREFIXES) or name in NAMES:
            yield f"${name}", shown(name, environ[name])


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def shown(name: str, value: str) -> str:
    """The value of an environment variable, without secrets."""
    return (
        HIDDEN if _NAME.search(name) else _IN_TEXT.sub(rf"\1{HIDDEN}", _IN_URL.sub(HIDDEN, value))
    )
