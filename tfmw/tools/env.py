"""The report of `tfmw env`: versions, devices and environment, to paste in an issue."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Mapping

from tfmw.cluster import Cluster
from tfmw.errors import ClusterError
from tfmw.runtime import secrets
from tfmw.runtime.versions import ask_tensorflow, version

PACKAGES = ("tfmw", "tensorflow", "keras", "tensorflow-datasets", "numpy", "protobuf", "absl-py")
PREFIXES = ("TF_", "TFMW_", "SLURM_", "OMPI_", "PMIX_", "JOB_", "KERAS_", "CUDA_", "NCCL_", "OMP_")
NAMES = ("CLUSTER_SPEC", "SM_HOSTS", "SM_CURRENT_HOST")


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
            yield f"${name}", secrets.shown(name, environ[name])


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
